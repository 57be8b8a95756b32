"""Do Hadamard rotations lower the errors of a linear behind an outlier channel?

    python scripts/experiments/rotations.py --quick --outliers 4,6,8,10,12,15

Answer (2026-11-22, CPU): in INT8 yes, by 3 times and more up to a channel of about 2^8; in FP8 with one scale a tensor
they only add to them.

The model and the planted channel of cast_parity.py: after --shared-steps steps in BF16 one channel of every gated MLP's
product is 2^E times the typical one, and its column of down_proj as much smaller. The input, weight and output gradient
of the first layer's down_proj are then multiplied with one scale a tensor in INT8 and FP8 (E4M3, gradients E5M2), and
compared with the products of the same tensors in FP64: relative errors (Frobenius norm) of

    y     output            dx    input gradient            dw    weight gradient without the outlier's own column

"level 1" and "level 2" rotate as HALO does, "all" wgrad's input along in_features too, "tokens" wgrad along tokens, and
"smooth" is Smooth-SwiGLU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from byte_training import (
    Trunk,
    add_shared_steps,
    batch,
    build_model,
    read_sources,
    refuse_full_on_cpu,
)
from cast_parity import BF16, CHANNEL, FULL, QUICK, plant_outliers, train
from common import argument_parser, begin, print_table, whole_numbers, write_json
from torch import nn

from ds_fp8.config.errors import main_entry
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.layers.linear import FP8Linear
from ds_fp8.layers.recipe_from_config import recipe_from_config

_INT8 = {"format": "int8", "granularity": "tensor", "scale": "fp32"}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": dict.fromkeys(("input", "weight", "grad_output"), _INT8),
    "fp8": {
        "input": {"granularity": "tensor"},
        "weight": {"granularity": "tensor"},
        "grad_output": {"granularity": "tensor", "format": "e5m2"},
    },
}
LEVEL_1 = {"fprop": "in_features"}
LEVEL_2 = {**LEVEL_1, "dgrad": "tokens"}
VARIANTS: dict[str, dict[str, str]] = {
    "none": {},
    "level 1": LEVEL_1,
    "level 2": LEVEL_2,
    "tokens": {**LEVEL_2, "wgrad": "tokens"},
    "all": {**LEVEL_2, "wgrad": "in_features"},
    "smooth": {},
}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(trunk: Trunk, options: argparse.Namespace, text: torch.Tensor, exponent: int) -> Tensors:
    """Return input [T, K], weight [N, K] and output gradient [T, N] of the first down_proj, with a channel of 2^E."""
    scale = QUICK if options.quick else FULL
    model = build_model(scale, options.seed)
    model.load_state_dict(trunk.weights)
    rows = batch(text, scale, options.seed)
    plant_outliers(model, rows, exponent)
    found: dict[str, torch.Tensor] = {}
    down = model.model.layers[0].mlp.down_proj
    down.register_forward_hook(lambda layer, args, y: found.update(x=args[0].detach()))
    down.register_full_backward_hook(lambda layer, dx, dy: found.update(dy=dy[0].detach()))
    model(input_ids=rows, labels=rows).loss.backward()
    return found["x"].flatten(0, 1), down.weight.detach(), found["dy"].flatten(0, 1)


def errors(tensors: Tensors, format: str, variant: str) -> dict[str, float]:
    """Return the relative errors of y, dx and dw of one variant."""
    x, w, dy = tensors
    linear = {**FORMATS[format], "rotation": VARIANTS[variant], "backend": "reference"}
    recipe = recipe_from_config(FP8Config(linear=linear, param_gather={"format": "bf16"}, monitor={"every": 0}))
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(w.clone())
    layer.__class__, layer.recipe = FP8Linear, replace(recipe, smooth=variant == "smooth")
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    dx, dw = torch.autograd.grad(y, [leaf, layer.weight], dy)
    others = torch.arange(w.shape[1], device=w.device) != CHANNEL
    x, w, dy = (tensor.double() for tensor in tensors)
    pairs = {"y": (y, x @ w.t()), "dx": (dx, dy @ w), "dw": (dw[:, others], (dy.t() @ x)[:, others])}
    return {name: ((got - exact).norm() / exact.norm()).item() for name, (got, exact) in pairs.items()}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--outliers", type=whole_numbers, default=[4, 6, 8, 10, 12, 15])
    parser.add_argument("--seed", type=int, default=0)
    add_shared_steps(parser, 20)
    parser.add_argument("--lr", type=float, default=6e-4, help="peak learning rate (default 6e-4)")
    options = parser.parse_args(arguments)
    options.outlier = 0
    refuse_full_on_cpu(options)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    scale = QUICK if options.quick else FULL
    text = read_sources(scale.text)
    losses, optimizer, model, _ = train(BF16, scale, text, options.seed, options, None)
    trunk = Trunk(losses, model.state_dict(), optimizer.state_dict())
    rows = []
    for exponent in options.outliers:
        tensors = operands(trunk, options, text, exponent)
        for format in FORMATS:
            plain = errors(tensors, format, "none")
            for variant in VARIANTS:
                found = errors(tensors, format, variant)
                ratios = {f"{name} gain": plain[name] / found[name] for name in plain}
                rows.append({"exponent": exponent, "format": format, "rotation": variant, **found, **ratios})
    print_table(
        f"relative errors of one down_proj, {trunk.losses[-1]:.3f} nats, and how many times smaller than with none",
        tuple(rows[0]),
        [tuple(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()) for row in rows],
    )
    if options.json:
        write_json(options.json, machine=facts, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)

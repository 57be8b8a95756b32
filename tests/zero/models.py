"""Small models and engines on real ranks, shared by the tests of ds_fp8.zero."""

from __future__ import annotations

import contextlib
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

import ds_fp8.engine.attach
import ds_fp8.engine.initialize
from ds_fp8.casts import quantize
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import GROUP, UNSHARDED

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "data_types": {"grad_accum_dtype": "fp32"},
    "steps_per_print": 1000000,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    # Prefetch and reuse off: otherwise small models stay gathered and backward never gathers.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 300,
        "reduce_bucket_size": 2 * 10**7,  # the default is a buffer of a gigabyte, which an engine may leave behind
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    },
}


QUIET = {"monitor": {"every": 0}}
# Prefetch and reuse as large as they go
REUSED = {"stage3_prefetch_bucket_size": 10**8, "stage3_max_reuse_distance": 10**8}
OF_NET = ("recompute", "prepare", "layers", "born_sharded", "sizes", "own", "stock")


def config(fp8: dict | None = None, **zero) -> dict:
    """CONFIG with an fp8 section (none when None) and changes to zero_optimization."""
    result = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **zero}}
    return result if fp8 is None else {**result, "fp8": fp8}


class Block(nn.Module):
    """A residual MLP with awkward sizes, in which no weight divides by 2, 3 or 4 ranks evenly into rows or blocks."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Branches(nn.Module):
    """A residual layer whose first linears, of `sizes` outputs, are one fused product, as q, k and v are.

    group: whether their weights are marked as such. The product stacks them in another order than the model has them.
    """

    def __init__(self, hidden: int, sizes: tuple[int, ...], group: bool = True):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(hidden, size, bias=False) for size in reversed(sizes))
        self.join = nn.Linear(sum(sizes), hidden)
        weights = self.weights()
        for weight in weights if group else ():
            setattr(weight, GROUP, weights)

    def weights(self) -> tuple[nn.Parameter, ...]:
        """The weights of the fused product, in its order."""
        return tuple(branch.weight for branch in reversed(self.branches))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.join(torch.tanh(torch.cat([branch(x) for branch in self.branches], -1)))


class Net(nn.Module):
    """A language model of residual layers: two Blocks, or what each of `layers` makes of the hidden size."""

    def __init__(self, hidden: int = 131, inner: int = 301, recompute: bool = False, layers=None):
        super().__init__()
        self.embedding = nn.Embedding(61, hidden)
        made = [layer(hidden) for layer in layers] if layers else [Block(hidden, inner) for _ in range(2)]
        self.layers = nn.ModuleList(made)
        self.lm_head = nn.Linear(hidden, 61, bias=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.recompute and self.training:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        logits = self.lm_head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(
    ds_config: dict,
    *,
    recompute: bool = False,
    prepare=None,
    stock: bool = False,
    layers=None,
    born_sharded=False,
    sizes: tuple[int, int] = (131, 301),
    own: bool = True,
):
    """An engine around Net in BF16 with weights from seed 0.

    born_sharded: built under deepspeed.zero.Init. own: with this package's step where it can be, else DeepSpeed's.
    """
    torch.manual_seed(0)
    if born_sharded:
        with deepspeed.zero.Init(config_dict_or_path=ds_config, dtype=torch.bfloat16):
            model = Net(*sizes, recompute=recompute, layers=layers)
    else:
        model = Net(*sizes, recompute=recompute, layers=layers).bfloat16()
    if prepare is not None:
        prepare(model)
    initialize = deepspeed.initialize if stock else ds_fp8.initialize
    why_not = contextlib.nullcontext()
    if not own:
        why_not = mock.patch.object(ds_fp8.engine.attach, "why_no_own_step", return_value="for comparison")
    with why_not:
        return initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]


def engine(fp8: dict | None = None, model=None, changes: dict | None = None, **options):
    """An engine of a model, or of Net, under CONFIG with `changes`; it measures where `fp8` asks for it.

    fp8: None for BF16. options: those of `build`, and changes to zero_optimization.
    """
    of_net = {key: options.pop(key) for key in OF_NET if key in options}
    section = None if of_net.get("stock") else {"enabled": False} if fp8 is None else QUIET | fp8
    ds_config = config(section, **options) | (changes or {})
    if model is None:
        return build(ds_config, **of_net)
    initialize = deepspeed.initialize if section is None else ds_fp8.initialize
    return initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]


def batch(step: int, rank: int) -> torch.Tensor:
    """Two rows that count upwards from random starts: quickly learnt, different on every step and rank."""
    start = torch.randint(0, 61, (2, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (start + torch.arange(17)) % 61


def take_step(engine, loss: torch.Tensor) -> float:
    """The number of a loss, after its backward and the engine's step."""
    engine.backward(loss)
    engine.step()
    return loss.item()


def loss_of(engine, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of Net, or of a model of Hugging Face, on rows of tokens."""
    tokens = tokens.to(engine.device)
    if hasattr(engine.module, "layers"):
        return engine(tokens)
    return engine(input_ids=tokens, labels=tokens, use_cache=False).loss


def train(engine, steps: int, start: int = 0, rows=batch) -> list[float]:
    """Losses of this rank; `rows` of tokens by the number of a micro-batch and the rank."""
    losses = []
    micro_batches = engine.gradient_accumulation_steps()
    for number in range(start * micro_batches, (start + steps) * micro_batches):
        losses.append(take_step(engine, loss_of(engine, rows(number, dist.get_rank()))))
    return losses


def fp8_linears(engine) -> dict[str, FP8Linear]:
    """Linears in FP8 by name."""
    return {name: m for name, m in engine.module.named_modules() if isinstance(m, FP8Linear)}


def gather(weights) -> None:
    """Let weights be gathered for their modules."""
    weights = list(weights)
    weights[0].all_gather_coalesced(weights).wait()


def release(weights) -> None:
    for weight in weights:
        weight.partition()


def bf16_of(parameter) -> torch.Tensor:
    """The numbers of a parameter that a user sees."""
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def bf16(parameter) -> torch.Tensor:
    """The same in FP32."""
    return bf16_of(parameter).float()


def masters(engine) -> dict[str, torch.Tensor]:
    """All FP32 masters, whole."""
    return {name: full_master(p).cpu() for name, p in engine.module.named_parameters() if p.requires_grad}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Tensors of the same names and bits."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def held(engine) -> list[str]:
    """Weights that are gathered in FP8 now."""
    return [name for name, p in engine.module.named_parameters() if getattr(p, UNSHARDED, None) is not None]


def same_cast(left, right) -> bool:
    """Whether two casts have the same codes and scales, bit for bit."""
    codes = (cast.data.view(torch.uint8) for cast in (left, right))
    return torch.equal(*codes) and torch.equal(left.scale, right.scale)


def unsharded(weights) -> list:
    """What weights are gathered as for their modules: their casts."""
    gather(weights := list(weights))
    found = [getattr(weight, UNSHARDED) for weight in weights]
    for weight in weights:
        assert weight.isnan().all(), "the placeholder must be loud"
        assert weight.untyped_storage().nbytes() == 2
        assert weight.shape == weight.ds_shape
        weight.partition()
        assert getattr(weight, UNSHARDED) is None
    return found


def wrong_casts(engine) -> list[str]:
    """Weights that are not gathered as the cast of their whole master, or of the BF16 they are frozen at."""
    linears, expected = fp8_linears(engine), []
    for linear in linears.values():
        source = full_master(linear.weight) if linear.weight.requires_grad else bf16(linear.weight)
        spec = linear.recipe.weight
        expected.append(quantize(source, spec.format, spec.granularity, spec.scale))
    found = unsharded(linear.weight for linear in linears.values()) if linears else []
    return [name for name, one, other in zip(linears, found, expected, strict=True) if not same_cast(one, other)]


def full_master(parameter) -> torch.Tensor:
    """The whole FP32 master tensor of a ZeRO-3 parameter, on every rank."""
    return safe_get_full_fp32_param(parameter).clone()


def bf16_weights(engine) -> dict[str, torch.Tensor]:
    """Every weight as GatheredParameters gives it, on the CPU."""
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: parameter.detach().cpu().clone() for name, parameter in named.items()}

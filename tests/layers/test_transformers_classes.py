"""All decoder layers, gated MLPs and experts of the installed transformers: what is fused computes what the class did.

Each class is made by its configuration's defaults on the meta device, then cut to a small size. What the library fuses
runs without casts (experts: with them) beside the class's own forward, where models are known to differ from the plain
formula: far positions, and tokens and gates from the smallest to the largest magnitudes.
"""

import copy
import functools
import importlib
import inspect
import re
from difflib import SequenceMatcher
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds_fp8 import layers
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers import transformers_versions as versions
from ds_fp8.layers.decoder.decoder import fuse_decoder
from ds_fp8.layers.experts.experts import convert_experts
from ds_fp8.layers.linear.linear import FP8Linear
from tests.layers.test_adapters import Exact
from tests.numerics import error

WIDTH, FEATURES = 128, 128
TOKENS = 9
MAGNITUDES = torch.logspace(-3, 2.5, TOKENS)[:, None]
CONFIG = FP8Config(linear={"backend": "reference"}, monitor={"every": 0})
# For configurations that leave them open
ABSENT = {"head_dim": 64, "num_key_value_heads": 2, "num_local_experts": 4, "n_routed_experts": 4, "num_experts": 4}
FEWEST = {"layer": 28, "mlp": 115, "experts": 46}  # Fused classes of each kind, by transformers 5.17
# Queries scaled by their position; gates and up clamped (swiglu_limit)
WRONG_IF_FUSED = {
    "layer": {"Ministral3DecoderLayer"},
    "mlp": {"DeepseekV4MLP", "Glm5NextTextMLP", "Glm5NextVisionMLP"},
    "experts": {"DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts"},
}


class SmallExperts(nn.Module):
    """In the place of a mixture, which a layer only calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        return x @ self.weight[0]


def kind_of(cls: type, source: str) -> str | None:
    if not inspect.isclass(cls) or not issubclass(cls, nn.Module) or issubclass(cls, PreTrainedModel):
        return None
    if hasattr(cls, "_apply_gate"):
        return "experts"
    if re.search(r"self\.self_attn\s*=", source) and re.search(r"self\.mlp\s*=", source):
        return "layer"
    return "mlp" if re.search(r"self\.gate_proj\s*=", source) and "self.up_proj" in source else None


@functools.cache
def classes() -> list[tuple[str, type, list[type]]]:
    """Return (kind, class, configurations of its model) of all models, those of its part of the model first."""
    found = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text, package = file.read_text(), f"transformers.models.{file.parent.name}"
        if not re.search(r"self\.gate_proj|gate_up_proj", text):
            continue
        module, configs = importlib.import_module(f"{package}.{file.stem}"), set()
        for part in file.parent.glob("configuration_*.py"):
            members = filter(inspect.isclass, vars(importlib.import_module(f"{package}.{part.stem}")).values())
            configs.update(one for one in members if issubclass(one, PreTrainedConfig))
        # Not by inspect.getsource, which parses the file for every class.
        for name, source in re.findall(r"^class (\w+)(.*?)(?=^\S)", f"{text}#", re.MULTILINE | re.DOTALL):
            cls = getattr(module, name)
            if (kind := kind_of(cls, source)) is not None:
                alike = {one: SequenceMatcher(None, one.__name__, name).ratio() for one in configs}
                found.append((kind, cls, sorted(configs, key=lambda one: (-alike[one], one.__name__))))
    return found


def made_by(cls: type, configs: list[type]) -> nn.Module:
    for config in configs:
        for arguments in ((), (0,)):
            try:
                settings = config()
                for key, value in ABSENT.items():
                    if getattr(settings, key, 0) is None:
                        setattr(settings, key, value)
                with torch.device("meta"):
                    return cls(settings, *arguments)
            except Exception:  # of another part of the model, or made in another way
                continue
    raise AttributeError(f"{cls.__name__} is not made by a configuration alone")


def cut(module: nn.Module, kind: str) -> None:
    """Give a module of the meta device small random weights."""
    torch.manual_seed(0)
    if kind == "layer":
        attention = module.self_attn
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "sdpa"
        for name in ("q_proj", "k_proj", "v_proj"):
            part = getattr(attention, name)
            setattr(attention, name, nn.Linear(WIDTH, part.out_features, bias=part.bias is not None))
        o_proj = attention.o_proj
        attention.o_proj = nn.Linear(o_proj.in_features, WIDTH, bias=o_proj.bias is not None)
        for norm, size in ((module.input_layernorm, WIDTH), (module.post_attention_layernorm, WIDTH)):
            norm.weight = nn.Parameter(torch.rand(size) + 0.5)
        for name in {"q_norm", "k_norm"} & dict(attention.named_children()).keys():
            norm = getattr(attention, name)
            norm.weight = nn.Parameter(torch.rand(norm.weight.shape) + 0.5)
        if any("expert" in f"{name} {type(part).__name__}".lower() for name, part in module.mlp.named_modules()):
            module.mlp = SmallExperts()
    mlp = module if kind == "mlp" else getattr(module, "mlp", None)
    if hasattr(mlp, "gate_proj"):
        # Without biases, which some models configure and no fused MLP has.
        mlp.gate_proj, mlp.up_proj = (nn.Linear(WIDTH, FEATURES, bias=False) for _ in range(2))
        mlp.down_proj = nn.Linear(FEATURES, WIDTH, bias=False)
    if kind == "experts":
        module.config = copy.copy(module.config)
        module.config._experts_implementation, module.num_experts = "eager", 2
        module.gate_up_proj = nn.Parameter(torch.randn(2, 2 * FEATURES, WIDTH) / WIDTH**0.5)
        module.down_proj = nn.Parameter(torch.randn(2, WIDTH, FEATURES) / FEATURES**0.5)


def fused(module: nn.Module, kind: str) -> nn.Module | None:
    """Return a module as the library fuses it, or None where it keeps its own forward."""
    recipe, model = recipe_from_config(CONFIG), nn.ModuleDict({"experts" if kind == "experts" else "of": module})
    if kind == "experts":
        return module if convert_experts(model, {}, recipe.at, multiply=True).multiplied else None
    recipe = Exact(**vars(recipe))
    for name, part in module.named_modules():
        if type(part) is nn.Linear:
            part.__class__, part.own_class, part.recipe = FP8Linear, nn.Linear, recipe.at(name)
    fusion = fuse_decoder(model)
    return module if fusion.layers or fusion.attention_halves or (kind == "mlp" and fusion.mlps) else None


def computed(module: nn.Module, kind: str) -> torch.Tensor:
    """Return the output, by token in units of its size, and the gradient of the input."""
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS, WIDTH)
    if kind == "layer":
        head_dim = module.self_attn.head_dim
        angle = torch.rand(2, TOKENS, head_dim // 2) * 6
        rotation = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        x *= MAGNITUDES.flip(0)
        positions = torch.arange(3_000_000, 3_000_000 + TOKENS).expand(2, -1)
        options = {"position_ids": positions, "position_embeddings": rotation, "attention_mask": None}
        # As trained models have them: the scores of some heads differ by a lot.
        with torch.no_grad():
            module.self_attn.q_proj.weight.mul_(4)
        y = module(x, **options)
        y = y[0] if isinstance(y, tuple) else y
    elif kind == "mlp":
        y = module(x * MAGNITUDES)
    else:
        index = torch.stack([torch.randperm(2) for _ in range(TOKENS)])
        y = module(x[0] * MAGNITUDES, index, torch.rand(TOKENS, 2))
    return (y / y.norm(dim=-1, keepdim=True)).flatten(0, -2)


@pytest.mark.parametrize("kind", WRONG_IF_FUSED)
@torch.no_grad()
def test_what_is_fused_computes_what_its_class_does(kind):
    errors, refused = {}, set()
    for cls, configs in ((cls, configs) for other, cls, configs in classes() if other == kind):
        try:
            cut(module := made_by(cls, configs), kind)
        except (AttributeError, TypeError):  # cannot be made, or has other parts
            continue
        own = copy.deepcopy(module)
        if fused(module, kind) is None:
            refused.add(cls.__name__)
        else:
            errors[cls.__name__] = error(computed(module, kind), computed(own, kind))
    bound = 0.13 if kind == "experts" else 1e-3
    assert {name: found for name, found in errors.items() if not found < bound} == {}
    assert len(errors) >= FEWEST[kind]
    assert refused >= WRONG_IF_FUSED[kind]


def test_a_version_that_the_tests_do_not_pass_with_is_refused_unless_asked_for(monkeypatch):
    with pytest.raises(UserError, match=r"transformers 5\.24\.0 is not supported") as raised:
        versions.check_version("5.24.0")
    assert f"pip install 'transformers{versions.KNOWN}'" in str(raised.value)
    monkeypatch.setenv(versions.TRY, "5.24.0")
    versions.check_version("5.24.0")
    monkeypatch.setattr(metadata, "version", lambda name: "4.57")
    with pytest.raises(UserError, match=r"transformers 4\.57 is not supported"):
        importlib.reload(layers)  # checked when layers are imported

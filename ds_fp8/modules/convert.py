"""Surgery on a Hugging Face model, in place: nn.Linear becomes FP8Linear, and decoder layers are fused.

One layer goes back by `restore`.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from dataclasses import dataclass, field, replace

from torch import nn

from ds_fp8.config import FP8Config
from ds_fp8.errors import UserError
from ds_fp8.modules.decoder import FusedDecoderLayer, FusedMLP, Fusion, fuse_decoder, unfuse
from ds_fp8.modules.linear import FP8Linear
from ds_fp8.modules.monitor import CastMonitor
from ds_fp8.modules.recipe import LinearRecipe


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: names of the linears that became FP8, and of those that did not with the reason."""

    recipe: LinearRecipe
    converted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    """Skip patterns of the user's that name no linear."""
    fusion: Fusion = field(default_factory=Fusion)


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted module name is meant by `pattern`: the name, one or more of its parts, or a glob."""
    return f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern)


def convert(model: nn.Module, config: FP8Config | None = None, monitor: CastMonitor | None = None) -> Conversion:
    """Turn every nn.Linear of `model` that `config.linear.skip` does not name into an FP8Linear, in place, and fuse
    its decoder layers where they can be (`config.fuse`).

    Parameter names and checkpoint keys do not change. Subclasses of nn.Linear, and linears whose weight another module
    uses as well (tied embeddings), are left as they are. Raises UserError when no linear is left to convert.
    """
    config = config or FP8Config()
    recipe = LinearRecipe.from_config(config, monitor)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    owners: dict[int, set[str]] = defaultdict(set)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(name)

    result = Conversion(recipe)
    for name, module in linears.items():
        skip = next((pattern for pattern in config.linear.skip if matches(name, pattern)), None)
        others = owners[id(module.weight)] - {name}
        if skip is not None:
            result.left[name] = f'named by fp8.linear.skip "{skip}"'
        elif type(module) is not nn.Linear and type(module) is not FP8Linear:
            result.left[name] = f"is a {type(module).__name__}, which has a forward of its own"
        elif others:
            result.left[name] = f"shares its weight with {', '.join(sorted(others))}"
        else:
            module.__class__ = FP8Linear
            module.recipe = recipe.at(name)
            result.converted.append(name)
    if "skip" in config.linear.model_fields_set:
        names = list(linears)
        result.unmatched.extend(p for p in config.linear.skip if not any(matches(name, p) for name in names))
    if not result.converted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(result.left.items())[:5])
        raise UserError(
            "the model has no linear layer that can run in FP8" + (f" ({reasons})" if reasons else ""),
            key="fp8.linear.skip",
            remedy='name fewer layers in "skip", or set "fp8": {"enabled": false}',
        )
    return replace(result, fusion=fuse_decoder(model, recipe)) if config.fuse == "auto" else result


def layer_of(model: nn.Module, site: str) -> str:
    """Name of the layer that computes at a site of statistics: a fused decoder layer or MLP, or the linear itself."""
    fused = (name for name, module in model.named_modules() if isinstance(module, (FusedDecoderLayer, FusedMLP)))
    return next((name for name in fused if site.startswith(f"{name}.")), site)


def restore(layer: nn.Module) -> list[nn.Parameter]:
    """Let a layer compute in its own precision again, by its own class; returns the weights that were FP8's."""
    if isinstance(layer, (FusedDecoderLayer, FusedMLP)):
        unfuse(layer)
    linears = [module for module in layer.modules() if isinstance(module, FP8Linear)]
    for linear in linears:
        linear.__class__ = nn.Linear
        for name in ("recipe", "input_is_saved"):
            linear.__dict__.pop(name, None)
    return [linear.weight for linear in linears]

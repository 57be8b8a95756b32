"""Recipes, formats and models of papers, besides what this package trains with.

Importing this package registers them (config/registry.py), which happens when a configuration names one of them.
"""

from ds_fp8.config import refusals, registry
from ds_fp8.gemm import BACKENDS, DESCRIPTIONS
from ds_fp8.research import config, mxfp8, recipe
from ds_fp8.research.config import ResearchConfig as FP8Config
from ds_fp8.research.madam import Madam
from ds_fp8.research.presets import PRESETS

__all__ = ["FP8Config", "config", "recipe"]

registry.PRESETS.update(PRESETS)
registry.OPTIMIZERS["madam"] = Madam
refusals.TABLE.extend(config.REFUSALS)
BACKENDS["mxfp8"] = mxfp8
DESCRIPTIONS["mxfp8"] = "MXFP8 products of Blackwell through Transformer Engine, never run on such a GPU"

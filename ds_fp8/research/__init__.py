"""Recipes, formats and models of papers, beside what this package trains with.

Importing this package registers them (config/registry.py), which happens when a name of theirs is met. Nothing below
imports it: recipes are subclasses of core's, and core calls their methods.
"""

from ds_fp8.config import registry
from ds_fp8.config.fp8 import GradientReduceConfig, OptimizerStateConfig, ParameterGatherConfig
from ds_fp8.config.linear import LinearCasts, LinearConfig
from ds_fp8.gemm import BACKENDS, DESCRIPTIONS
from ds_fp8.research import config, mxfp8, recipe
from ds_fp8.research.madam import Madam
from ds_fp8.research.presets import PRESETS

__all__ = ["config", "recipe"]

registry.PRESETS.update(PRESETS)
registry.extend(LinearCasts, config.ResearchCasts)
registry.extend(LinearConfig, config.ResearchLinear)
registry.extend(ParameterGatherConfig, config.ResearchGather)
registry.extend(GradientReduceConfig, config.ResearchReduce)
registry.extend(OptimizerStateConfig, config.ResearchOptimizerState)
registry.OPTIMIZERS["madam"] = Madam
BACKENDS["mxfp8"] = mxfp8
DESCRIPTIONS["mxfp8"] = "MXFP8 products of Blackwell through Transformer Engine, never run on such a GPU"

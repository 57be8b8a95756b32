"""Recipes, formats and optimizers of papers, beside those that this package trains with.

Importing this package registers them (config/registry.py), which happens when a name of theirs is met. Nothing below
imports it: recipes are subclasses of core's, and core calls their methods.
"""

from ds_fp8.config import registry
from ds_fp8.research.presets import PRESETS

registry.PRESETS.update(PRESETS)

"""Plugin of Axolotl, listed under `plugins:` of its YAML, with an "fp8" section in the file of `deepspeed:`."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from ds_fp8.config.errors import UserError
from ds_fp8.integrations.install import install


class FP8Plugin(BasePlugin):
    """Applies the "fp8" section of an Axolotl run's DeepSpeed configuration."""

    def pre_model_load(self, cfg: Any) -> None:
        if getattr(cfg, "fp8", None):
            raise UserError(
                "Axolotl's own FP8, which is torchao's, does not go with ds_fp8's", key="fp8", remedy="fp8: false"
            )
        if not getattr(cfg, "deepspeed", None):
            raise UserError(
                "ds_fp8 trains with DeepSpeed, and the run has none", key="deepspeed", remedy="deepspeed: zero3.json"
            )
        install(without_section="say")

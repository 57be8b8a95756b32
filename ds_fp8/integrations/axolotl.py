"""A plugin of Axolotl, to be named under `plugins:` of its YAML, beside `deepspeed:` with an "fp8" section."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from ds_fp8.config.errors import UserError
from ds_fp8.integrations.install import install


class FP8Plugin(BasePlugin):
    """Makes the DeepSpeed engine of an Axolotl run honour the "fp8" section of its configuration."""

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

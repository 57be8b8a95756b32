"""Hugging Face folders from trained models, in BF16 and in FP8 for serving, and weights one by one for rollouts."""

from ds_fp8.export.checkpoints import export_checkpoint
from ds_fp8.export.engines import export_engine, served_weights

__all__ = ["export_checkpoint", "export_engine", "served_weights"]

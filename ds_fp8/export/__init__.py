"""Export: Hugging Face folders in BF16 and FP8, and weights of a live engine for rollouts."""

from ds_fp8.export.checkpoints import export_checkpoint
from ds_fp8.export.engines import export_engine, served_weights

__all__ = ["export_checkpoint", "export_engine", "served_weights"]

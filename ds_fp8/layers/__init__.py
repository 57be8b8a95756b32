"""The layers that run in FP8 (linears, fused decoder layers, the head and its loss), and the conversion of models."""

from importlib.metadata import version

from ds_fp8.layers.transformers_versions import check_version

check_version(version("transformers"))

"""The layers that run in FP8 (linears, fused decoder layers, the head and its loss), and the conversion of models."""

from ds_fp8.layers import transformers_versions

transformers_versions.check_names()

"""The layers that run in FP8 (linears, fused decoder layers, the head and its loss), and the conversion of models."""

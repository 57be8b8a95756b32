"""What of a model runs in FP8: linears, fused decoder layers, the head and its loss; and how a model gets them."""

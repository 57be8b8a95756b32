"""The Triton kernels of the fused decoder parts; imported only where there is a GPU."""

"""Triton kernels of the ZeRO-3 collectives; each module of ds_fp8.zero that has them names its reference beside."""

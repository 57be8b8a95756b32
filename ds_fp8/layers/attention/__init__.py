"""Attention in FP8, within documents of packed rows, and under sequence parallelism."""

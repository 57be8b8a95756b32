"""Linears in FP8: the recipe of their products, casts of operands, outlier channels."""

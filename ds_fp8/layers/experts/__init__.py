"""Mixtures of experts: routing, permutation of tokens, grouped products."""

"""Attention in FP8, of packed rows, and of rows that several ranks share."""

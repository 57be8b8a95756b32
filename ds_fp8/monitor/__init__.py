"""Losses of casts by layer and tensor class, measured on some steps, judged and recorded."""

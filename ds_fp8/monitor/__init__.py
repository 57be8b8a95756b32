"""Quantization errors by layer and tensor class, measured in some steps, checked and logged."""

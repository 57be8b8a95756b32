"""Fused decoder layers: norms, rotary embedding, attention, gated MLP."""

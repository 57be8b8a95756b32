"""Decoder layers computed as a whole: norms, rotary embedding, attention block, gated MLP."""

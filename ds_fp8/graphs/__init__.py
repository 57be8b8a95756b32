"""Micro-steps as CUDA graphs: conditions, capture, replay, checks against Python."""

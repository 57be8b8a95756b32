"""ZeRO-3 with FP8: gathers, reductions and steps, and the places where DeepSpeed is patched (seams)."""

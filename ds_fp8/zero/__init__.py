"""ZeRO-3 with FP8: what it gathers, reduces and steps, and the seams where DeepSpeed is taken hold of."""

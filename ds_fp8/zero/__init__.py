"""ZeRO-3 with FP8: sharded weights, gathers, reductions and steps; private names of DeepSpeed in deepspeed/."""

"""`initialize`: an FP8 engine from a DeepSpeed configuration, with its checks and its start report."""

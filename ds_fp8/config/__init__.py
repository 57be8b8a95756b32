"""The "fp8" section of a DeepSpeed JSON: its schema, presets, number formats and errors. Nothing here computes."""

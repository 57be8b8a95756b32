"""The commands of `ds-fp8`, one a file; scripts/ has callers of the same functions."""

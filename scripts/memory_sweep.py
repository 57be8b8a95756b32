"""Measure a grid of settings: python scripts/memory_sweep.py --deepspeed_config X --sweep Y; as `ds-fp8 sweep`."""

from ds_fp8.commands.sweep import main
from ds_fp8.config.errors import main_entry

if __name__ == "__main__":
    main_entry(main)

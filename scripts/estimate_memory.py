"""Memory of a stage: python scripts/estimate_memory.py --deepspeed_config FILE; as `ds-fp8 estimate`."""

from ds_fp8.commands.estimate import main
from ds_fp8.config.errors import main_entry

if __name__ == "__main__":
    main_entry(main)

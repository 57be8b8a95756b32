"""FP8 beside BF16 over seeds and learning rates: python scripts/robustness.py STAGE; as `ds-fp8 robustness`."""

from ds_fp8.commands.robustness import main
from ds_fp8.config.errors import main_entry

if __name__ == "__main__":
    main_entry(main)

"""FP8 against BF16 on your own stage: python scripts/parity.py --deepspeed_config FILE; as `ds-fp8 parity`."""

from ds_fp8.commands.parity import main
from ds_fp8.config.errors import main_entry

if __name__ == "__main__":
    main_entry(main)

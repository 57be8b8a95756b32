"""List the configurations that come with ds_fp8, with the model of each; copy one with --copy NAME."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ds_fp8.commands.arguments import CONFIGS, config_file, parser_of, shipped_configs
from ds_fp8.config.errors import UserError


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--copy", metavar="NAME", help="copy this configuration into the current folder")
    arguments = parser.parse_args()
    if arguments.copy is None:
        for name in shipped_configs():
            raw = json.loads((CONFIGS / name).read_text())
            model = raw.get("model", {})
            print(f"{name:<36} {model.get('path') or model.get('config', {}).get('model_type', '')}".rstrip())
        return 0
    source = config_file(arguments.copy)
    target = Path(source.name)
    if target.exists():
        raise UserError(f"{target} exists", remedy="remove it, or go to another folder")
    shutil.copy(source, target)
    print(target)
    return 0

"""Puts the configurations of ds_configs/ into wheels, as ds_fp8/configs. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigurations(build_py):
    """Build the package, and copy ds_configs/ into it; an editable install reads the repository's own."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if not self.editable_mode:
            shutil.copytree("ds_configs", Path(self.build_lib, "ds_fp8", "configs"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigurations})

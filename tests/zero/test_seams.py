import subprocess
import sys

from ds_fp8.zero import seams


def test_every_name_exists_in_the_installed_version():
    assert seams.missing_names() == []


def test_a_missing_name_is_named_with_the_version():
    script = (
        "import deepspeed, deepspeed.runtime.zero.stage3 as s\n"
        "del s.DeepSpeedZeroOptimizer_Stage3.refresh_fp32_params\n"
        "from ds_fp8.errors import UserError\n"
        "try:\n    import ds_fp8.zero.seams\n"
        "except UserError as error:\n    print(error)\n"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "DeepSpeedZeroOptimizer_Stage3.refresh_fp32_params" in printed
    assert seams.deepspeed.__version__ in printed
    assert "0.19.8" in printed

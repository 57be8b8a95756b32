"""Experts stored as 3-D parameters, loaded under deepspeed.zero.Init from files that name every expert."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import ds_fp8
from tests.layers.moe import EXPERTS, mixture
from tests.zero import models
from tests.zero.test_experts import experts_of
from tests.zero.test_training import QUIET


def loaded(folder, architecture):
    """By name: whether experts under zero.Init are those that were saved; and whether every parameter was sharded."""
    config = models.config(QUIET)
    partitioned = HfDeepSpeedConfig(config)  # while it lives from_pretrained makes models under zero.Init
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    sharded = all(parameter.numel() == 0 for parameter in model.parameters())
    del partitioned
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    expected = dict(mixture(architecture).named_parameters())
    result = {
        name: torch.equal(models.full_master(w), expected[name].float()) for name, w in experts_of(engine).items()
    }
    return result, sharded


@pytest.mark.parametrize(
    ("architecture", "files"),
    [
        ("qwen3_moe", "one file"),
        ("qwen3_moe", "several files"),
        ("mixtral", "several files"),
        ("deepseek_v3", "one file"),
    ],
)
def test_experts_are_those_of_the_files(ranks, tmp_path, architecture, files):
    mixture(architecture).save_pretrained(tmp_path, max_shard_size="200KB" if files == "several files" else "5GB")
    written = list(tmp_path.glob("*.safetensors"))
    assert (len(written) > 1) == (files == "several files")
    names = {name for file in written for name in load_file(file)}
    gates = [
        name
        for name in names
        if "layers.1" in name and ".experts." in name and name.endswith(("w1.weight", "gate_proj.weight"))
    ]
    assert len(gates) == EXPERTS, "the files do not name every expert"
    for result, sharded in ranks(2, loaded, tmp_path, architecture):
        assert len(result) == (2 if architecture == "deepseek_v3" else 4)
        assert all(result.values()), result
        assert sharded

"""The folder that a run of a shipped recipe writes: transformers reads the run's own model and tokenizer."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_fp8.commands.configs import config_file
from ds_fp8.data import build_tokenizer, save_tokenizer
from ds_fp8.data.synthetic import conversations, documents
from ds_fp8.data.tokenizer import encode_documents
from ds_fp8.train import load_stage
from ds_fp8.train.model import build_model, load_model_config

TEXTS = (*documents("train", 0, 30), "  two  spaces", "tab\there", "naïve café", "數字 123", "😀 4567", "a\n\n\nb", "")


@pytest.mark.parametrize("name", ["quickstart/cpt.json"])
def test_auto_classes_read_what_a_run_writes(name, cache_home, tmp_path):
    stage = load_stage(config_file(name), [f"train.run_dir={tmp_path / 'run'}"])
    tokenizer = build_tokenizer(stage.data, cache_home)
    model = build_model(stage, load_model_config(stage, tokenizer))
    model.save_pretrained(tmp_path)
    assert save_tokenizer(tokenizer, tmp_path) is None
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert encode_documents(read, TEXTS) == encode_documents(tokenizer, TEXTS)
    chats = list(conversations("train", 0, 5))
    assert read.apply_chat_template(chats) == tokenizer.apply_chat_template(chats)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())

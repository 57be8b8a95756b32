"""Train a causal language model on a text file in FP8.

deepspeed --num_gpus 8 train.py Qwen/Qwen3-0.6B text.txt out
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ds_fp8
from ds_fp8.export import export_engine

LENGTH = 512
"""Tokens of a row."""

name, text, out = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
engine, *_ = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")

with open(text) as file:
    tokens = tokenizer(file.read(), return_tensors="pt").input_ids[0]
step = engine.train_batch_size()  # rows of a step, over all ranks
rows = tokens[: len(tokens) // (LENGTH * step) * (LENGTH * step)].view(-1, LENGTH)
micro_batches = rows[engine.global_rank :: engine.world_size].split(engine.train_micro_batch_size_per_gpu())
for batch in micro_batches:
    batch = batch.to(engine.device)
    loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
    engine.backward(loss)
    last = engine.is_gradient_accumulation_boundary()
    engine.step()
    if last and engine.global_rank == 0:
        print(f"step {engine.global_steps} of {len(rows) // step}: loss {loss.item():.4f}", flush=True)

engine.save_checkpoint(f"{out}/checkpoints")  # to go on: engine.load_checkpoint
export_engine(engine, f"{out}/model", layout="bf16", tokenizer=tokenizer.save_pretrained)  # or layout="fp8", to serve

"""Train a causal language model on a text file with Hugging Face's Trainer, in FP8 once it is started through ds_fp8.

torchrun --nproc-per-node 8 -m ds_fp8 trainer.py Qwen/Qwen3-0.6B text.txt out    (without a GPU: one process, --use_cpu)
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

LENGTH = 512
"""Tokens of a row."""

name, text, out, *options = sys.argv[1:]
arguments = TrainingArguments(  # before the model is made: ZeRO-3 then shards it while it loads
    out,
    deepspeed="zero3.json",
    bf16=True,
    per_device_train_batch_size=2,
    learning_rate=1e-5,
    logging_steps=1,
    report_to="none",
    use_cpu="--use_cpu" in options,
)
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
with open(text) as file:
    tokens = tokenizer(file.read(), return_tensors="pt").input_ids[0]
rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
trainer = Trainer(
    model,
    arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    data_collator=default_data_collator,
    processing_class=tokenizer,  # beside the weights in every checkpoint
)
trainer.train()
trainer.save_model()
tokenizer.save_pretrained(out)

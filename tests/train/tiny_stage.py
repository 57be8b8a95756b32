"""A stage that trains within seconds on CPUs and its result, for tests and for scripts that do harm to runs."""

from tests.corpus import DOCUMENTS

TINY = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 100,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    },
    "fp8": {"enabled": True, "monitor": {"every": 0}},  # a picture of the casts takes a second
    "model": {
        "config": {
            "model_type": "qwen2",
            "hidden_size": 60,
            "intermediate_size": 136,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        }
    },
    "data": {**DOCUMENTS, "sequence_length": 64},
    "train": {"run_dir": "run", "steps": 12, "schedule": {"type": "cosine", "warmup": 2}, "eval_batches": 2},
}

# What result.json holds after TINY
RESULT = {
    "steps": 12,
    "epochs": None,
    "first_loss": 6.0,
    "last_train_loss": 5.0,
    "first_validation_loss": 6.0,
    "final_loss": 5.0,
    "final_loss_bf16": 5.0,
    "test_loss": None,
    "exact_match": {"before": None, "after": None, "problems": 0},
    "bytes_per_step": {"all_gather_bytes": 100, "grad_bytes": 100},
    "tokens_per_second": 1000.0,
    "step_seconds": 0.5,
    "peak_memory_bytes": 1000,
    "skipped_steps": 0,
    "rollbacks": 0,
    "ranks": 2,
    "device": "cpu",
    "parameters": 1000,
    "versions": {"torch": "2.13.0"},
    "fp8": {"enabled": True, "notes": []},
}

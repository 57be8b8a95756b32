"""Reinforce what a function rewards (GRPO) with TRL, in FP8 once it is started through ds_fp8.

accelerate launch --config_file zero3.yaml -m ds_fp8 grpo.py \
    --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/tldr --num_generations 8 --output_dir out/grpo

The data has a column "prompt".
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


def short(completions, **_):
    """Reward answers of about 200 characters: put your own in its place."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [-abs(200 - len(text)) / 200 for text in texts]


script, training, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
training.model_init_kwargs = {"dtype": "bfloat16"}
if training.use_vllm:
    # A vLLM that takes the codes of training: --use_vllm --vllm_mode colocate
    from ds_fp8.integrations.trl import install

    install()
trainer = GRPOTrainer(
    model=model.model_name_or_path,
    args=training,
    reward_funcs=short,
    train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
    peft_config=get_peft_config(model),
)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()

"""Fine-tune on chats with TRL, in FP8 once it is started through ds_fp8.

accelerate launch --config_file zero3.yaml -m ds_fp8 sft.py \
    --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --packing --packing_strategy wrapped \
    --output_dir out/sft
Adapters alone, whose layers are fused too: --use_peft --lora_target_modules all-linear --learning_rate 2e-4
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
training.model_init_kwargs = {"dtype": "bfloat16"}
trainer = SFTTrainer(
    model=model.model_name_or_path,
    args=training,
    train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
    peft_config=get_peft_config(model),  # --use_peft: adapters in BF16 over frozen weights in FP8
)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()

"""Train on preferences (DPO) with TRL, in FP8 once it is started through ds_fp8; so is the reference model.

accelerate launch --config_file zero3.yaml -m ds_fp8 dpo.py \
    --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized --output_dir out/dpo
"""

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

script, training, model = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config()
training.model_init_kwargs = {"dtype": "bfloat16"}
trainer = DPOTrainer(
    model=model.model_name_or_path,
    args=training,
    train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
    peft_config=get_peft_config(model),
)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()

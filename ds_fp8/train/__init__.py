"""The stage runner: one JSON in, one trained model, its metrics and its result out."""

from ds_fp8.train.run import train
from ds_fp8.train.stage import Lora, ModelConfig, Stage, TrainConfig, learning_rate_factor, load_stage

__all__ = ["Lora", "ModelConfig", "Stage", "TrainConfig", "learning_rate_factor", "load_stage", "train"]

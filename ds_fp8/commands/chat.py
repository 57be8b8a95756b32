"""Ask a model one question, by its own chat template; a text is completed where it has none.

ds-fp8 chat runs/MODEL-DATA "What is FP8?"      a run folder, or any folder that `ds-fp8 train` takes for a model
"""

from __future__ import annotations

from pathlib import Path

from ds_fp8.commands.arguments import count, load_deepspeed, parser_of
from ds_fp8.config.files import model_of_run


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="a run folder, or a Hugging Face folder")
    parser.add_argument("question", help="what to ask")
    parser.add_argument("--max-new-tokens", type=count, default=512, metavar="N", help="of the answer (default 512)")
    arguments = parser.parse_args()
    load_deepspeed()

    from deepspeed.accelerator import get_accelerator
    from transformers import TextStreamer

    from ds_fp8.data import load_tokenizer
    from ds_fp8.train.stored_model import ModelSource, check_trainable, load_stored_model, stored_config

    folder = str(model_of_run(arguments.folder) or arguments.folder)
    source, tokenizer = ModelSource("FOLDER", folder), load_tokenizer(folder)
    config = stored_config(source)
    check_trainable(source, config)
    model = load_stored_model(source, config, {}).to(get_accelerator().current_device_name()).eval()
    text = arguments.question
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=tokenizer.chat_template is None).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    model.generate(
        input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], streamer=streamer, do_sample=False,
        max_new_tokens=arguments.max_new_tokens, pad_token_id=pad,
    )  # fmt: skip
    return 0

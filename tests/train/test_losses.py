"""The two losses of a run: as trained, and of the BF16 weights that it writes, without casts."""

import contextlib
import io
import json
from argparse import Namespace

import pytest
import torch
from deepspeed import comm as dist
from transformers import AutoModelForCausalLM

from ds_fp8.cli import main
from ds_fp8.commands.evaluate import _as_json, _loss, _stage
from ds_fp8.commands.train import _end
from ds_fp8.data import build_data, build_tokenizer, chat
from ds_fp8.data.stage import Question
from ds_fp8.research import munit
from ds_fp8.train import load_stage, packed_attention, train
from ds_fp8.train.evaluation import Alone, exact_match, validation_loss
from ds_fp8.train.metrics import BF16_LOSS, read_metrics
from ds_fp8.train.model import build_model, load_model_config
from ds_fp8.train.served_model import load_served_model
from tests.refusals import refused

# As DeepSpeed's defaults: weights stay gathered from one forward to the next
MANY = {"stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 10**9}
CASES = {
    "blocks": {},
    "weights that stay gathered": {"zero": {**MANY, "stage3_param_persistence_threshold": 10000}},
    "stage 2": {"zero": {"stage": 2}, "fp8": {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}},
    "head, attention and rotations": {
        "fp8": {
            "loss": {"head": "fp8"},
            "attention": {"format": "e4m3"},
            "param_gather": {"format": "bf16"},
            "linear": {"overrides": {"*.o_proj": {"rotation": {"wgrad": "tokens"}}}},
        },
        "attention": "sdpa",
    },
    "outlier channels": {"fp8": {"linear": {"outlier_channels": 16}}},
    "scales per tensor, moments in a byte": {"fp8": {"preset": "fishman"}},
}
ON_ONE = ("head, attention and rotations", "scales per tensor, moments in a byte")


def trained(file):
    train(load_stage(file))


def trained_and_loaded(file):
    """The validation loss of run_dir/model, as transformers loads it in the processes that have trained it."""
    # In these, for DeepSpeed's ZeRO-3 puts a linear of its own in the place of torch's, which rounds before it adds the
    # bias: in processes without it the loss moves by 2e-6.
    trained(file)
    stage = load_stage(file)
    packed_attention.register()
    munit.register()
    model = AutoModelForCausalLM.from_pretrained(
        stage.run_dir / "model", dtype=torch.bfloat16, attn_implementation=stage.model.attn_implementation
    )
    data = build_data(stage.data, build_tokenizer(stage.data))
    return validation_loss(Alone(model), stage, data.validation, stage.train.eval_batches, lambda: None)


def test_a_loss_that_is_not_finite_is_null_in_json():
    text = _as_json({"loss": float("nan"), "perplexity": float("inf"), "rows": 2, "loss_as_trained": 1.5})
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found == {"loss": None, "perplexity": None, "rows": 2, "loss_as_trained": 1.5}


def losses_alone_and_shared(folder, alone, shared):
    """The validation loss of an untrained model by `ds-fp8 evaluate` for a stage, and for one of shared rows."""
    stage = load_stage(alone)
    tokenizer = build_tokenizer(stage.data)
    model = build_model(stage, load_model_config(stage, tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stages = [
        _stage(Namespace(stage=str(file), deepspeed_config=None, set=[], folder=folder, gpus=gpus))
        for file, gpus in ((alone, None), (shared, None), (shared, 2))
    ]
    losses = [_loss(model, each, build_data(each.data, tokenizer), 2, "measured") for each in stages]
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with refused("the loss is nan"):
        _loss(model, stages[0], build_data(stages[0].data, tokenizer), 2, "measured")
    return losses


@pytest.mark.parametrize("budget", [None, 64])
def test_rows_that_ranks_share_are_evaluated_by_one(tiny, write, ranks, tmp_path, budget):
    if budget:
        tiny |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        tiny["data"]["tokens_per_gpu"] = budget
    alone = write(tiny, "alone.json")
    tiny["sequence_parallel_size"] = 2
    if budget:
        tiny["data"]["tokens_per_gpu"] = budget // 2
    alone, shared, of_two = ranks(1, losses_alone_and_shared, tmp_path / "model", alone, write(tiny))[0]
    assert alone == shared == of_two


class Says(torch.nn.Module):
    """A model that answers every prompt with the same words."""

    def __init__(self, ids):
        super().__init__()
        self.device, self.ids = torch.device("cpu"), torch.tensor(ids)

    def generate(self, input_ids, **options):
        return torch.cat([input_ids, self.ids.expand(len(input_ids), -1)], dim=1)


def right_answers(file):
    """Answer three questions rightly; ranks answer equally many, and count their own."""
    stage = load_stage(file)
    tokenizer = build_tokenizer(stage.data)
    engine = Alone(Says(tokenizer("It is 4.", add_special_tokens=False)["input_ids"]))
    share, samples = exact_match(engine, stage, tokenizer, [Question((5, 6), "4")] * 3, r"is (\d)", lambda: None)
    return share, [sample["right"] for sample in samples]


def test_no_question_counts_twice(tiny, write, ranks):
    assert ranks(2, right_answers, write(tiny)) == [(1.0, [True, True]), (1.0, [True])]


def refusal_of_an_answer(file):
    chat.SECONDS = 0.2
    stage = load_stage(file)
    tokenizer = build_tokenizer(stage.data)
    words = "4 #" if dist.get_rank() == 0 else "four and four more words of it and more"
    engine = Alone(Says(tokenizer(words, add_special_tokens=False)["input_ids"]))
    with refused("no end after 0") as caught:
        exact_match(engine, stage, tokenizer, [Question((5, 6), "4")] * 2, r"(([a-z0-9 ]+)+)+#$", lambda: None)
    return caught.value.key


def test_a_pattern_that_does_not_end_on_one_ranks_answer_is_refused_on_all(tiny, write, ranks):
    assert ranks(2, refusal_of_an_answer, write(tiny)) == ["data.answer_pattern"] * 2


def losses_of(folder):
    """(step, loss) of the training and of the evaluations of a run."""
    records = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r[key]) for key in ("loss", "validation_loss") for r in records if key in r]


@pytest.mark.parametrize("case", CASES)
def test_the_result_has_the_loss_of_the_weights_it_writes(tiny, write, ranks, tmp_path, case):
    """Where BF16's loss is taken along the run, too, which changes no step of it."""
    options = CASES[case]
    tiny["zero_optimization"] |= options.get("zero", {})
    tiny["fp8"] |= options.get("fp8", {})
    if "attention" in options:
        tiny["model"]["attn_implementation"] = options["attention"]
    ways = (True, False) if case in ("weights that stay gathered", "outlier channels") else (True,)
    for along in ways:
        folder = tmp_path / str(along)
        tiny["train"] |= {"run_dir": str(folder), "steps": 2, "eval_every": 1, "eval_batches": 1, "eval_bf16": along}
        found = ranks(1 if case in ON_ONE else 2, trained_and_loaded, write(tiny))[0]
        result = json.loads((folder / "result.json").read_text())
        assert result["final_loss_bf16"] == pytest.approx(found, abs=2e-6)  # summed in another order
        assert result["fp8"]["moved_to_bf16"] == []
        assert result["final_loss_served"] is None  # no layer here can be exported in FP8
        records = read_metrics(folder / "metrics.jsonl")
        in_bf16, as_trained = (
            {r["step"]: r[key] for r in records if key in r} for key in (BF16_LOSS, "validation_loss")
        )
        assert result["final_loss"] == as_trained[2]
        assert list(in_bf16) == ([1, 2] if along else [2])
        # In a tiny model casts change little, and now and then nothing.
        assert not along or max(abs(in_bf16[step] - as_trained[step]) for step in in_bf16) > 1e-5
    assert len(losses_of(tmp_path / "True")) == 2 + 3
    if len(ways) == 2:
        assert losses_of(tmp_path / "True") == losses_of(tmp_path / "False")


def trained_and_served(file):
    """The validation loss of the FP8 export of a run, as a server computes with it, and what the export says."""
    trained(file)
    stage, said = load_stage(file), io.StringIO()
    folder = stage.run_dir.with_name("served")
    if dist.get_rank() == 0:
        with contextlib.redirect_stdout(said):
            assert main(["export", str(stage.run_dir), str(folder)]) == 0
    dist.barrier()
    options = {"dtype": torch.bfloat16, "attn_implementation": stage.model.attn_implementation}
    model, serving = load_served_model(folder, "cpu", options)
    data = build_data(stage.data, build_tokenizer(stage.data))
    loss = validation_loss(Alone(model), stage, data.validation, stage.train.eval_batches, lambda: None)
    return loss, serving.layers, said.getvalue()


def test_a_run_and_its_export_say_what_its_outlier_channels_lose_as_served(tiny, write, ranks, tmp_path):
    # k and v have 64 rows, no whole blocks: the export holds them in BF16, and q with them.
    tiny["model"]["config"] |= {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    tiny["fp8"] |= {"preset": "precise", "linear": {"outlier_channels": 16}}
    tiny["train"] |= {"run_dir": str(tmp_path / "run"), "steps": 4}
    loss, layers, said = ranks(2, trained_and_served, write(tiny))[0]
    assert len(layers) == 2 * 4
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["final_loss_served"] == pytest.approx(loss, abs=2e-6)
    assert abs(result["final_loss_served"] - result["final_loss"]) > 1e-5
    lost = f"validation loss {loss:.4f}, {loss / result['final_loss_bf16'] - 1:+.2%}"
    assert f"are in no FP8 folder ({lost})" in said
    assert f"have no outlier channels: {lost})" in "\n".join(_end(load_stage(tmp_path / "stage.json"), result))


def test_without_casts_there_is_one_loss(tiny, write, ranks, tmp_path):
    tiny["fp8"] |= {
        "linear": {"overrides": {"*": "bf16"}},
        "param_gather": {"format": "bf16"},
        "grad_reduce": {"format": "bf16"},
    }
    tiny["train"] |= {"run_dir": str(tmp_path / "run"), "steps": 2}
    ranks(2, trained, write(tiny))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["final_loss"] == result["final_loss_bf16"]
    assert "validation_loss_bf16" not in (tmp_path / "run" / "metrics.jsonl").read_text()


MIXTURE = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128}
MIXTURE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MIXTURE |= {"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "output_router_logits": True}


def test_what_a_mixture_adds_to_its_loss_weighs_as_much_in_many_micro_batches_as_in_few(tiny, write, ranks, tmp_path):
    del tiny["train_micro_batch_size_per_gpu"], tiny["gradient_accumulation_steps"]
    tiny |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "fp8": {"enabled": False}}
    tiny["gradient_clipping"] = 0.0
    tiny["train"] |= {"steps": 1, "eval_batches": 1, "schedule": {"type": "constant", "warmup": 0}}
    found = {}
    for budget in (64, 1024):
        for weight in (0.0, 10.0):
            tiny["model"]["config"] = {**MIXTURE, "router_aux_loss_coef": weight}
            tiny["data"]["tokens_per_gpu"] = budget
            folder = tmp_path / f"{budget}-{weight}"
            tiny["train"]["run_dir"] = str(folder)
            ranks(2, trained, write(tiny))
            found[budget, weight] = next(line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line)
    added = [found[budget, 10.0]["loss"] - found[budget, 0.0]["loss"] for budget in (64, 1024)]
    assert added[0] > 10
    assert added == pytest.approx([added[0]] * 2, rel=0.1)
    assert found[64, 0.0]["loss"] == pytest.approx(found[1024, 0.0]["loss"], rel=1e-3)
    norms = [found[budget, 10.0]["gradient_norm"] for budget in (64, 1024)]
    assert norms == pytest.approx([norms[0]] * 2, rel=0.3)

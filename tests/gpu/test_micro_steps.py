"""Micro-steps as CUDA graphs against the same ones launched by Python: every bit, and every way back."""

import functools
import gc
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import deepspeed
import peft
import pytest
import torch
from deepspeed import comm as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import ds_fp8
from ds_fp8.train import packed_attention
from tests.ranks import on_ranks
from tests.zero import models

pytestmark = pytest.mark.gpu

LENGTH, VOCABULARY = 256, 1024
SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2}
worlds = pytest.mark.parametrize("world", [1] + [2] * (torch.cuda.device_count() > 1))
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def engine_of(
    graph, preset="hybrid_fast", micro_batches=1, monitor=0, recompute=None, attention="sdpa", activations=None
):
    packed_attention.register()
    torch.manual_seed(0)
    with torch.device("cuda"):
        shape = Qwen2Config(**SIZES, num_hidden_layers=3, vocab_size=VOCABULARY, tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation=attention)
    if recompute is not None:
        model.gradient_checkpointing_enable(recompute)
    section = {"preset": preset, "graph": graph, "monitor": {"every": monitor}, "linear": {"backend": "cublas"}}
    section["activations"] = activations or {}
    config = models.config(section, stage3_prefetch_bucket_size=10**6, stage3_max_reuse_distance=10**9)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}
    return ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def batch(number: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return ((torch.randint(0, 97, (1, 1), generator=generator) + torch.arange(length)) * 7 % 97).cuda()


def documents_of(step: int) -> list[int]:
    """Lengths of the documents of a row of LENGTH tokens on this rank.

    None is longer than a block of keys in attention's backward, which adds up over blocks in any order.
    """
    lengths = [[100, 100, 56], [64] * 4, [1, 2, 3, 50, 100, 100], [17] * 15 + [1]][(step + dist.get_rank()) % 4]
    if step == MANY_DOCUMENTS_AT and dist.get_rank() == 0:
        lengths = [4] * 64
    assert sum(lengths) == LENGTH
    return lengths


MANY_DOCUMENTS_AT = 7  # A step in which one rank has more documents than the graph has room for


def one_document_first(step: int) -> list[int]:
    """Lengths of documents: one a row until step 5, and now and then after it."""
    return [LENGTH] if step < 5 or step % 3 == 0 else documents_of(step)


def evaluate(engine, step):
    if step == 5:
        engine.eval()
        with torch.no_grad():
            engine(input_ids=batch(99, LENGTH), labels=batch(99, LENGTH))
        engine.train()


def evaluate_with_little_memory(engine, step):
    """The memory that graphs keep is needed for what runs beside them; rows are long, so that it is much."""
    if step == 5:
        graphs = engine.fp8.graphs
        torch.cuda.empty_cache()
        if graphs is None:
            return evaluate(engine, step)
        kept = graphs.kept_bytes
        fillers = [torch.empty(torch.cuda.mem_get_info()[0] - kept // 8, dtype=torch.uint8, device="cuda")]
        with suppress(torch.OutOfMemoryError):  # only smaller pieces are left
            while beside(kept) > kept // 8:  # what lies between blocks that torch's allocator keeps, too
                fillers.append(torch.empty(5 << 18, dtype=torch.uint8, device="cuda"))
        before = beside(kept)
        evaluate(engine, step)
        assert graphs.captured == graphs.kept_bytes == 0, f"{before} free beside {kept} of graphs"
        del fillers
        torch.cuda.empty_cache()


def beside(kept):
    """Bytes that are free, in torch's cache too, beside those that graphs keep."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - kept


def save_and_load(folder, engine, step):
    """Go back to what was three steps ago, in the middle of replays."""
    if step == 4:
        engine.save_checkpoint(folder)
    if step == 7:
        engine.load_checkpoint(folder)


def while_captured(function):
    """Let a layer's forward call a function in every capture."""

    def between(engine, step):
        def call(module, inputs):
            if torch.cuda.is_current_stream_capturing():
                function()

        if step == 0:
            engine.module.model.layers[1].register_forward_pre_hook(call)

    return between


def fail_in_backward(engine, step):
    def fail(gradient):
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("planted")

    def watch(module, inputs, output):
        (output[0] if isinstance(output, tuple) else output).register_hook(fail)

    if step == 0:
        engine.module.model.layers[1].register_forward_hook(watch)


def two_forwards(engine, step):
    """A second forward before the backward of a replayed one."""
    if step == 7:
        tokens = [batch(number, LENGTH) for number in (70, 71)]
        losses = [engine(input_ids=ids, labels=ids, use_cache=False).loss for ids in tokens]
        engine.backward(losses[0])
        engine.backward(losses[1])
        engine.step()


def move_a_layer(engine, step):
    if step == 5:
        engine.fp8.health.move_to_bf16(["model.layers.1.mlp"])


SHORT = "evaluation where memory is short"
CASES = {
    "plain": {},
    "infir2": {"preset": "infir2"},
    "outlier channels": {"preset": "precise"},
    "outlier channels, measured steps between": {"preset": "precise", "monitor": 4},
    "several micro-batches": {"micro_batches": 3},
    "measured steps between": {"monitor": 4},
    "two shapes": {"lengths": (LENGTH, 2 * LENGTH)},
    "masks of ones, and positions": {"masked": True},
    "evaluation between": {"between": evaluate},
    SHORT: {"between": evaluate_with_little_memory, "lengths": (8 * LENGTH,)},
    "recomputed activations": {"recompute": {"use_reentrant": False}},
    "recomputed activations, reentrant": {"recompute": {"use_reentrant": True}, "micro_batches": 2},
    "packed rows": {"attention": "packed"},
    "packed rows, several micro-batches": {"attention": "packed", "micro_batches": 2},
    "packed rows, measured steps between": {"attention": "packed", "monitor": 4},
    "packed rows, recomputed activations": {"attention": "packed", "recompute": {"use_reentrant": False}},
    "packed rows, recomputed activations, attention kept": {
        "attention": "packed",
        "recompute": {"use_reentrant": False},
        "activations": {"keep_attention": True},
    },
    "an MLP in tiles": {"activations": {"mlp_tile_tokens": 128}, "lengths": (2 * LENGTH,)},
    "two forwards": {"between": two_forwards},
    "a layer that now runs in BF16": {"between": move_a_layer},
}
BROKEN = {
    "a read on the host": while_captured(lambda: torch.ones(1, device="cuda").item()),
    "an error in backward": fail_in_backward,
    "no memory": while_captured(lambda: torch.empty(1 << 44, dtype=torch.uint8, device="cuda")),
}


def trained(graph, lengths=(LENGTH,), masked=False, between=None, steps=10, packed=documents_of, **options):
    """Losses, gradient norms, masters, what became of the graphs and what was said; attention adds in a fixed order."""
    engine, said, losses, norms = engine_of(graph, **options), [], [], []
    engine.fp8.health.say = said.append
    micro_batches = engine.gradient_accumulation_steps()
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(steps):
            if between is not None:
                between(engine, step)
            for micro in range(micro_batches):
                tokens, more = batch(step * micro_batches + micro, lengths[step % len(lengths)]), {}
                if masked:
                    positions = torch.arange(tokens.shape[1], device="cuda")[None]
                    more = {"attention_mask": torch.ones_like(tokens), "position_ids": positions}
                if options.get("attention") == "packed":
                    more = {"position_ids": torch.cat([torch.arange(length) for length in packed(step)])[None].cuda()}
                loss = engine(input_ids=tokens, labels=tokens, use_cache=False, **more).loss
                losses.append(models.take_step(engine, loss))
            norms.append(float(engine.get_global_grad_norm()))
    masters = {name: models.full_master(parameter).cpu() for name, parameter in engine.module.named_parameters()}
    graphs = engine.fp8.graphs
    outcome = (engine.fp8.why_no_graphs, None) if graphs is None else (graphs.off, graphs.captured)
    engine.destroy()
    return losses, norms, masters, outcome, said


def both(graph="on", function=trained, **options):
    """Runs launched by Python and captured."""
    for one in ("off", graph):
        gc.collect()
        torch.cuda.empty_cache()
        yield function(one, **options)


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
    assert all(torch.equal(ours[2][name], master) for name, master in theirs[2].items())


@worlds
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.alone if case == SHORT else ()) for case in CASES]
)
@on_ranks(fixture="gpu_ranks")
def test_every_bit_is_that_of_python(world, case):
    theirs, ours = both(**CASES[case])
    assert_same(ours, theirs)
    off, count = ours[3]
    if case == SHORT:
        assert off.startswith("too little memory is free next to them")
        assert count == 0
        return
    assert off is None
    two = ("several micro-batches", "two shapes", "recomputed activations, reentrant")
    assert count == 1 + case.endswith(two), ours[4]


@worlds
@on_ranks(fixture="gpu_ranks")
def test_rows_of_one_document_come_to_packed_ones(world):
    """Launched by Python they have a kernel of their own, and other sums."""
    theirs, ours = both(attention="packed", packed=one_document_first)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-2)
    assert ours[3] == (None, 1), ours[4]
    assert ours[0][:5] == theirs[0][:5]  # a graph of plain rows still


@worlds
@on_ranks(fixture="gpu_ranks")
def test_what_a_checkpoint_brings_is_trained_on(world, tmp_path):
    assert_same(
        *(trained(graph, between=functools.partial(save_and_load, tmp_path / graph)) for graph in ("on", "off"))
    )


@worlds
@pytest.mark.parametrize("fault", BROKEN)
@on_ranks(fixture="gpu_ranks")
def test_what_no_graph_can_hold_runs_as_before_and_is_said_once(world, fault):
    theirs, ours = both(between=BROKEN[fault])
    assert_same(ours, theirs)
    off, count = ours[3]
    assert count == 0
    assert (off is not None) == (fault == "no memory")
    words = "without CUDA graphs" if off is None else "CUDA graphs are off"
    assert len([line for line in ours[4] if line.startswith(words)]) == 1


def hook_of_others(engine, step):
    if step == 0:
        engine.module.model.layers[1].register_forward_hook(lambda *_: None)


@on_ranks(1, fixture="gpu_ranks")
def test_by_itself_only_known_code_is_captured():
    known, hooked = (trained("auto", between=between) for between in (None, hook_of_others))
    assert known[3] == (None, 1)
    assert "model.layers.1 has a hook of tests.gpu.test_micro_steps" in hooked[3][0]
    assert_same(hooked, known)


def kept_with(layers):
    """Bytes that a graph of frozen, recomputed layers keeps: of each little but its input, and what is gathered."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    shape = Qwen2Config(**sizes, num_hidden_layers=layers, vocab_size=VOCABULARY)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    section = {"preset": "hybrid_fast", "graph": "on", "monitor": {"every": 0}, "linear": {"backend": "cublas"}}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = models.config(section) | {"train_micro_batch_size_per_gpu": 1}
    engine = ds_fp8.initialize(model=model, model_parameters=learning, config=config)[0]
    for step in range(4):
        ids = batch(step, LENGTH)
        models.take_step(engine, engine(input_ids=ids, labels=ids, use_cache=False).loss)
    assert engine.fp8.graphs.off is None
    kept = engine.fp8.graphs.kept_bytes
    engine.destroy()
    return kept


@two_gpus  # one gathers nothing
def test_weights_that_a_graph_gathers_take_turns_in_its_memory(gpu_ranks):
    few, many = (gpu_ranks(2, kept_with, layers)[0] for layers in (4, 12))
    codes = 8 * (4 * 1024**2 + 3 * 1024 * 4096)  # of the layers that one has more
    assert many - few < codes / 2


def memory_of_steps(graph, monitor=0):
    """Bytes that each step takes beside what is there before it; a graph's own memory is there already."""
    engine, taken = engine_of(graph, monitor=monitor), []
    for step in range(6):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        tokens = batch(step, 8 * LENGTH)
        models.take_step(engine, engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        torch.cuda.synchronize()
        taken.append(torch.cuda.max_memory_allocated() - before)
    engine.destroy()
    return taken


def test_a_check_takes_no_activations_beside_those_of_the_graph(gpu_ranks):
    launched, checked, measured = (gpu_ranks(1, memory_of_steps, *how)[0] for how in (("off",), ("on",), ("on", 4)))
    assert checked[4] < 0.7 * launched[4]  # after one replay
    assert measured[4] > 0.9 * launched[4]


def with_adapters(graph, dpo=False, dropout=0.0, fuse="auto", frozen="sharded"):
    """(losses and norms, outcome, what is said) of a LoRA model, its layers fused, its loss too or that of DPO."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        shape = Qwen2Config(**SIZES, num_hidden_layers=3, vocab_size=VOCABULARY)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        options = {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": dropout}
        model = peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=False)).bfloat16()
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    section = {"preset": "hybrid_fast", "graph": graph, "fuse": fuse, "monitor": {"every": 0}}
    section["param_gather"] = {"frozen": frozen}
    config = models.config(section) | {"train_micro_batch_size_per_gpu": 2}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = ds_fp8.initialize(model=model, model_parameters=learning, config=config)[0]
    assert engine.fp8.report["fused_layers"] == (3 if fuse == "auto" else 0)
    base = {name: p for name, p in engine.module.named_parameters() if "proj.base_layer.weight" in name}
    assert {p.ds_tensor.device.type for p in base.values()} == {"cpu"}
    said, found = [], []
    engine.fp8.health.say = said.append

    def scores(tokens):
        logits = engine(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        return -F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(-1)

    with sdpa_kernel(SDPBackend.MATH):
        for step in range(16):
            tokens = torch.cat([batch(2 * step, LENGTH), batch(2 * step + 1, LENGTH)])
            if dpo:
                ours = scores(tokens)
                with torch.no_grad(), engine.module.disable_adapter():
                    theirs = scores(tokens)
                chosen, rejected = (ours - theirs).chunk(2)
                loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
            else:
                loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            found.append((models.take_step(engine, loss), float(engine.get_global_grad_norm())))
    graphs = engine.fp8.graphs
    outcome = (engine.fp8.why_no_graphs, 0) if graphs is None else (graphs.off, graphs.captured)
    with deepspeed.zero.GatheredParameters(list(base.values())):
        assert all(torch.equal(p, original[name]) for name, p in base.items())
    engine.destroy()
    assert {p.ds_tensor.device.type for p in base.values()} == {"cuda"}
    return found, outcome, said


@worlds
@pytest.mark.parametrize(("dpo", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.1)])
@on_ranks(fixture="gpu_ranks")
def test_fused_adapters_train_as_graphs_by_themselves(world, dpo, dropout):
    theirs, ours = both("auto", with_adapters, dpo=dpo, dropout=dropout)
    assert ours[0] == theirs[0]
    assert ours[1] == (None, 1), ours[2]


@two_gpus
@pytest.mark.parametrize("graph", ["off", "auto"])
@on_ranks(2, fixture="gpu_ranks")
def test_a_base_that_every_gpu_has_whole_trains_the_same_adapters(graph):
    theirs, ours = (with_adapters(graph, frozen=codes) for codes in ("sharded", "whole"))
    assert ours[:2] == theirs[:2], ours[2]


@on_ranks(1, fixture="gpu_ranks")
def test_fused_adapters_train_as_those_that_peft_runs():
    fused, unfused = (with_adapters("off", fuse=fuse)[0] for fuse in ("auto", "off"))
    for ours, theirs in zip(fused, unfused, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=0.02)
        assert ours[1] == pytest.approx(theirs[1], rel=0.2)


SCHEDULE = {"factor": 1.0}


def scheduled_attention(module, query, *args, **kwargs):
    return sdpa_attention_forward(module, query * SCHEDULE["factor"], *args, **kwargs)


def change_the_schedule(engine, step):
    SCHEDULE["factor"] = 30.0 if step >= 6 else 1.0  # step 6 is a check


@worlds
@on_ranks(fixture="gpu_ranks")
def test_a_schedule_in_python_is_found_at_the_next_check(world):
    AttentionInterface.register("scheduled", scheduled_attention)
    AttentionMaskInterface.register("scheduled", sdpa_mask)
    theirs, ours = both("auto", attention="scheduled", between=change_the_schedule)
    assert_same(ours, theirs)
    assert "in step 7 the outputs of a graph and of Python differ" in ours[3][0]


def compile_the_module(engine, step):
    if step == 4:
        engine.compile(backend="eager")


@on_ranks(1, fixture="gpu_ranks")
def test_a_module_compiled_on_the_way_leaves_its_graphs_and_says_so():
    launched, captured = both(between=compile_the_module)
    assert captured[0] == pytest.approx(launched[0], rel=1e-2)
    assert captured[0][:4] == launched[0][:4]
    assert captured[3] == ("the module is compiled", 0)
    assert captured[4].count("CUDA graphs are off: the module is compiled") == 1


@worlds
def test_process_groups_can_end_before_the_engine(world, tmp_path):
    """As at the end of a script: NCCL would wait for its graphs to be gone."""
    script = Path(__file__).parents[2] / "scripts" / "bench" / "step.py"
    options = ["--quick", "--gpus", str(world), "--variants", "infir2/graph/cublas", "--limit", "100"]
    command = [sys.executable, script, *options, "--json", tmp_path / "step.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads((tmp_path / "step.json").read_text())["rows"][0]["graphs"] == 1


@on_ranks(1, fixture="gpu_ranks")
def test_a_backward_that_comes_twice_is_an_error():
    engine = engine_of("on")
    for step in range(4):
        tokens = batch(step, LENGTH)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        if step == 3:  # a replay, between two checks
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match=r'has had its backward(.|\n)*"graph": "off"'):
                loss.backward()
        else:
            models.take_step(engine, loss)
    engine.destroy()


@two_gpus
@on_ranks(2, fixture="gpu_ranks")
def test_ranks_with_other_shapes_agree():
    """The ranks' batches have shapes of their own in every second step."""
    theirs, ours = both(lengths=(LENGTH, LENGTH + 128 * dist.get_rank()), steps=12)
    assert_same(ours, theirs)
    assert "without CUDA graphs: other ranks have batches of other shapes, or run eagerly" in ours[4]

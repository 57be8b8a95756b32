"""Labels outside the vocabulary end a run of the fused loss on all ranks, in the step that reads them."""

from deepspeed import comm as dist

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.layers.head.cross_entropy import IGNORED
from tests.layers.hugging_face import causal_lm, tokens
from tests.ranks import case, on_ranks
from tests.zero import models

CASES = {
    "own step": ({}, {}),
    "head in FP8": ({"loss": {"head": "fp8"}}, {}),
    "DeepSpeed's step": ({}, {"offload_optimizer": {"device": "cpu"}}),
    "stage 2": (
        {"preset": "infir2", "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}},
        {"stage": 2},
    ),
    "stage 2 without FP8": ({"enabled": False, "loss": "fused"}, {"stage": 2}),
}
GOOD = 2  # Steps before the one with a wrong label


def steps_until_refused(case, label, good=GOOD):
    """Return (steps taken, what ended them, whether by a graph). Only the last rank has the label, in step `good`."""
    model = causal_lm("qwen2")
    section, zero = CASES.get(case, ({"graph": case}, {}))
    config = models.config(section, **zero)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    for step in range(good + 3):
        ids = tokens().to(engine.device)
        labels = ids.clone()
        labels[:, 2] = IGNORED
        if step == good and dist.get_rank() == dist.get_world_size() - 1:
            labels[1, 7:9] = label
        try:
            models.take_step(engine, engine(input_ids=ids, labels=labels).loss)
        except UserError as raised:
            error = raised
            break
    else:
        error = None
    graphs = engine.fp8.graphs
    return step, error and str(error), graphs is not None and bool(graphs.captured)


@on_ranks(2)
def test_labels_outside_the_vocabulary_end_all_ranks():
    for name in CASES:
        label = 97 if name == "own step" else -1
        step, said, _ = steps_until_refused(name, label)
        with case(name):
            assert step == GOOD
            assert f"2 labels are outside the vocabulary of 97 tokens, {label} for one" in said
            assert "key:    labels" in said
            assert "remedy:" in said
    assert steps_until_refused("own step", IGNORED) == (GOOD + 2, None, False)  # labels without loss are none of them

"""Engines of one process do not notice each other: nothing reaches further than its engine, or outlives it."""

import deepspeed
import deepspeed.comm.comm
import deepspeed.runtime.zero.parameter_offload
import deepspeed.runtime.zero.partition_parameters
import deepspeed.runtime.zero.stage3
import torch
from deepspeed import comm as dist

import ds_fp8
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import UNSHARDED
from tests.ranks import on_ranks
from tests.zero import models
from tests.zero.test_training import QUIET, assert_same

FP8, BF16 = QUIET, {"enabled": False}
STEPS = 2


def step(engine, number, teacher=None):
    """The loss of one step; with a teacher its distance to the teacher's is added."""
    tokens = models.batch(number, dist.get_rank()).to(engine.device)
    loss = engine(tokens)
    if teacher is not None:
        with torch.no_grad():
            wanted = teacher(tokens)
        loss = loss + (loss - wanted) ** 2
    engine.backward(loss)
    engine.step()
    return loss.item()


def together(sections):
    """By engine, trained in turns: losses, and bytes sent in every step."""
    engines = [models.build(models.config(section)) for section in sections]
    losses, sent = [[] for _ in engines], [[] for _ in engines]
    for engine in engines:
        engine.fp8.wire.take()
    for number in range(STEPS):
        for engine, of_engine, bytes_of_engine in zip(engines, losses, sent, strict=True):
            of_engine.append(step(engine, number))
            bytes_of_engine.append(engine.fp8.wire.take())
    return list(zip(losses, sent, strict=True))


@on_ranks(2)
def test_engines_train_in_turns_as_alone_each_with_its_own_meter():
    fp8lm = {**QUIET, "preset": "fp8lm_o1"}
    alone = {str(section): together((section,))[0] for section in (FP8, BF16, fp8lm)}
    for sections in ((FP8, FP8), (FP8, BF16), (BF16, fp8lm)):
        assert together(sections) == [alone[str(section)] for section in sections], sections


def student_and_teacher(section, alone):
    """Losses of a student, its bytes, and the teacher's bytes; `alone`: the teacher's losses come from before."""
    config = models.config(section)
    del config["optimizer"]
    torch.manual_seed(1)
    model = models.Net().bfloat16().requires_grad_(False)
    teacher = ds_fp8.initialize(model=model, config=config)[0]
    teacher.eval()
    with torch.no_grad():
        wanted = [teacher(models.batch(number, dist.get_rank())) for number in range(STEPS)]
    student = models.build(models.config(section))
    teacher.fp8.wire.take()
    student.fp8.wire.take()
    losses = [
        step(student, number, (lambda _, loss=wanted[number]: loss) if alone else teacher) for number in range(STEPS)
    ]
    return losses, student.fp8.wire.take(), teacher.fp8.wire.take()


@on_ranks(2)
def test_a_frozen_teacher_beside_its_student():
    losses, sent, sent_by_teacher = student_and_teacher(FP8, False)
    expected, sent_alone, nothing = student_and_teacher(FP8, True)
    assert losses == expected
    assert sent == sent_alone
    assert nothing == {"all_gather_bytes": 0, "grad_bytes": 0, "exchange_bytes": 0}
    assert sent_by_teacher["all_gather_bytes"] > 0
    assert sent_by_teacher["grad_bytes"] == 0


def reach():
    """What FP8 could have changed outside of its engine: DeepSpeed's modules and classes, its backend."""
    owners = [
        deepspeed,
        deepspeed.zero,
        deepspeed.DeepSpeedEngine,
        deepspeed.comm.comm,
        deepspeed.comm.comm.cdb,
        deepspeed.runtime.zero.parameter_offload,
        deepspeed.runtime.zero.partition_parameters,
        deepspeed.runtime.zero.stage3,
        deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3,
    ]
    return [(owner, name, value) for owner in owners for name, value in vars(owner).items() if callable(value)]


# Where an engine keeps the optimizer, or the function that makes one, that deepspeed.initialize was given
GIVEN = "client_optimizer"


def of_instances(engine):
    """Methods that an engine, its optimizer and its parameters have for themselves."""
    owners = [engine, engine.optimizer, *engine.module.parameters(), *engine.module.modules()]
    return {
        (index, name): getattr(value, "__module__", "")
        for index, owner in enumerate(owners)
        for name, value in vars(owner).items()
        if callable(value) and not isinstance(value, torch.nn.Module | type) and name != GIVEN
    }


@on_ranks(2)
def test_nothing_of_deepspeed_is_changed_and_destroy_undoes_what_was_installed():
    before = reach()
    instances = of_instances(models.build(models.config(None)))
    assert {key for key, module in instances.items() if module.startswith("ds_fp8")} == set()
    engine = models.build(models.config(FP8))
    models.train(engine, 2)
    assert [name for owner, name, value in before if vars(owner).get(name) is not value] == []
    weights = [m.weight for m in engine.module.modules() if isinstance(m, FP8Linear)]
    weights[0].all_gather_coalesced(weights).wait()
    assert sum(module.startswith("ds_fp8") for module in of_instances(engine).values()) > 20
    engine.destroy()
    assert {key for key, module in of_instances(engine).items() if module.startswith("ds_fp8")} == set()
    assert [weight for weight in weights if getattr(weight, UNSHARDED) is not None] == []


# ---------------------------------------------------------------- whoever looks at the weights between steps


def look_with_a_modifier_rank(engine, folder):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass


LOOKS = [
    lambda engine, folder: engine.save_16bit_model(folder, "model.bin"),
    lambda engine, folder: engine._zero3_consolidated_16bit_state_dict(),  # as Accelerate does
    look_with_a_modifier_rank,
    lambda engine, folder: engine.save_checkpoint(folder),
]


def train_around(looks, folder):
    """Losses of steps between which somebody looks at the weights, or nobody, and the weights that they leave."""
    engine = models.build(models.config(QUIET, stage3_gather_16bit_weights_on_model_save=True))
    losses = models.train(engine, 2)
    for step, look in enumerate(LOOKS, 2):
        if looks:
            look(engine, folder)
        losses += models.train(engine, 1, start=step)
    return losses, models.bf16_weights(engine)


@on_ranks(2)
def test_saving_changes_no_later_step(tmp_path):
    assert_same(train_around(False, tmp_path), train_around(True, tmp_path))

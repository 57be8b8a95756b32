"""The optimizer as its users see it."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.optim import AdamW, Moment
from ds_fp8.optim.moments import moment_bytes
from tests.optim.numbers import COAT, FISHMAN, FP8LM_O2, ROUNDING, dequantized

HYPERPARAMETERS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
PRECISIONS = {
    "fp32": {},
    "bf16": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
    "e4m3": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3"},
    "pow2": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3", "scale": "pow2"},
    "coat": COAT,
    "fishman": FISHMAN,
    "fp8lm": FP8LM_O2,
    "stochastic": {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3", "seed": 7},
}
COMPRESSED = [name for name in PRECISIONS if name != "fp32"]
LONG = 60  # Steps in which the loss falls to less than half
# How much higher the final loss of a small regression may be with compressed moments. It may be lower: exp_avg_sq
# rounded to nearest in units of a power of two lags behind, and the steps are longer.
WORSE = 0.1


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 301), nn.Tanh(), nn.Linear(301, 17)).to(dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    target = torch.randn(60, 17, generator=torch.Generator().manual_seed(1)) / 8
    dtype = next(net.parameters()).dtype
    for step in range(start, start + steps):
        x = torch.randn(64, 60, generator=torch.Generator().manual_seed(100 + step))
        loss = nn.functional.mse_loss(net(x.to(dtype)).float(), x @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(
    precision: str, steps: int = 40, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, AdamW, list[float]]:
    net = network(dtype)
    optimizer = AdamW(net.parameters(), **HYPERPARAMETERS, **PRECISIONS[precision])
    return net, optimizer, train(net, optimizer, steps)


@functools.cache
def fp32_losses() -> list[float]:
    """What the losses of LONG steps with compressed state are compared to."""
    return trained("fp32", LONG)[2]


def moments(optimizer: AdamW) -> list[torch.Tensor]:
    return [
        dequantized(optimizer.state[p][key])
        for group in optimizer.param_groups
        for p in group["params"]
        for key in ("exp_avg", "exp_avg_sq")
    ]


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.flatten(), other.flatten())


def test_fp32_moments_are_torchs_adamw():
    net, _, losses = trained("fp32")
    reference = network()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), **HYPERPARAMETERS), 40)
    assert losses == pytest.approx(expected, rel=1e-5)
    for left, right in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", COMPRESSED)
def test_compressed_moments_train_as_well(precision):
    expected, losses = fp32_losses(), trained(precision, LONG)[2]
    assert expected[-1] < 0.5 * expected[0]
    assert losses != expected
    assert sum(losses[-10:]) < (1 + WORSE) * sum(expected[-10:])


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_16_bit_parameters_have_a_master(precision):
    net, optimizer, losses = trained(precision, LONG, torch.bfloat16)
    assert sum(losses[-10:]) < (1 + WORSE) * sum(fp32_losses()[-10:])
    for p in net.parameters():
        master = dequantized(optimizer.state[p]["master"]).view(p.shape)
        torch.testing.assert_close(p.float(), master, rtol=2.0**-8 + 2.0**-11, atol=1e-30)


def test_bytes_a_parameter():
    numel = 128 * 1000
    for precision, most in {
        "fp32": 8.0,
        "bf16": 4.0,
        "e4m3": 2.07,
        "coat": 2.10,
        "fishman": 2.01,
        "fp8lm": 3.01,
    }.items():
        p = nn.Parameter(torch.zeros(numel))
        optimizer = AdamW([p], **PRECISIONS[precision])
        p.grad = torch.ones(numel)
        optimizer.step()
        assert most - 0.03 < optimizer.state_bytes() / numel <= most
        assert moment_bytes(optimizer.precision) == pytest.approx(optimizer.state_bytes() / numel, abs=1e-3)


def test_closure_groups_schedulers_and_tensor_learning_rates():
    net = network()
    optimizer = AdamW(
        [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.0}], lr=torch.tensor(1e-2)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    before = [p.detach().clone() for p in net.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 60)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    changed = [not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True)]
    assert changed == [True, True, False, False]
    scheduler.step()
    after = net[0].weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(net[0].weight, after)


def test_parameters_added_later_and_parameters_without_gradient():
    first, second, idle = (nn.Parameter(torch.ones(200)) for _ in range(3))
    optimizer = AdamW([first, idle], lr=0.1, weight_decay=0.0, **PRECISIONS["coat"])
    first.grad = torch.ones(200)
    optimizer.step()
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.ones(200), torch.ones(200)
    optimizer.step()
    assert optimizer.state[first]["step"] == 2
    assert optimizer.state[second]["step"] == 1
    assert second[0].item() == pytest.approx(0.9, rel=1e-5)  # the first step is of the length lr
    assert torch.equal(idle, torch.ones(200))
    assert idle not in optimizer.state


@pytest.mark.parametrize("shape", [(), (0,), (1,), (129,), (3, 5, 7)])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_shapes(precision, shape):
    p = nn.Parameter(torch.ones(shape))
    optimizer = AdamW([p], lr=0.1, weight_decay=0.0, **PRECISIONS[precision])
    for _ in range(2):
        p.grad = torch.full(shape, 0.3)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full(shape, 0.8), rtol=2e-2, atol=0)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == shape


def test_parameters_and_gradients_that_are_not_contiguous():
    plain, turned = nn.Parameter(torch.randn(20, 30)), None
    turned = nn.Parameter(plain.detach().t().contiguous().t())
    for p in (plain, turned):
        optimizer = AdamW([p], **PRECISIONS["coat"])
        for step in range(3):
            p.grad = torch.randn(30, 20, generator=torch.Generator().manual_seed(step)).t()
            optimizer.step()
    assert torch.equal(plain, turned)


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_long_zero_gradients_let_the_moments_fade_and_move_nothing_far(precision):
    """The rows of an embedding that no token uses, after a few steps in which one did."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(8, 128))
    optimizer = AdamW([p], lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, **PRECISIONS[precision])
    for _ in range(5):
        p.grad = torch.randn(8, 128) * 1e-3
        optimizer.step()
    largest = max(p.abs().max().item(), 1e-2)
    for _ in range(300):
        p.grad = torch.zeros(8, 128)
        optimizer.step()
    # All that exp_avg still held: at most about lr / (1 - beta1) more.
    assert p.isfinite().all()
    assert p.abs().max() < largest + 3 * 1e-2 / (1 - 0.9)
    before = p.detach().clone()
    p.grad = torch.zeros(8, 128)
    optimizer.step()
    assert (p - before).abs().max() < 1e-6


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_rare_rows_beside_busy_ones_take_steps_of_ordinary_length(precision):
    """exp_avg_sq of the rare elements underflows in units of the busy ones: it must not become 0 under their root."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(256))
    optimizer = AdamW([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, **PRECISIONS[precision])
    for step in range(50):
        grad = torch.randn(256)
        grad[::2] *= 1e-5 if step % 10 == 0 else 0.0
        before = p.detach().clone()
        p.grad = grad
        optimizer.step()
        assert (p - before).abs().max() < 1e-3 * 10


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e-8, 1.0, 1e8, 1e18])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_huge_and_tiny_gradients(precision, size):
    p = nn.Parameter(torch.zeros(300))
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0, **PRECISIONS[precision])
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        p.grad = torch.randn(300, generator=generator) * size
        optimizer.step()
    assert p.isfinite().all()
    assert p.abs().max() < 0.02


def test_stochastic_rounding_follows_small_changes_of_exp_avg_sq():
    """With beta2 0.999 a step changes exp_avg_sq by less than nearest rounding in units of a power of two can see."""
    torch.manual_seed(0)
    reached = {}
    for stochastic in (False, True):
        p = nn.Parameter(torch.zeros(1280))
        optimizer = AdamW(
            [p], betas=(0.9, 0.999), exp_avg_sq="e4m3", scale="pow2", stochastic_rounding=stochastic, lr=0.0
        )
        for _ in range(600):
            p.grad = torch.randn(1280)
            optimizer.step()
        reached[stochastic] = dequantized(optimizer.state[p]["exp_avg_sq"]).mean().item() / (1 - 0.999**600)
    assert reached[True] == pytest.approx(1.0, rel=0.03)
    assert reached[False] < 0.5


def test_stochastic_rounding_lets_exp_avg_reach_gradients_that_stay():
    """Nearest rounding loses the end of the way: a tenth of what is left is less than half of E4M3's spacing."""
    torch.manual_seed(0)
    before = torch.randn(1280)
    after = before * (1 + 0.3 * torch.rand(1280))
    reached = {}
    for rounding in (False, True):
        p = nn.Parameter(torch.zeros(1280))
        optimizer = AdamW([p], exp_avg="e4m3", scale="pow2", stochastic_rounding=rounding, lr=0.0)
        for step in range(100):
            p.grad = (before if step < 50 else after).clone()
            optimizer.step()
        way = dequantized(optimizer.state[p]["exp_avg"]) - before
        reached[rounding] = (way @ (after - before) / (after - before).square().sum()).item()
    assert reached[True] == pytest.approx(1.0, abs=0.03)
    assert reached[False] < 0.8


@pytest.mark.parametrize("precision", ["e4m3", "coat", "fishman"])
def test_nearest_rounding_with_exact_scales_follows_a_slow_decay(precision):
    decayed = {}
    for name in ("fp32", precision):
        torch.manual_seed(0)
        p = nn.Parameter(torch.zeros(1280))
        optimizer = AdamW([p], betas=(0.9, 0.999), lr=0.0, **{**PRECISIONS[name], "stochastic_rounding": False})
        for step in range(200):
            p.grad = torch.randn(1280) * (step == 0)
            optimizer.step()
        decayed[name] = dequantized(optimizer.state[p]["exp_avg_sq"]).max().item()
    assert decayed[precision] == pytest.approx(decayed["fp32"], rel=0.03)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"exp_avg": "e4m4"}, "fp8.optimizer.exp_avg"),
        ({"granularity": "row"}, "fp8.optimizer.granularity"),
        ({"scale": "e8m0"}, "fp8.optimizer.scale"),
        ({"exp_avg": "e4m3_expanded", "granularity": "tensor"}, "fp8.optimizer.granularity"),
        ({"lr": -1.0}, "optimizer.params.lr"),
        ({"betas": (0.9, 1.0)}, "optimizer.params.betas"),
        ({"eps": -1e-8}, "optimizer.params.eps"),
        ({"weight_decay": -0.1}, "optimizer.params.weight_decay"),
    ],
)
def test_arguments_that_are_refused(keywords, key):
    with pytest.raises(UserError) as caught:
        AdamW([nn.Parameter(torch.zeros(1))], **keywords)
    assert caught.value.key == key
    assert caught.value.remedy


# ---------------------------------------------------------------- state


def through_a_file(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("dtype", "compact"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_a_resumed_run_is_the_run_that_was_not_interrupted(precision, dtype, compact):
    whole, _, losses = trained(precision, 12, dtype)
    net, optimizer, _ = trained(precision, 7, dtype)
    optimizer.compact = compact
    resumed = network(dtype)
    resumed.load_state_dict(through_a_file(net.state_dict()))
    again = AdamW(resumed.parameters(), **{**HYPERPARAMETERS, "lr": 1.0}, **PRECISIONS[precision])
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_equal(moments(again), moments(optimizer))
    assert train(resumed, again, 5, start=7) == losses[7:]
    assert_equal(list(resumed.parameters()), list(whole.parameters()))


def test_a_compact_checkpoint_is_a_quarter():
    _, optimizer, _ = trained("coat", 2)
    sizes = []
    for optimizer.compact in (False, True):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(file.tell())
    assert sizes[1] < 0.33 * sizes[0]


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_checkpoints_move_to_torchs_adamw_and_back(precision):
    net, optimizer, _ = trained(precision, 5)
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32
    theirs = torch.optim.AdamW(net.parameters(), lr=1.0)
    theirs.load_state_dict(state_dict)
    assert theirs.param_groups[0]["lr"] == HYPERPARAMETERS["lr"]
    train(net, theirs, 3, start=5)
    back = AdamW(net.parameters(), **PRECISIONS[precision])
    back.load_state_dict(theirs.state_dict())
    tolerance = max(ROUNDING.get(back.precision.exp_avg, 0), ROUNDING.get(back.precision.exp_avg_sq, 0))
    for p in net.parameters():
        assert back.state[p]["step"] == 8
        for key in ("exp_avg", "exp_avg_sq"):
            expected = theirs.state[p][key]
            error = (dequantized(back.state[p][key]).view(p.shape) - expected).abs()
            assert (error <= 1.01 * tolerance * expected.abs().max()).all()
    train(net, back, 1, start=8)


def test_a_checkpoint_in_one_precision_loads_in_another_which_stays():
    net, optimizer, _ = trained("coat", 5)
    for precision in PRECISIONS:
        other = AdamW(net.parameters(), **PRECISIONS[precision])
        other.load_state_dict(optimizer.state_dict())
        kinds = {type(other.state[p]["exp_avg"]) for p in net.parameters()}
        assert kinds == {torch.Tensor if precision in ("fp32", "bf16") else Moment}
        assert other.precision.exp_avg == PRECISIONS[precision].get("exp_avg", "fp32")


def test_fp32_state_written_into_the_optimizer_is_compressed_at_the_next_step():
    """As DeepSpeed loads universal checkpoints: moments in FP32, and one `step` tensor for all parameters."""
    first, second = (nn.Parameter(torch.ones(200)) for _ in range(2))
    optimizer = AdamW([first, second], **PRECISIONS["coat"])
    shared = torch.tensor(4.0)
    for p in (first, second):
        optimizer.state[p] = {"step": shared, "exp_avg": torch.ones(200), "exp_avg_sq": torch.ones(200)}
        p.grad = torch.ones(200)
    optimizer.step()
    for p in (first, second):
        assert optimizer.state[p]["step"] == 5
        assert dequantized(optimizer.state[p]["exp_avg"]) == pytest.approx(torch.ones(200))


@pytest.mark.parametrize("precision", ["coat", "fp8lm"])
def test_a_part_of_a_moment_is_read_decoded(precision):
    p = nn.Parameter(torch.zeros(1000))
    optimizer = AdamW([p], **PRECISIONS[precision])
    optimizer.set_segments(p, (100, 0, 900))
    p.grad = torch.randn(1000)
    optimizer.step()
    moment = optimizer.state[p]["exp_avg"]
    for start, length in ((0, 1000), (90, 200), (130, 1), (999, 1), (500, 0)):
        assert torch.equal(moment.narrow(0, start, length), moment.dequantize()[start : start + length])


def test_tensors_flattened_together_have_scales_of_their_own():
    p = nn.Parameter(torch.zeros(300))
    grad = torch.ones(300)
    grad[:100] = 1e-9
    errors = []
    for segments in ((), (100, 200)):
        optimizer = AdamW([p], **PRECISIONS["fishman"])
        optimizer.set_segments(p, segments)
        p.grad = grad.clone()
        optimizer.step()
        exp_avg = dequantized(optimizer.state[p]["exp_avg"])
        errors.append((exp_avg[:100] / (0.1 * 1e-9) - 1).abs().max().item())
    assert errors[0] == 1  # underflown
    assert errors[1] < ROUNDING["e4m3"]


@pytest.mark.parametrize("precision", ["coat", "stochastic"])
def test_copies_are_whole_and_independent(precision):
    net, optimizer, _ = trained(precision, 3)
    net_copy, optimizer_copy = copy.deepcopy((net, optimizer))
    assert train(net_copy, optimizer_copy, 2, start=3) == train(net, optimizer, 2, start=3)


def test_checkpoints_of_something_else_are_refused():
    net = network()
    optimizer = AdamW(net.parameters())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, sgd, 1)
    with pytest.raises(UserError, match="not of an Adam"):
        optimizer.load_state_dict(sgd.state_dict())
    amsgrad = torch.optim.AdamW(net.parameters(), amsgrad=True)
    train(net, amsgrad, 1)
    with pytest.raises(UserError, match="AMSGrad"):
        optimizer.load_state_dict(amsgrad.state_dict())
    smaller = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(UserError, match="parameter groups"):
        optimizer.load_state_dict(smaller.state_dict())

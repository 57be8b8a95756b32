"""Training with weights, gradients and moments in emulated formats, and what the start report says of it."""

import pytest

from tests.zero import models

EMULATED = {
    "linear": {"weight": {"format": "int8", "granularity": "row", "scale": "fp32"}, "input": {"format": "e3m4"}},
    "param_gather": {"format": "int8"},
    "grad_reduce": {"format": "log8"},
    "optimizer": {"exp_avg": "e3m4", "exp_avg_sq": "log8"},
    "monitor": {"every": 2},
}


def losses_and_report(folder):
    """Losses of 6 steps, of the last 2 again after a resume, and of BF16; report, health, and shares of its bytes."""
    engine = models.build(models.config(EMULATED))
    losses = models.train(engine, 4)
    engine.save_checkpoint(folder, tag="middle")
    losses += models.train(engine, 2, start=4)
    measured, wire, report = engine.fp8.health.last.measurement, engine.fp8.wire.take(), engine.fp8.report
    resumed = models.build(models.config(EMULATED))
    resumed.load_checkpoint(folder, tag="middle")
    again = models.train(resumed, 2, start=4)
    reference = models.build({**models.config(), "fp8": {"enabled": False}})
    plain = models.train(reference, 6)
    sent = reference.fp8.wire.take()
    share = {purpose: wire[purpose] / sent[purpose] for purpose in sent if sent[purpose]}
    return {"losses": losses, "again": again, "plain": plain, "report": report, "share": share, "measured": measured}


def test_training_resumes_stays_near_bf16_and_calls_itself_emulated(ranks, tmp_path):
    for found in ranks(2, losses_and_report, str(tmp_path)):
        assert found["again"] == found["losses"][4:]
        assert found["losses"][-1] < 0.95 * found["losses"][0]
        for ours, theirs in zip(found["losses"], found["plain"], strict=True):
            assert ours == pytest.approx(theirs, rel=0.02)
        assert found["losses"] != found["plain"]
        assert min(figures.snr_db for figures in found["measured"]["grad_weight"].values()) > 20
        emulated = ["e3m4 1x128 pow2", "int8 row fp32", "log8 gradients on the wire", "e3m4 exp_avg", "log8 exp_avg_sq"]
        assert found["report"]["emulated"] == emulated
        note = f"emulated, in one byte an element: {', '.join(emulated)}; nothing here computes with them natively"
        assert note in found["report"]["notes"]
        assert found["report"]["param_gather"] == "int8"
        assert all(share < 0.62 for share in found["share"].values()), found["share"]  # embedding and head are BF16
        assert found["report"]["moment_bytes_per_parameter"] < 2.1

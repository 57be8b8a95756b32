"""Sharpness of the loss in the logits: how much worse the loss gets when logits move a little, as far as they can.

    box          |d[v]| <= relative · (|z[v]| + 1)     for every logit z[v] of a token (Keskar et al., arXiv 1609.04836)
    loss(d)      logsumexp(z + d) - (z + d)[y]         of the label y
    sharpness    100 · (max over the box of mean loss(d) - mean loss(0)) / (1 + mean loss(0))

Lee et al. (To FP8 and Back Again, arXiv 2405.18710) measure language models in their logits, for which the input and
the weights, as Keskar et al. perturb them, are too many and not comparable between models. Their exact search and size
of the box are not taken over: the loss grows in every logit but the label's, in which it falls, so its largest value
over the box is at a corner, d[v] = +limit for all v but the label and -limit for that, and no search is needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from ds_fp8.data import IGNORED
from ds_fp8.train.batches import Batch

RELATIVE = 0.01
"""Size of the box."""


def losses_at_worst(
    logits: torch.Tensor, labels: torch.Tensor, relative: float = RELATIVE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of every token, and the largest that moving its logits within the box makes of it.

    Args:
        logits: [T, V].
        labels: int64 [T], the token that each row predicts.
        relative: Size of the box, at least 0.

    Returns:
        Two FP32 tensors [T], in nats.
    """
    logits = logits.float()
    moved = logits.abs().add(1).mul(relative)
    # The corner of the box: all logits up, the label's down.
    moved.scatter_(1, labels[:, None], -moved.gather(1, labels[:, None]))
    return F.cross_entropy(logits, labels, reduction="none"), F.cross_entropy(logits + moved, labels, reduction="none")


def sharpness(loss: float, worst: float) -> float:
    """Return the sharpness, in percent, of a mean loss and its largest value within the box."""
    return 100 * (worst - loss) / (1 + loss)


@torch.no_grad()
def logit_sharpness(model: torch.nn.Module, batches: Iterable[Batch], relative: float = RELATIVE) -> dict[str, float]:
    """Measure a model on batches of a stage.

    Args:
        model: A causal language model of transformers; it is left in evaluation mode.
        batches: `input_ids`, `labels` and `position_ids` [rows, tokens].
        relative: Size of the box.

    Returns:
        The mean loss per label token, its largest value within the box, both in nats, and the sharpness in percent.
    """
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        wanted = labels != IGNORED
        loss, worst = losses_at_worst(logits[wanted], labels[wanted], relative)
        totals += torch.stack([loss.double().sum(), worst.double().sum(), wanted.sum().double()]).cpu()
    total, at_worst, count = totals.tolist()
    loss, worst = total / max(count, 1), at_worst / max(count, 1)
    return {"loss": loss, "worst_loss": worst, "relative": relative, "sharpness": sharpness(loss, worst)}

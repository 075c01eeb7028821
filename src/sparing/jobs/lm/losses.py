"""The loss of a causal language model: of some rows, of all that were held out, over one process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.jobs.live import device_of, measuring
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.packing import Packed
from sparing.jobs.step import SpoiltError


def takes_positions(model: nn.Module) -> bool:
    """Whether a model can be told where documents begin.

    Args:
        model: A causal language model, wrapped by peft or not.

    Returns:
        Whether its forward has ``position_ids``.
    """
    unwrapped: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return "position_ids" in inspect.signature(unwrapped.forward).parameters


def keeps_apart(model: nn.Module) -> bool:
    """Whether documents that share a row do not see each other, tried on two documents of four tokens.

    A ``position_ids`` in the signature says little: OPT, Falcon and models with recurrent layers take it, and let the
    second document see the first.

    Args:
        model: A causal language model, wrapped by peft or not.

    Returns:
        Whether another first document leaves the second one's logits as they were, up to rounding.
    """
    if not takes_positions(model):
        return False
    device, known = device_of(model), model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    one = torch.arange(8, device=device) % known
    other = torch.cat([(one[:4] + known // 2 + 1) % known, one[4:]])
    places = torch.arange(4, device=device).repeat(2)
    with measuring(model):  # row by row: a mixture of experts then groups its tokens alike
        first, second = (
            model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0].double()
            for ids in (one, other)
        )
    moved = (first - second).abs()
    rounding = 8 * torch.finfo(next(model.parameters()).dtype).eps
    return bool(moved[4:].max() <= rounding * moved[:4].max())


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """The summed next-token loss of some rows.

    Args:
        model: A causal language model whose output has ``logits`` of shape (batch, length, vocabulary).
        ids: Token ids, int64, shape (batch, length).
        labels: The ids to learn, −100 elsewhere, int64, shape (batch, length); not shifted.
        positions: Place of each token in its document, int64, shape (batch, length); None: a row is a document.

    Returns:
        Sum over labels, in nats, shape (); float32 or the logits' finer format.
    """
    places = {} if positions is None or not takes_positions(model) else {"position_ids": positions}
    logits = model(input_ids=ids, use_cache=False, **places).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Labels are shifted rather than logits, so that the largest tensor of the step is not copied.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_sum(model: nn.Module, data: Packed, rows: Tensor) -> Tensor:
    """``loss_of`` some rows of a table, moved to where the model is.

    Args:
        model: A causal language model.
        data: The table.
        rows: Which rows, int64, shape (batch,).

    Returns:
        Sum over labels, in nats, shape ().
    """
    device = next(model.parameters()).device
    places = None if data.positions is None else data.positions[rows].to(device)
    return loss_of(model, data.ids[rows].to(device), data.labels[rows].to(device), places)


def held_out_loss(model: nn.Module, data: Packed, *, batch: int = 1) -> tuple[float, int]:
    """Mean loss over the labels of all rows.

    Args:
        model: A causal language model.
        data: Rows that were not trained on.
        batch: Rows at once (count); the mean does not depend on it but for rounding.

    Returns:
        (loss in nats per label, labels).
    """
    with measuring(model):
        parts: Sequence[Tensor] = torch.split(torch.arange(data.rows), batch)
        total = math.fsum(loss_sum(model, data, rows).item() for rows in parts)
    return total / data.tokens, data.tokens


Measure = Callable[..., tuple[float, int]]
"""``held_out_loss``, or what does the same over several ranks."""


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss.

    Args:
        loss: In nats.

    Returns:
        e to the loss; infinity beyond what a float holds; NaN, which is no size at all, stays NaN.
    """
    return math.inf if loss >= 709 else math.exp(loss)


def refuse_spoilt(step: int, loss: float, rows: str) -> None:
    """Refuse weights that a step has spoilt.

    A step is applied when loss and gradient *before* it are finite; what it did shows in the next loss only.

    Args:
        step: Steps applied so far (count).
        loss: Of the weights as they are, in nats.
        rows: What it was measured on, for the message.

    Raises:
        SpoiltError: If that loss has no finite perplexity.
    """
    if step and not math.isfinite(perplexity(loss)):
        raise SpoiltError(f"step {step} spoilt the weights: the loss of the {rows} is {loss:g} after it")

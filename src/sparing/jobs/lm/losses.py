"""The loss of a causal language model: of some rows, and of all that were held out, by one process or several."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.packing import Packed
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.step import SpoiltError
from sparing.jobs.torch_state import device_of, measuring


def takes_positions(model: nn.Module) -> bool:
    """Whether a model's forward takes ``position_ids``."""
    unwrapped: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return "position_ids" in inspect.signature(unwrapped.forward).parameters


def isolates_documents(model: nn.Module) -> bool:
    """Whether documents that share a row do not see each other, tried on two documents of four tokens."""
    if not takes_positions(model):
        return False
    # A ``position_ids`` in the signature says little: OPT, Falcon and models with recurrent layers take it, and let the
    # second document see the first. So another first document must leave the second one's logits as they were.
    device, known = device_of(model), model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    one = torch.arange(8, device=device) % known
    other = torch.cat([(one[:4] + known // 2 + 1) % known, one[4:]])
    places = torch.arange(4, device=device).repeat(2)
    with measuring(model):
        # row by row: a mixture of experts then groups its tokens alike
        first, second = (
            model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0].double()
            for ids in (one, other)
        )
    moved = (first - second).abs()
    # Relative to how far the first document's own logits moved.
    rounding = 8 * torch.finfo(next(model.parameters()).dtype).eps
    return bool(moved[4:].max() <= rounding * moved[:4].max())


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """Summed next-token loss in nats, shape (); float32 or the logits' finer format.

    ``ids``, ``labels`` (not shifted, −100 is ignored) and ``positions`` in each document are int64, (batch, length).
    """
    places = {} if positions is None or not takes_positions(model) else {"position_ids": positions}
    logits = model(input_ids=ids, use_cache=False, **places).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Labels are shifted rather than logits, so that the largest tensor of the step is not copied.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_sum(model: nn.Module, data: Packed, rows: Tensor) -> Tensor:
    """``loss_of`` some rows (int64, (batch,)) of a table, moved to where the model is; of no rows it is 0."""
    device = next(model.parameters()).device
    if not len(rows):
        # Of several ranks all take part in collectives, so one without rows runs a row whose labels are all ignored.
        ids = data.ids[:1].to(device)
        return loss_of(model, ids, torch.full_like(ids, IGNORED))
    places = None if data.positions is None else data.positions[rows].to(device)
    return loss_of(model, data.ids[rows].to(device), data.labels[rows].to(device), places)


def held_out_loss(model: nn.Module, data: Packed, *, batch: int = 1, ranks: Ranks = ONE_PROCESS) -> tuple[float, int]:
    """Mean loss in nats per label over all rows, the same on every rank, and the number of labels."""
    with measuring(model):
        parts = torch.split(torch.arange(data.rows), batch * ranks.world)
        total = math.fsum(loss_sum(model, data, ranks.part(rows)).item() for rows in parts)
    return ranks.sum(total) / data.tokens, data.tokens


def perplexity(loss: float) -> float:
    """Return e to the power of a mean loss in nats; infinity where that overflows, NaN stays NaN."""
    # ``math.exp`` raises OverflowError from 709.8 on
    return math.inf if loss >= 709 else math.exp(loss)


def refuse_spoilt(step: int, loss: float, rows: str) -> None:
    """Raise if the loss (nats) of the weights after ``step`` steps has no finite perplexity."""
    # A step is applied when loss and gradient before it are finite; what it did shows in the next loss only.
    if step and not math.isfinite(perplexity(loss)):
        raise SpoiltError(f"step {step} spoilt the weights: the loss of the {rows} is {loss:g} after it")

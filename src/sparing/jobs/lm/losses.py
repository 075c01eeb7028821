"""The loss of a causal language model: of some rows, and of all that were held out, by one process or several."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparing.jobs.lm.documents import packed
from sparing.jobs.lm.head_loss import head_loss
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.packing import Packed
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.step import SpoiltError
from sparing.jobs.torch_state import device_of, measuring, to_device


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
    with measuring(model), packed(places[None].cpu()):
        # row by row: a mixture of experts then groups its tokens alike
        first, second = (
            model(input_ids=ids[None], position_ids=places[None], use_cache=False).logits[0].double()
            for ids in (one, other)
        )
    moved = (first - second).abs()
    # Relative to how far the first document's own logits moved.
    rounding = 8 * torch.finfo(next(model.parameters()).dtype).eps
    return bool(moved[4:].max() <= rounding * moved[:4].max())


def loss_of(
    model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor | None = None, *, at_once: int = 0
) -> Tensor:
    """Summed next-token loss in nats, shape (); float32 or the logits' finer format.

    ``ids``, ``labels`` (not shifted, −100 is ignored) and ``positions`` in each document are int64, (batch, length).
    With ``at_once``, logits of so many tokens exist at a time.
    """
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if positions is not None and takes_positions(model):
        inputs["position_ids"] = positions
    # Labels are shifted rather than logits, so that the largest tensor of the step is not copied.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    if not 0 < at_once < targets.numel():
        return _cross_entropy(model(**inputs).logits.flatten(0, 1), targets)
    hidden, head = _before_head(model, inputs)
    if type(head) is nn.Linear:
        return head_loss(head, hidden.flatten(0, 1), targets, at_once)
    # any other module, such as a head with adapters, is called again in the backward pass
    pairs = zip(torch.split(hidden.flatten(0, 1), at_once), torch.split(targets, at_once), strict=True)
    parts = [checkpoint(_part_loss, head, rows, wanted, use_reentrant=False) for rows, wanted in pairs]
    return torch.stack(parts).sum()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def _part_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(head(hidden), targets)


def _before_head(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, nn.Module]:
    """What a model gives to its head, (batch, length, width), and the head; the head itself sees no token."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    seen: list[Tensor] = []

    def take(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(given[0])
        return (given[0][:, :0],)

    handle = head.register_forward_pre_hook(take)
    try:
        model(**inputs)
    finally:
        handle.remove()
    return seen[0], head


def ends_with_head(model: nn.Module) -> bool:
    """Whether the logits are what the head returns, untouched: no scale, no cap; meta and fake tensors will do."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        return False
    made: list[object] = []
    handle = head.register_forward_hook(lambda module, given, result: made.append(result))
    try:
        with measuring(model):
            ids = torch.zeros((1, 2), dtype=torch.long, device=device_of(model))
            logits = model(input_ids=ids, use_cache=False).logits
        return any(logits is result for result in made)
    finally:
        handle.remove()


def loss_sum(model: nn.Module, data: Packed, rows: Tensor, *, at_once: int = 0) -> Tensor:
    """``loss_of`` some rows (int64, (batch,)) of a table, moved to where the model is; of no rows it is 0."""
    device = device_of(model)
    if not len(rows):
        # Of several ranks all take part in collectives, so one without rows runs a row whose labels are all ignored.
        ids = to_device(data.ids[:1], device)
        return loss_of(model, ids, torch.full_like(ids, IGNORED))
    ids, labels = to_device(data.ids[rows], device), to_device(data.labels[rows], device)
    places = None if data.positions is None else to_device(data.positions[rows], device)
    with packed(None if data.positions is None else data.positions[rows]):
        return loss_of(model, ids, labels, places, at_once=at_once)


def held_out_loss(
    model: nn.Module, data: Packed, *, batch: int = 1, ranks: Ranks = ONE_PROCESS, at_once: int = 0
) -> tuple[float, int]:
    """Mean loss in nats per label over all rows, the same on every rank, and the number of labels."""
    with measuring(model):
        parts = torch.split(torch.arange(data.rows), batch * ranks.world)
        total = math.fsum(loss_sum(model, data, ranks.part(rows), at_once=at_once).item() for rows in parts)
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

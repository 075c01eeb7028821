"""A mod for any Flower app: how many signs of the model a client kept."""

from __future__ import annotations

import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from sparing.vectors import sign_agreement

_STATISTICS = ("running_mean", "running_var")  # floating buffers of batch norm; no weights


def sign_telemetry(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Add to a reply's metrics the share of weights whose sign the client kept, as ``ssr``.

    Works on every Flower app, unchanged: ``ClientApp(mods=[sign_telemetry])``. Flower's strategies average it with
    the other metrics. A message or reply without arrays, or without metrics, passes as it is.

    Source: Li et al. 2024 (arXiv:2405.12489), the sign similarity of Sec. 5.
    """
    # Held before the app runs, which may empty the record that it was given.
    before = _model(message.content) if message.has_content() else None
    reply = call_next(message, context)
    after = _model(reply.content) if reply.has_content() else None
    if before is not None and after is not None and reply.content.metric_records:
        next(iter(reply.content.metric_records.values()))["ssr"] = _kept(before, after)
    return reply


def _model(content: RecordDict) -> dict[str, Array] | None:
    """Return the arrays of the model: those called so, as by Flower's strategies, or the first ones."""
    records = content.array_records
    record = records.get("arrays", next(iter(records.values()), None))
    return None if record is None else dict(record)


def _kept(before: dict[str, Array], after: dict[str, Array]) -> float:
    names = [name for name in before if name in after and not name.endswith(_STATISTICS)]
    first, second = ({name: torch.from_numpy(record[name].numpy()) for name in names} for record in (before, after))
    for name in names:
        floating = first[name].is_floating_point() and second[name].is_floating_point()
        if first[name].shape != second[name].shape or not floating:
            del first[name], second[name]
    return float(sign_agreement(first, second))

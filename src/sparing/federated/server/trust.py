"""FLTrust: the server trains on clean rows of its own, and clients count by how far they go its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparing.errors import UserError, require
from sparing.federated.client.train import Client
from sparing.federated.methods.interface import Method, Update, Vector
from sparing.federated.server.defences import flat, inner_rules, whole_models
from sparing.federated.server.robust import Median
from sparing.federated.settings import Schedule

ROOT = -1
"""Number of the server among the clients: of its random streams, and of its update."""


@dataclass(frozen=True, slots=True)
class FLTrust:
    """g + Σ t_k (‖s‖/‖u_k‖) u_k / Σ t_k, t_k = max(cos(u_k, s), 0): updates u as long as the server's own s.

    s is what the server's rows (``root=`` of ``simulate`` and of Flower's strategy) make of g in a client's training.
    Where nobody is trusted the model stays as it is. Weights do not count. Buffers are medians of the trusted: lengths
    of updates are not in their units.

    Source: Cao, Fang, Liu & Gong 2021 (arXiv:2012.13995), Algorithm 2, where the root set is D₀ and s is g₀.
    """

    server: Update | None = None  # what the server trained in this round, put here before every step

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the model after the trusted mean of the rescaled updates."""
        found = {name: value.double() for name, value in center.items()}
        trusted, scales = self._trusted(center, updates)
        for update, scale in zip(trusted, scales, strict=True):
            for name, value in center.items():
                found[name] = found[name] + scale * (update.params[name].double() - value.double())
        return {name: found[name].to(value.dtype) for name, value in center.items()}

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the medians of the trusted; where nobody is, the buffers as they are."""
        if not center:
            return {}
        # Here the center is of buffers: the model that updates began at came with the server's.
        trusted = self._trusted(self._own().extras["sent"], updates)[0]
        return Median().buffers(center, trusted) if trusted else dict(center)

    def _own(self) -> Update:
        if self.server is None:
            why, do = "the server has no update of its own to compare with", "pass root=, rows of the server's own"
            raise UserError("FLTrust", got="no root rows", why=why, do=do)
        return self.server

    def _trusted(self, center: Vector, updates: Sequence[Update]) -> tuple[list[Update], list[float]]:
        """Updates whose trust is above zero, and what each is multiplied by: t ‖s‖/‖u‖ over the sum of the t."""
        own = self._own()
        ordered = whole_models("FLTrust", updates)
        start = flat(Update(ROOT, center))
        whole = start.shape == flat(own).shape == flat(ordered[0]).shape
        require(whole, "FLTrust", "partial models", "it compares whole models", "pass blocks=None")
        step = flat(own) - start
        moves = torch.stack([flat(update) for update in ordered]) - start
        length, lengths = torch.linalg.vector_norm(step), torch.linalg.vector_norm(moves, dim=1)
        # A client, or a server, that did not move points nowhere: no trust, rather than 0/0.
        trust = torch.where(lengths > 0, (moves @ step) / (lengths * length), 0.0).nan_to_num(nan=0.0).clamp_min(0.0)
        scale = trust / trust.sum() * length / lengths
        at = trust.nonzero().flatten().tolist()
        return [ordered[k] for k in at], [float(scale[k]) for k in at]


def needs_root(value: Any) -> bool:
    """Say whether a method, or a rule, has FLTrust in it."""
    return isinstance(value, FLTrust) or any(needs_root(inner) for inner in inner_rules(value).values())


def with_root(value: Any, server: Update, sent: Vector) -> Any:
    """Return a method, or a rule, whose FLTrust compares with an update of the server's that began at ``sent``."""
    if isinstance(value, FLTrust):
        return replace(value, server=replace(server, extras={"sent": sent}))
    changed = {name: with_root(inner, server, sent) for name, inner in inner_rules(value).items() if needs_root(inner)}
    return replace(value, **changed) if changed else value


def check_root(method: Method, schedule: Schedule, root: Client | None, params: Vector) -> None:
    """Refuse FLTrust without rows, rows without FLTrust, and what the server could not train as clients do."""
    if not needs_root(method):
        require(root is None, "root", "rows", "only FLTrust trains on them", "pass combine=FLTrust(), or root=None")
        return
    why, do = "the server has nothing of its own to compare updates with", "pass root=Client(inputs, targets)"
    require(root is not None and len(root) > 0, "root", "no rows", why, do)
    why = "the server would need a client's state"
    require(not method.client_state(params), "FLTrust", f"with {method.name}", why, "pass FedAvg() or FedProx()")
    why = "FLTrust compares whole models, and clients would send different blocks"
    require(schedule.blocks is None, "Schedule.blocks", schedule.blocks, why, "pass blocks=None")


def all_sizes(sizes: Sequence[int], root: Client | None) -> list[int]:
    """Return the rows of all clients, and of the server where it has some: a run with others is another run."""
    return [*sizes, *([] if root is None else [len(root)])]

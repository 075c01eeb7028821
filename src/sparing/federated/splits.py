"""Splits: which rows of a data set belong to which client.

Two rules go by the name "Dirichlet split", and they are not the same. ``rule="classes"`` draws, for each class, the
shares of the clients (Yurochkin et al. 2019; NIID-Bench of Li et al. 2022, Flower). ``rule="clients"`` draws, for each
client, the shares of the classes, and then scales every class to its rows (the code of Li et al. 2023, FedPAN). The
rule is recorded in the split and in its file.

Example:
    >>> labels = torch.arange(60) % 3
    >>> dirichlet(labels, clients=4, alpha=0.5, seed=1).counts(labels).shape  # clients x classes
    torch.Size([4, 3])
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.report.atomic import write_whole
from sparing.seeds import stream

MAX_DRAWS = 1000
"""Draws before a split is given up."""

_FORMAT, _VERSION = "sparing.split", 1
_RULES = ("classes", "clients")
_FIX = "pass a file that sparing.federated wrote"


@dataclass(frozen=True, slots=True)
class Split:
    """Rows by client; no row belongs to two."""

    clients: tuple[tuple[int, ...], ...]  # row numbers of each client, ascending
    rule: str  # "classes" or "clients" (the Dirichlet rules), "shards" or "natural"
    alpha: float | None  # concentration of the Dirichlet distribution; None for the other rules
    seed: int  # 0 where nothing was drawn
    labels: str = ""  # their SHA-256 (hexadecimal); empty where there were none

    def __len__(self) -> int:
        return len(self.clients)

    def counts(self, labels: Tensor) -> Tensor:
        """Return rows by client and class, shape (clients, classes), int64."""
        _require_same_labels(self, labels)
        classes = int(labels.max()) + 1
        sizes = torch.tensor([len(rows) for rows in self.clients])
        rows = torch.tensor([row for rows in self.clients for row in rows], dtype=torch.long)
        cells = torch.repeat_interleave(torch.arange(len(self)), sizes) * classes + labels[rows].long()
        return torch.bincount(cells, minlength=len(self) * classes).view(len(self), classes)


def dirichlet(
    labels: Tensor, clients: int, alpha: float, *, rule: str = "classes", seed: int = 0, least: int = 1
) -> Split:
    """Split rows so that the classes are spread unevenly, redrawn until every client has rows.

    Args:
        labels: Shape (n,), integers >= 0.
        clients: Number of clients (K).
        alpha: Concentration (α) > 0: towards 0 each class goes to one client, towards infinity all clients become
            alike.
        rule: ``"classes"``: for each class a draw over clients, in which no client that has n/K rows already takes
            part. ``"clients"``: for each client a draw over classes, then every class divided by its sum over clients
            and cut at rounded shares.
        seed: Seed of the draw.
        least: Smallest number of rows that every client must have.

    Returns:
        A partition of all rows.

    Raises:
        UserError: If a value is invalid, or none of ``MAX_DRAWS`` draws gave every client its rows.

    Example:
        >>> split = dirichlet(torch.arange(100) % 4, clients=5, alpha=0.5, seed=1)
        >>> sorted(row for rows in split.clients for row in rows) == list(range(100))
        True
    """
    _require_labels(labels)
    require(alpha > 0, "alpha", alpha, "the Dirichlet distribution needs a positive concentration", "pass alpha > 0")
    require(rule in _RULES, "rule", repr(rule), "there are two Dirichlet rules", 'pass "classes" or "clients"')
    require(clients >= 1, "clients", clients, "someone must hold the rows", "pass clients >= 1")
    enough = len(labels) >= clients * max(least, 1)
    require(enough, "clients", clients, f"{len(labels)} rows give no {max(least, 1)} to each", "pass fewer clients")
    for attempt in range(MAX_DRAWS):
        # Each attempt has a stream, so that what a redraw gives does not depend on how far the last one came.
        owners = _dirichlet_owners(labels, clients, alpha, rule, stream(seed, "split", rule, attempt))
        if int(torch.bincount(owners, minlength=clients).min()) >= least:
            return Split(_rows_of(owners, clients), rule, float(alpha), seed, _hash(labels))
    raise UserError(
        "split",
        got=f"a client with fewer than {least} rows in each of {MAX_DRAWS} draws",
        why=f"alpha {alpha} over {clients} clients and {len(labels)} rows leaves some of them without",
        do="raise alpha, lower the number of clients or the least number of rows",
    )


def shards(labels: Tensor, clients: int, per_client: int, seed: int = 0) -> Split:
    """Sort rows by label, cut them into equal shards and deal those out (McMahan et al. 2017, §3)."""
    _require_labels(labels)
    require(clients >= 1 and per_client >= 1, "shards", clients * per_client, "nobody gets a row", "pass counts >= 1")
    count = clients * per_client
    require(len(labels) >= count, "shards", count, f"there are only {len(labels)} rows", "pass fewer clients or shards")
    source = stream(seed, "split", "shards")
    # Shuffled before the stable sort, so that rows of one class are in random order.
    order = torch.randperm(len(labels), generator=source)
    order = order[torch.argsort(labels[order], stable=True)]
    dealt = torch.randperm(count, generator=source) // per_client
    owners = torch.empty(len(labels), dtype=torch.long)
    # The first shards are one longer where the rows do not go round, as ``tensor_split`` has them.
    sizes = torch.full((count,), len(labels) // count)
    sizes[: len(labels) % count] += 1
    owners[order] = torch.repeat_interleave(dealt, sizes)
    return Split(_rows_of(owners, clients), "shards", None, seed, _hash(labels))


def natural(groups: Sequence[Hashable]) -> Split:
    """Give each group of the data (a writer, a hospital, a device) to a client of its own.

    Example:
        >>> natural(["ann", "bob", "ann"]).clients
        ((0, 2), (1,))
    """
    require(len(groups) > 0, "groups", "none", "there is nothing to split", "pass the group of each row")
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return Split(tuple(map(tuple, rows.values())), "natural", None, 0)


def save(split: Split, path: str | PathLike[str]) -> Path:
    """Write a split as JSON, whole or not at all."""
    return write_whole(path, json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(split)}) + "\n")


def load(path: str | PathLike[str], labels: Tensor | None = None) -> Split:
    """Read a split that ``save`` wrote, and compare its hash with that of ``labels`` where both are there."""
    name = Path(path).name
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
        split = _parse(known)
    except OSError as error:
        raise UserError("split", got=name, why=f"it cannot be read ({error.strerror})", do=_FIX) from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise UserError("split", got=name, why=f"it is not a whole split ({error})", do=_FIX) from None
    if labels is not None:
        _require_same_labels(split, labels)
    return split


def _parse(known: Any) -> Split:
    """Turn what was read into a split, or raise ``ValueError``."""
    if not isinstance(known, dict) or (known.get("format"), known.get("version")) != (_FORMAT, _VERSION):
        raise ValueError(f"no {_FORMAT} of version {_VERSION}")
    clients = tuple(tuple(rows) for rows in known["clients"])
    rows = [row for client in clients for row in client]
    if not all(type(row) is int and row >= 0 for row in rows) or len(set(rows)) != len(rows):
        raise ValueError("rows must be numbers >= 0, each with one client")
    if not clients or not all(clients):
        raise ValueError("a client without rows")
    alpha = known["alpha"]
    alpha = None if alpha is None else float(alpha)
    return Split(clients, str(known["rule"]), alpha, int(known["seed"]), str(known["labels"]))


def _dirichlet_owners(labels: Tensor, clients: int, alpha: float, rule: str, source: torch.Generator) -> Tensor:
    """Owner of each row: a draw over clients for each class, or over classes for each client."""
    owners = torch.empty(len(labels), dtype=torch.long)
    held = torch.zeros(clients, dtype=torch.long)
    classes = torch.unique(labels).tolist()
    if rule == "clients":
        # In logarithms: at alpha 0.01 the shares of a whole column can be too small for a float.
        table = _log_gammas((clients, len(classes)), alpha, source).log_softmax(1).softmax(0)
    for column, which in enumerate(classes):
        rows = (labels == which).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=source)]
        if rule == "clients":
            shares = table[:, column]
        else:
            # Who has n/K rows already takes no part in the draws of further classes.
            logs = _log_gammas((clients,), alpha, source)
            shares = logs.masked_fill(held >= len(labels) / clients, -torch.inf).softmax(0)
        owners[rows] = _owners(shares, len(rows), rounded=rule == "clients")
        held = torch.bincount(owners[rows], minlength=clients) + held
    return owners


def _log_gammas(shape: tuple[int, ...], alpha: float, source: torch.Generator) -> Tensor:
    """Logarithms of Gamma(α) draws, float64; their softmax is a Dirichlet draw."""
    # Gamma(α) = Gamma(α + 1) · U^(1/α) (Marsaglia & Tsang 2000, §6): the logarithm stays where the number underflows.
    above = torch._standard_gamma(torch.full(shape, alpha + 1.0, dtype=torch.float64), generator=source)
    uniform = torch.rand(shape, dtype=torch.float64, generator=source).clamp_min(torch.finfo(torch.float64).tiny)
    return above.log() + uniform.log() / alpha


def _owners(shares: Tensor, rows: int, *, rounded: bool) -> Tensor:
    """Owner of the 1st, 2nd, … of the rows of a class, shape (rows,)."""
    ends = shares.cumsum(0) * rows
    # The sum of shares may miss 1 by rounding; the last row belongs to the last client all the same.
    ends = (ends.round() if rounded else (ends + 1e-9).floor()).long().clamp_max(rows)
    ends[-1] = rows
    return torch.searchsorted(ends, torch.arange(rows), right=True)


def _rows_of(owners: Tensor, clients: int) -> tuple[tuple[int, ...], ...]:
    # One stable sort for all, so that a million clients cost no pass over the rows each.
    order, sizes = torch.argsort(owners, stable=True), torch.bincount(owners, minlength=clients)
    rows, ends = order.tolist(), sizes.cumsum(0).tolist()
    return tuple(tuple(rows[end - size : end]) for end, size in zip(ends, sizes.tolist(), strict=True))


def _hash(labels: Tensor) -> str:
    return hashlib.sha256(labels.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()


def _require_same_labels(split: Split, labels: Tensor) -> None:
    _require_labels(labels)
    same = split.labels in {"", _hash(labels)}
    require(same, "labels", f"{len(labels)} of another hash", "the split was made for others", "split these anew")


def _require_labels(labels: Tensor) -> None:
    fine = labels.ndim == 1 and len(labels) > 0 and not labels.is_floating_point() and not labels.is_complex()
    got = f"{labels.dtype} of shape {tuple(labels.shape)}"
    require(fine, "labels", got, "a split goes by one class number a row", "pass a tensor of integers, shape (n,)")
    require(int(labels.min()) >= 0, "labels", int(labels.min()), "classes are counted from 0", "pass numbers >= 0")

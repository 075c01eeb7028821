"""States of clients on disk, in a file that grows by what changed: a checkpoint costs what was visited since the last.

A record is a header and a packed tree; the last one of a client counts. The run's checkpoint says how many bytes of the
file are its own and what the headers of all records hash to, so whatever a killed process wrote beyond is overwritten,
and a file of another run, a shorter or a changed one is refused. When more than half of it is outdated, what counts is
written to a new file, which the next checkpoint names; each byte is copied once for each that was appended.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.federated.packing import pack, unpack

Tree = TypeVar("Tree", bound=dict[str, Any])

STATE, LOCAL_BN, ROW = 0, 1, 2  # kinds of records: a client's state, its batch norm, a row of measurements

_HEADER: Final = struct.Struct("<4sBxxxQQ32s")  # mark, kind, client or round, bytes of the body, their SHA-256
_MARK: Final = b"SPFS"
_SLACK: Final = 1 << 20  # outdated bytes that are not worth a new file


@dataclass(frozen=True, slots=True)
class Ending:
    """Which part of a file belongs to a checkpoint."""

    name: str  # of the file, beside the checkpoint
    length: int  # bytes
    chain: str  # hash over the headers of all records, hexadecimal


class StateLog:
    """The file, and where in it each client's last record is."""

    def __init__(self, checkpoint: Path, clients: int) -> None:
        """Begin a new file beside a checkpoint; what is there already stays until the first checkpoint is written."""
        self._checkpoint, self._clients = checkpoint, clients
        self._begin(self._unused())

    def _begin(self, path: Path) -> None:
        self.path = path
        # Bytes, those that count, hash over headers, rows: in one value, so that an interruption leaves none behind.
        self._end: tuple[int, int, bytes, int] = (0, 0, b"", 0)
        # One number a client and kind, filled at once: the memory of a run then grows with no client that is visited.
        self._places: dict[int, Tensor] = {STATE: torch.full((self._clients,), -1)}
        self._file: BinaryIO | None = None

    @classmethod
    def reopened(cls, checkpoint: Path, clients: int, ending: Ending) -> tuple[StateLog, list[Any]]:
        """Open the file of a checkpoint; returns the rows of measurements too. ``ValueError`` if it is not whole."""
        log = cls(checkpoint, clients)
        log._begin(checkpoint.with_name(Path(ending.name).name))
        rows = []
        with log.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < ending.length:
                raise ValueError(f"{ending.name} is shorter than it was")
            while log._end[0] < ending.length:
                header = file.read(_HEADER.size)
                kind, client, size = log._known(header)
                if kind == ROW:
                    rows.append(_body(header, file.read(size))[1])
                else:
                    file.seek(size, os.SEEK_CUR)
                log._note(header, kind, client, size)
        if log._ending() != ending:
            raise ValueError(f"{ending.name} changed since it was written")
        return log, rows

    def append(self, fresh: Mapping[int, Mapping[int, Mapping[str, Any]]], rows: list[Any]) -> Ending:
        """Write what changed (kind -> client -> tree) and the rows that are not there yet, and force it to disk."""
        try:
            for kind, trees in fresh.items():
                for client, tree in trees.items():
                    self._write(kind, client, pack(tree))
            for number in range(self._end[3], len(rows)):
                self._write(ROW, number, pack({}, rows[number]))
        finally:
            # Also when interrupted: the next record then goes where the last whole one ends.
            self._flush()
        length, live, *_ = self._end
        if length - live > live + _SLACK:
            self._renew()
        return self._ending()

    def _ending(self) -> Ending:
        return Ending(self.path.name, self._end[0], self._end[2].hex())

    def remove_others(self) -> None:
        """Remove files that no checkpoint names any more."""
        for other in self._checkpoint.parent.glob(f"{self._checkpoint.name}.states-*"):
            if other != self.path:
                other.unlink(missing_ok=True)

    def read(self, kind: int, client: int) -> dict[str, Any]:
        """Read a client's last record; ``KeyError`` where there is none."""
        if not self.holds(kind, client):
            raise KeyError(client)
        place = self._place(kind, client)
        with self.path.open("rb") as file:
            file.seek(place)
            header = file.read(_HEADER.size)
            try:
                return _body(header, file.read(self._known(header)[2]))[0]
            except ValueError as error:
                why, do = f"it changed since it was written ({error})", "remove the checkpoint and begin anew"
                raise UserError("checkpoint", got=self.path.name, why=why, do=do) from None

    def holds(self, kind: int, client: object) -> bool:
        """Whether there is a record of a client."""
        return isinstance(client, int) and 0 <= client < self._clients and self._place(kind, client) >= 0

    def clients(self, kind: int) -> list[int]:
        """Clients that have a record, ascending."""
        places = self._places.get(kind)
        return [] if places is None else (places >= 0).nonzero().flatten().tolist()

    def _place(self, kind: int, client: int) -> int:
        places = self._places.get(kind)
        return -1 if places is None else int(places[client])

    def _known(self, header: bytes) -> tuple[int, int, int]:
        """Kind, client or round, and size of a record."""
        if len(header) < _HEADER.size:
            raise ValueError(f"{self.path.name} ends within a record")
        mark, kind, client, size, _ = _HEADER.unpack(header)
        if mark != _MARK or kind not in (STATE, LOCAL_BN, ROW) or (kind != ROW and client >= self._clients):
            raise ValueError(f"{self.path.name} holds what is no record")
        return kind, client, size

    def _write(self, kind: int, client: int, body: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("r+b" if self.path.exists() else "w+b")
            self._file.seek(self._end[0])
        header = _HEADER.pack(_MARK, kind, client, len(body), hashlib.sha256(body).digest())
        self._file.write(header + body)
        self._note(header, kind, client, len(body))

    def _note(self, header: bytes, kind: int, client: int, size: int) -> None:
        length, live, chain, rows = self._end
        whole = _HEADER.size + size
        if kind == ROW:
            live, rows = live + whole, rows + 1
        else:
            if kind not in self._places:
                self._places[kind] = torch.full((self._clients,), -1)
            # A client's records are of one size; nothing but when to renew hangs on it.
            live += whole if self._places[kind][client] < 0 else 0
            self._places[kind][client] = length
        self._end = (length + whole, live, hashlib.sha256(chain + header).digest(), rows)

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _renew(self) -> None:
        """Copy what counts into a new file, in the order in which it lies."""
        new = StateLog(self._checkpoint, self._clients)
        with self.path.open("rb") as file:
            place = 0
            while place < self._end[0]:
                header = file.read(_HEADER.size)
                kind, client, size = self._known(header)
                if kind == ROW or self._place(kind, client) == place:
                    new._write(kind, client, file.read(size))
                else:
                    file.seek(size, os.SEEK_CUR)
                place += _HEADER.size + size
        new._flush()
        # At once: an interruption before leaves the old file, which is whole.
        vars(self).update(vars(new))

    def _unused(self) -> Path:
        """A name that no file has."""
        found = self._checkpoint.parent.glob(f"{self._checkpoint.name}.states-*")
        numbers = [int(end) for one in found if (end := one.name.rpartition("-")[2]).isdecimal()]
        return self._checkpoint.with_name(f"{self._checkpoint.name}.states-{max(numbers, default=-1) + 1}")


class ClientTrees(Mapping[int, Tree]):
    """Client -> its state: those changed since the last checkpoint in memory, the others on disk, if there is a log."""

    def __init__(self, fresh: Mapping[int, Tree] | None = None, log: StateLog | None = None, kind: int = STATE) -> None:
        self.fresh, self._log, self._kind = dict(fresh or {}), log, kind

    def __getitem__(self, client: int) -> Tree:
        if client in self.fresh:
            return self.fresh[client]
        if self._log is None:
            raise KeyError(client)
        return self._log.read(self._kind, client)  # type: ignore[return-value]

    def __contains__(self, client: object) -> bool:
        return client in self.fresh or (self._log is not None and self._log.holds(self._kind, client))

    def __iter__(self) -> Iterator[int]:
        old = [] if self._log is None else self._log.clients(self._kind)
        return iter(dict.fromkeys([*old, *self.fresh]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def changed(self, trees: Mapping[int, Tree]) -> ClientTrees[Tree]:
        """Return these with some clients' new ones."""
        return ClientTrees({**self.fresh, **trees}, self._log, self._kind)

    def written(self, log: StateLog) -> ClientTrees[Tree]:
        """Return these once all that changed is in a log."""
        return ClientTrees({}, log, self._kind)


def _body(header: bytes, body: bytes) -> tuple[dict[str, Any], Any]:
    """Unpack a record's body; ``ValueError`` where it is not what was written."""
    if hashlib.sha256(body).digest() != _HEADER.unpack(header)[4]:
        raise ValueError("a record's hash is another")
    return unpack(body)

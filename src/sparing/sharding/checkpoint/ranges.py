"""Any stretch of a flat tensor in a folder of safetensors shards, read from whichever files have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from sparing.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Elements on their way from a saved flat tensor into a live one."""

    source: str  # name of the saved tensor
    begin: int  # first element there
    target: Tensor  # flat
    at: int  # first element there
    length: int


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join adjacent pieces, so that a slice that was cut the same way is read at once."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and last.target is piece.target and last.source == piece.source:
            gap = (piece.begin - last.begin - last.length, piece.at - last.at - last.length)
            if gap == (0, 0):
                last = replace(last, length=last.length + piece.length)
                continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


class Shards:
    """The saved tensors of a folder; only the headers of its files are read at first."""

    def __init__(self, folder: Path) -> None:
        self._reader = HuggingFaceStorageReader(str(folder))
        self._found = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._found, True)

    def read_(self, pieces: Iterable[Piece]) -> None:
        """Fill live tensors, casting to their dtypes; every rank reads its own pieces from the files."""
        wanted = list(joined(pieces))
        items = [item for index, piece in enumerate(wanted) for item in self._items(index, piece)]
        self._reader.read_data(LoadPlan(items), _Targets(wanted)).wait()

    def _items(self, index: int, piece: Piece) -> list[ReadItem]:
        """One for each shard that holds a part of the piece."""
        known = self._found.state_dict_metadata.get(piece.source)
        chunks = known.chunks if isinstance(known, TensorStorageMetadata) else []
        made = []
        for chunk in chunks:
            first, size = chunk.offsets[0], chunk.sizes[0]
            low, high = max(piece.begin, first), min(piece.begin + piece.length, first + size)
            if low < high:
                item = ReadItem(
                    type=LoadItemType.TENSOR, dest_index=MetadataIndex(str(index)),
                    dest_offsets=torch.Size([piece.at + low - piece.begin]),
                    storage_index=MetadataIndex(piece.source, (first,)), storage_offsets=torch.Size([low - first]),
                    lengths=torch.Size([high - low]),
                )  # fmt: skip
                made.append(item)
        got = sum(item.lengths[0] for item in made)
        if got != piece.length:
            why, do = f"{piece.length} elements of it are asked for", "take another checkpoint"
            raise UserError("checkpoint", got=f"{got} elements of {piece.source}", why=why, do=do)
        return made


class _Targets(DefaultLoadPlanner):
    """Says where the elements go."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.pieces = pieces

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The live tensor of a piece."""
        return self.pieces[int(index.fqn)].target

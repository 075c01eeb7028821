"""What low-bit wires owe, in a checkpoint: of the same ranks to the bit, of others as the sum that all owe together.

The residuals of a bucket are saved one after the other, in the order of the blocks of ``layout``: the rank that is at
place b inside its group and whose group is i has block b·g + i, g groups. Each block is as long as the slice that all
groups share, so together they are g times the padded bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from sparing.errors import require
from sparing.sharding.checkpoint.manifest import Manifest, Part, Place
from sparing.sharding.checkpoint.ranges import Piece, Shards
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.engine import Engine
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.layout import Layout, block_index
from sparing.sharding.network.mesh import Mesh

Places = Mapping[str, tuple[Part, Place]]  # canonical name -> the saved bucket, and the place in it


def check_residuals(engine: Engine | FsdpEngine, manifest: Manifest) -> None:
    """Refuse residuals that nothing here would send."""
    owed, local = any(part.residual for part in manifest.parts), manifest.inner is not None
    got = f"what low-bit wires owe of {'differences' if local else 'gradients'}"
    why = "the wires here have no error feedback, so it would be lost"
    wires = "LocalSteps(wire=LowBit())" if local else "Wires(slow=LowBit())"
    owes, outer = (False, None) if isinstance(engine, FsdpEngine) else (engine.owes, engine.outer)
    require(not owed or owes, "checkpoint", got, why, f"pass {wires}, or residuals=False")
    why = f"here they carry {'differences' if outer is not None else 'gradients'}"
    require(not owed or local == (outer is not None), "checkpoint", got, why, "pass residuals=False")


def gradient_scale(engine: Engine) -> float:
    """Of what low-bit wires owe: differences of local steps have no loss scale."""
    return 1.0 if engine.outer is not None else engine.settings.loss_scale or 1.0


def read_residuals_(engine: Engine, manifest: Manifest, shards: Shards) -> None:
    """Load what my rank owes; without residuals in the checkpoint nothing is owed."""
    places, scale = manifest.places, gradient_scale(engine)
    for bucket in engine.buckets:
        parts = {part.name: part for part, _ in (places[slot.name] for slot in bucket.slots)}
        owed = any(part.residual for part in parts.values())
        if not owed and bucket.name not in engine.residuals:
            continue
        value = engine.owed(bucket).zero_()
        part = next(iter(parts.values()))
        if owed and len(parts) == 1 and _same_layout(engine, manifest, bucket, part):
            start = block_index(engine.mesh.coords, engine.mesh.sizes) * value.numel()
            source = f"{part.name}/residual"
            shards.read_([Piece(source=source, begin=start, target=value, at=0, length=value.numel())])
            value.mul_(scale / part.loss_scale)
        elif owed:
            # differences are summed over groups and divided by their number, which may be another
            groups = 1.0 if engine.outer is None else engine.mesh.sizes[-1] / manifest.sizes[-1]
            _read_sum_(engine.mesh, bucket, value, manifest, shards, scale * groups)


def _same_layout(engine: Engine, manifest: Manifest, bucket: Bucket, part: Part) -> bool:
    ours = [(slot.name, slot.offset) for slot in bucket.slots]
    return engine.mesh.sizes == tuple(manifest.sizes) and ours == [(p.name, p.offset) for p in part.places]


def _read_sum_(mesh: Mesh, bucket: Bucket, value: Tensor, manifest: Manifest, shards: Shards, scale: float) -> None:
    """Let the rank that sums an element owe what all ranks owed of it: it adds that to its next sum, unrounded."""
    places = manifest.places
    mine = value.view(mesh.sizes[-1], -1)[mesh.coords[-1]]
    # one group of the saved run after the other, so that no more than two slices are held
    for group in range(manifest.sizes[-1]):
        term = torch.zeros_like(mine)
        for index, start, at, length in bucket.overlaps(mesh.tiers, mesh):
            part, place = places[bucket.slots[index].name]
            if part.residual:
                begin = place.offset + start
                target = term.narrow(0, at, length)
                shards.read_(pieces_of(part, "residual", manifest.sizes, group, begin, target))
                target.mul_(scale / part.loss_scale)
        mine.add_(term)


def pieces_of(part: Part, what: str, sizes: tuple[int, ...], group: int, begin: int, target: Tensor) -> Iterator[Piece]:
    """Elements of the saved bucket from ``begin`` on, as a group of the saved run had or owed them."""
    layout = Layout(tuple(sizes), sum(prod(place.shape) for place in part.places))
    block, at = layout.size(layout.tiers - 1), 0
    while at < target.numel():
        inside, offset = divmod(begin + at, block)
        length = min(block - offset, target.numel() - at)
        source = (inside * sizes[-1] + group) * block + offset
        yield Piece(source=f"{part.name}/{what}", begin=source, target=target, at=at, length=length)
        at += length

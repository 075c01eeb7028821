"""A model as layer sampling divides it: what is drawn, what is always on, what stays frozen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sparing.blocks import Block, find_blocks
from sparing.blocks.roles import inside
from sparing.blocks.towers import encoder_blocks, non_text_parameters, other_block_lists
from sparing.errors import UserError


def parts_of(model: nn.Module, body: str | Sequence[str] | None = None) -> tuple[list[Block], frozenset[str]]:
    """Divide a model: blocks of an encoder are drawn like those of its decoder, and towers for pictures stay frozen."""
    blocks = find_blocks(model, body=body)
    if body is None and (encoder := encoder_blocks(model)):
        blocks = find_blocks(model, body=[*encoder, *(b.name for b in blocks if b.role == "body")])
    frozen = non_text_parameters(model, blocks)
    outside = [(n, p) for b in blocks if b.role != "body" for n, p in b.params.items() if n not in frozen]
    for path in other_block_lists(model, blocks):
        loose = sum(p.numel() for name, p in outside if p.requires_grad and inside(name, path))
        if loose:
            lists = ", ".join(dict.fromkeys(repr(b.name.rpartition(".")[0]) for b in blocks if b.role == "body"))
            raise UserError(
                "model",
                got=f"{loose:,} parameters in {path}, outside the body",
                why="they would train whole, whatever is drawn",
                do=f"freeze them first, or draw from them too: pass body=({lists}, {path!r})",
            )
    return blocks, frozen

"""Blocks: the partition of a model's parameters into embedding, repeated blocks, tail and head.

    blocks = find_blocks(model)
    depth = sum(block.role == "body" for block in blocks)
    first = submodule(model, next(block.name for block in blocks if block.role == "body"))

All five methods speak of parameters by the canonical names given here, which no wrapper changes.
"""

from sparing.blocks.find import Block, find_blocks
from sparing.blocks.names import named_parameters, submodule, tied
from sparing.blocks.roles import Role

__all__ = ["Block", "Role", "find_blocks", "named_parameters", "submodule", "tied"]

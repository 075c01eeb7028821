"""Blocks: the partition of a model's parameters into embedding, repeated blocks, tail and head.

All five methods name parameters by the canonical names given here, which no wrapper changes.
"""

from sparing.blocks.find import Block, find_blocks
from sparing.blocks.names import named_parameters, submodule, tied
from sparing.blocks.roles import Role

__all__ = ["Block", "Role", "find_blocks", "named_parameters", "submodule", "tied"]

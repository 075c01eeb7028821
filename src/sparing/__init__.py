"""Train deep networks with little: little memory, a slow network, few tuning runs, data that may not be pooled.

Every technique has the same three sides: *predict* the price from shapes alone, *apply* it to a model nobody edited,
*show* the measured numbers beside the prediction.
"""

from sparing.blocks import Block, find_blocks
from sparing.errors import UserError
from sparing.seeds import stream

__all__ = ["Block", "UserError", "find_blocks", "stream"]

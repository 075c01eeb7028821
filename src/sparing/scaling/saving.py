"""``save_pretrained`` of a scaled model writes a folded one: plain transformers would drop masks and multipliers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from sparing.scaling.fold import fold_


def attach_saving_(root: nn.Module) -> None:
    """Make a transformers model save itself folded, until ``fold.remove_``; other models stay as they are."""
    if callable(getattr(type(root), "save_pretrained", None)):
        # A partial of the model, not a closure: copies and pickles of the model then save themselves.
        root.__dict__["save_pretrained"] = partial(_save_folded, root)


def _save_folded(
    root: Any, save_directory: Any, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **options: Any
) -> Any:
    """Save a folded copy, untied where it must be; the model trains on, with its masks and multipliers."""
    twin = copy.deepcopy(root)
    if state_dict is not None:
        twin.load_state_dict(state_dict)
    folded: Any = fold_(twin, untie=True)
    return folded.save_pretrained(save_directory, *args, **options)

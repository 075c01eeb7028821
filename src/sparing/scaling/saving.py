"""``save_pretrained`` of a scaled model writes a folded one: plain transformers would drop masks and multipliers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

_NAME = "save_pretrained"


def attach_saving_(root: nn.Module) -> None:
    """Let a model of transformers save itself folded, until ``detach_saving_``; other models stay."""
    if callable(getattr(type(root), _NAME, None)):
        root.__dict__[_NAME] = partial(_save_folded, root)  # copies and pickles of the model have one of their own


def detach_saving_(root: nn.Module) -> None:
    """Give the model its own way back."""
    root.__dict__.pop(_NAME, None)


def _save_folded(
    root: Any, save_directory: Any, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **options: Any
) -> Any:
    """Save a folded copy, untied where it must be; the model trains on, with its masks and multipliers."""
    from sparing.scaling.fold import fold_  # it removes what apply_ puts in place, so it stands above

    twin = copy.deepcopy(root)
    if state_dict is not None:
        twin.load_state_dict(state_dict)
    folded: Any = fold_(twin, untie=True)
    return folded.save_pretrained(save_directory, *args, **options)

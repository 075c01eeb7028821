"""What layers keep of the rows they saw, by what kind of layer they are, not by what their buffers are called."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from sparing.errors import UserError
from sparing.federated.methods.interface import Vector

_MEAN, _VAR, _COUNT = "running_mean", "running_var", "num_batches_tracked"


@dataclass(frozen=True, slots=True)
class Kept:
    """Running statistics of a model."""

    variances: frozenset[str] = frozenset()
    """Of batch norms, whose statistics are those of all rows together: where a mixture has a meaning."""
    positive: frozenset[str] = frozenset()
    """Buffers that no rows make less than zero: variances and counts of batches."""
    others: tuple[str, ...] = ()
    """Paths of layers that are no batch norm and have running statistics, such as instance norm."""
    kind: str = ""
    """Class of the first of these."""


def kept_by_layers(model: nn.Module) -> Kept:
    """Find the running statistics of a model; refuse state that no buffer has."""
    variances, positive, others = set(), set(), []
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            why = "only parameters and buffers travel, and it has a state beside them (get_extra_state)"
            what, do = f"model, layer {path or 'itself'}", "register that state as a buffer"
            raise UserError(what, got=type(module).__name__, why=why, do=do)
        buffers = {name for name, value in module._buffers.items() if value is not None}
        # A norm of another library is known by both statistics side by side.
        if not (isinstance(module, _NormBase) and _VAR in buffers) and not {_MEAN, _VAR} <= buffers:
            continue
        positive |= {f"{start}{name}" for name in (_VAR, _COUNT) if name in buffers}
        if isinstance(module, _BatchNorm):
            variances.add(f"{start}{_VAR}")
        else:
            others.append((path or "the model itself", type(module).__name__))
    kind = others[0][1] if others else ""
    return Kept(frozenset(variances), frozenset(positive), tuple(path for path, _ in others), kind)


def scratch_of(model: nn.Module) -> Vector:
    """Return copies of the buffers that no state dictionary has."""
    sent = model.state_dict().keys()
    return {name: value.clone() for name, value in model.named_buffers() if name not in sent}


def refuse_lost(after: Vector, before: Vector, norms: Collection[str], method: str) -> None:
    """Refuse to drop in silence what a client's rows did to a buffer, where the server takes parameters alone."""
    changed = (name for name, value in after.items() if name not in norms and _differ(value, before[name]))
    if (name := next(changed, None)) is not None:
        why = f"training changed it, and {method} takes updates of parameters alone"
        do = "register it with persistent=False, or leave it as it is in training"
        raise UserError(f"buffer {name!r}", got="another value than was sent", why=why, do=do)


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other)

"""Turn a masked dense layer of a live model into a sparse one and back, in place, and give sparse layers new masks.

The module object stays, with its hooks, buffers and gate: its class changes, as under ``torch.nn.utils.parametrize``.
The parameter is a new one of the same name, which replaces the old one in the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from sparing.errors import UserError
from sparing.scaling.masks.gates import Gate, gates_in
from sparing.scaling.roles import structure
from sparing.scaling.sparse.known import OptimizerLike, move_, move_state_, replace_parameter_
from sparing.scaling.sparse.layers import COPIED, SparseLinear
from sparing.scaling.sparse.pattern import Pattern, move_values

_DENSE_FORM = "_sparing_dense_form"  # in the __dict__ of a layer that was dense: what it was
_PARTS = ("pattern", "transposed", "keep_dense_gradient", "_recorded", "in_features", "out_features")


@dataclass(frozen=True, slots=True, eq=False)
class _DenseForm:
    """The dense form of a layer that runs sparse."""

    kind: type[nn.Module]
    weight: nn.Parameter  # the dense parameter, emptied; it keeps the hooks that others put on it
    overwritten: Mapping[str, Any]  # attributes of the module that the sparse form overwrote


def is_conv1d(kind: type[nn.Module]) -> bool:
    """Tell whether a class is GPT-2's Conv1D, without importing transformers; subclasses may compute anything."""
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


def is_transposed(layer: nn.Module) -> bool:
    """Tell whether a layer, sparse or dense, stores its inputs first."""
    return layer.transposed if isinstance(layer, SparseLinear) else structure.is_transposed(layer)


class SparseGate(Gate):
    """The gate of a layer that runs by CSR: there is nothing off the mask to keep at zero."""

    @property
    def mask(self) -> Tensor:
        """The live entries, of the dense weight's shape, built at each access."""
        return self._layer.weight_mask

    @property
    def live(self) -> tuple[int, int]:
        """How many entries live, and how many there are (counts); no mask is built."""
        out, into = self._layer.pattern.shape
        return self._layer.pattern.live, out * into

    @property
    def is_current(self) -> bool:
        """Whether the module still has the parameter it runs on; a sparse layer always has."""
        return True

    @property
    def keep(self) -> bool:
        """Whether to collect the gradient of all places."""
        return self._layer.keep_dense_gradient

    @keep.setter
    def keep(self, value: bool) -> None:
        self._layer.keep_dense_gradient = value

    @property
    def has_dense(self) -> bool:
        """Whether a gradient of all places can be computed."""
        return bool(self._layer._recorded)

    @property
    def dense(self) -> Tensor | None:
        """The gradient of all places since ``keep`` was set, of the dense weight's shape."""
        return self._layer.dense_gradient

    @dense.setter
    def dense(self, value: Tensor | None) -> None:
        assert value is None, "a sparse layer makes its own"
        self._layer.clear_dense_gradient()

    @property
    def _layer(self) -> SparseLinear:
        return cast("SparseLinear", self.module)

    def set_(self, mask: Tensor) -> None:
        """Refuse: an optimizer must know of a new pattern."""
        do = (
            'call convert_(model, masks, backend="dense", optimizer=optimizer) before, and convert_ after; or Evolution'
        )
        raise UserError("mask", got="a sparse layer's", why="the optimizer's state moves with it", do=do)

    def zero_(self) -> None:
        """Do nothing: no weight is off the mask."""

    def settle_(self, *, written: bool = False) -> None:
        """Do nothing: there is nothing to put to zero."""

    def mask_input_weight_(self) -> None:
        """Do nothing: the pattern is the mask."""

    def leaks(self) -> bool:
        """Tell whether a weight lives off the mask: none does."""
        return False

    def remove_(self) -> None:
        """Go back to the dense form, then remove the gate."""
        to_dense_(self._layer)
        self.remove_()  # the class has changed: by now this is the dense gate's method

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "local": self.local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.local, self._replaced = state["module"], state["local"], []

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        twin: Gate = object.__new__(type(self))
        memo[id(self)] = twin
        twin.local, twin.module, twin._replaced = self.local, copy.deepcopy(self.module, memo), []
        return twin


def to_sparse_(
    layer: nn.Module, mask: Tensor, optimizer: OptimizerLike | None = None, *, again: nn.Parameter | None = None
) -> None:
    """Turn a masked dense layer, zero off its mask, into a sparse one, in place; the optimizer's state moves along.

    ``again`` is the parameter that an earlier sparse form of the layer had: whoever holds it holds it still.
    """
    dense = cast("nn.Parameter", layer.weight)
    bias = cast("nn.Parameter | None", layer.bias)
    form = SparseLinear(dense, mask, bias, transposed=is_transposed(layer))
    if again is not None:
        move_(again, form.weight.detach())
        form.weight = again
    replace_parameter_(optimizer, dense, form.weight, form.gather)
    overwritten = {name: layer.__dict__[name] for name in _PARTS if name in layer.__dict__}
    before = _DenseForm(type(layer), dense, overwritten)
    # The emptied parameter is kept: others may have hooked it, and turning back gives it to them again.
    dense.data, dense.grad = dense.data.new_empty(0), None
    # The pattern is the mask from here on; ``weight_mask`` is computed from it.
    layer._buffers.pop("weight_mask", None)
    layer.__class__ = SparseLinear
    layer.__dict__.update({name: form.__dict__[name] for name in _PARTS}, **{_DENSE_FORM: before})
    layer._parameters["weight"] = form.weight
    if (gate := gates_in(layer).get("weight")) is not None:
        keep = gate.keep
        gate._handle.remove()
        # ``keep`` and ``dense`` become properties; what the instance holds under these names is stale.
        for name in ("keep", "dense", "_hooked", "_handle", "_version", "_sum"):
            gate.__dict__.pop(name, None)
        gate.__class__ = SparseGate
        gate.keep = keep


def to_dense_(layer: SparseLinear, optimizer: OptimizerLike | None = None) -> None:
    """Turn a sparse layer back into the masked dense one it was, in place, with its mask as a buffer."""
    before: _DenseForm | None = layer.__dict__.get(_DENSE_FORM)
    if before is None:
        raise UserError("sparse layer", got="no dense form", why="it was built sparse", do="use dense_weight()")
    values, dense, mask = layer.weight, before.weight, layer.weight_mask
    gate = gates_in(layer).get("weight")
    # Read before the class changes: the sparse gate computes the dense gradient from what the layer has recorded.
    kept = (False, None) if gate is None else (gate.keep, gate.dense)
    dense.data = layer.dense_weight()
    replace_parameter_(optimizer, values, dense, layer.scatter)
    for name in (*_PARTS, _DENSE_FORM, COPIED):
        layer.__dict__.pop(name, None)
    layer.__dict__.update(before.overwritten)
    layer.__class__ = before.kind  # type: ignore[assignment]
    layer._parameters["weight"] = dense
    layer.register_buffer("weight_mask", mask)
    if gate is not None:
        gate.__class__ = Gate
        gate.keep, gate.dense = kept
        gate._hook(dense)


def repattern_(layer: SparseLinear, after: Pattern, optimizer: OptimizerLike | None = None) -> None:
    """Give a sparse layer another pattern; kept weights keep their state, grown ones start at zero."""
    weight, move = layer.weight, partial(move_values, old=layer.pattern, new=after)
    move_state_(optimizer, weight, move)
    layer.place_(move(weight.detach()), after, None if weight.grad is None else move(weight.grad))

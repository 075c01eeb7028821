"""Visiting: a live model takes the weights of other states, one after another, and gets its own back, to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from sparing.blocks import named_parameters, tied
from sparing.blocks.names import unwrap
from sparing.errors import require
from sparing.valley.apply import perturbing
from sparing.valley.compatible import Model, State


@contextlib.contextmanager
def loading_states(model: nn.Module) -> Iterator[Callable[[State], None]]:
    """Lend a model to other states within a block, in eval mode; afterwards all is as it was, also after an exception.

    Restored to the bit are parameters, buffers, training flags and torch's random state.
    """
    params, aliases = named_parameters(model), tied(model)
    buffers = dict(unwrap(model).named_buffers())

    def put(state: State) -> None:
        for name, parameter in params.items():
            do = "pass states of this model"
            require(name in state, f"state at {name!r}", "nothing", "the model has this parameter", do)
            got = f"{state[name].dtype} for a model in {parameter.dtype}"
            holds = torch.promote_types(state[name].dtype, parameter.dtype) == parameter.dtype
            do = "pass the widest model as the live one, such as model.float()"
            require(holds, f"state at {name!r}", got, "its numbers would be rounded before they are measured", do)
            parameter.data.copy_(state[name])
        for alias, name in aliases.items():
            same = alias not in state or torch.equal(state[alias], state[name])
            why, do = "in the live model they are one tensor", "pass a live model that does not tie them"
            require(same, f"state at {alias!r}", f"other numbers than at {name!r}", why, do)
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])

    with perturbing(model) as perturber, torch.no_grad():
        # A step of length 0 lets every parameter read from a copy, so that its own storage is never written
        perturber.to({name: parameter.detach() for name, parameter in params.items()}, 0.0)
        model.eval()
        yield put


def live_model(models: Sequence[Model], model: nn.Module | None = None) -> nn.Module:
    """Return a live model to be lent: the one given, or the first among the models."""
    found = model or next((one for one in models if isinstance(one, nn.Module)), None)
    require(found is not None, "model", "states only", "weights are evaluated in a live model", "pass model=...")
    assert found is not None
    return found

"""Load other states into a live model, one after another, and give it its own weights back, to the bit."""

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
    """Yield a function that copies a state into the model, in eval mode; entries the model lacks are ignored.

    Parameters, buffers, training flags and torch's random state are restored to the bit, also after an exception.
    """
    params, aliases = named_parameters(model), tied(model)
    buffers = dict(unwrap(model).named_buffers())

    def load(state: State) -> None:
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
        # A step of length 0 lets every parameter, frozen ones too, read from a copy: the originals are never written
        perturber.to({name: parameter.detach() for name, parameter in params.items()}, 0.0)
        model.eval()
        yield load


def live_model(models: Sequence[Model], model: nn.Module | None = None) -> nn.Module:
    """Return a live model to evaluate in: the given one, or the first among the models."""
    found = model or next((one for one in models if isinstance(one, nn.Module)), None)
    require(found is not None, "model", "states only", "weights are evaluated in a live model", "pass model=...")
    assert found is not None
    return found

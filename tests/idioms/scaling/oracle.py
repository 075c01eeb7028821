"""What ``mup`` 1.0.0 says of a model: factors on learning rates, decay, initial scale and readouts.

The two conventions meet as follows. mup asks three models (base, one of other widths, target) which dimensions grow
("infinite"); it divides the Adam rate of a matrix of two such dimensions by the growth of its last one, which for
``nn.Linear`` is the fan-in, and multiplies its decay by the same; its SGD multiplies the rate of what has one growing
dimension by its growth, and of a matrix by fan-out over fan-in. Its initializers draw a matrix smaller by the root of
the fan-in's growth and leave all else, and its readout layer divides its input by the growth of its fan-in. A plan's
``factors`` are these very numbers in the rescaled form. mup knows ``[out, in]`` only: the layer of GPT-2 that stores
``[in, out]`` is shown to it turned. Of a stack of experts' matrices it is shown one, for it takes three dimensions for
those of a convolution. Routers of transformers are no ``nn.Linear``; they are read as such.
"""

from __future__ import annotations

from dataclasses import dataclass

import mup
from mup.infshape import InfShape
from mup.init import constant_std_init_
from torch import nn


@dataclass(frozen=True)
class Numbers:
    """Factors on the base's values."""

    adam: dict[str, tuple[float, float]]
    """Parameter -> learning rate and weight decay under Adam."""
    sgd: dict[str, tuple[float, float]]
    """The same under SGD."""
    std: dict[str, float]
    """Parameter -> standard deviation."""
    readouts: dict[str, float]
    """Linear layers from a growing to a fixed number of features -> factor on their input."""


def numbers(model: nn.Module, base: nn.Module, other: nn.Module) -> Numbers:
    """Ask mup; the model's weights are not changed."""
    mup.set_base_shapes(model, base, delta=other, rescale_params=False, do_assert=False)
    for module in model.modules():
        if type(module).__name__ == "Conv1D":
            module.weight.infshape = InfShape(reversed(module.weight.infshape))
        elif type(module).__name__.endswith("Experts"):
            for stack in (module.gate_up_proj, module.down_proj):
                one = stack.infshape[1:]
                stack.infshape = InfShape(reversed(one) if module.is_transposed else one)
    named = dict(model.named_parameters())
    found: dict[str, float] = {}
    for name, parameter in named.items():
        constant_std_init_(parameter, lambda _, scale=1.0, name=name: found.__setitem__(name, scale))
    readouts = {
        path: 1 / module.weight.infshape[1].width_mult()
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__.endswith("Router"))
        and module.weight.infshape[1].isinf()
        and not module.weight.infshape[0].isinf()
    }
    return Numbers(_rates(mup.MuAdamW, named), _rates(mup.MuSGD, named), found, readouts)


def _rates(optimizer, named: dict[str, nn.Parameter]) -> dict[str, tuple[float, float]]:
    """Read a mup optimizer's groups, made for rate and decay 1."""
    groups = optimizer(list(named.values()), lr=1.0, weight_decay=1.0).param_groups
    of = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: of[id(parameter)] for name, parameter in named.items()}

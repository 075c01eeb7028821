"""A net as a function of stacked parameters: all clients of a round in one pass, layer by layer.

    net = StackedNet(model)                     # the model's layers, read once
    outputs = net(params, inputs, buffers)      # (clients, rows, ...) -> (clients, rows, ...)

Every parameter has a leading client dimension. A linear layer is a batched matrix product. A convolution has the
clients' channels side by side, (rows, clients · channels, ...) with channels last in memory, and is one grouped
convolution; batch norm, group norm and pooling work channel by channel, so they need no more than their weights laid
end to end. Pooling by the maximum goes before ReLU where it follows it: the same values and gradients, over a quarter
of the numbers.

What is read is the model's graph (``torch.fx``): any net of the layers below, residual ones too. A layer that is not
known, a hook, or a graph that depends on the data is refused by name; ``torch.func.vmap`` takes such nets where they
have no batch norm.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.blocks import named_parameters
from sparing.federated.engines.stacked_calls import (
    POINTWISE,
    POOLS,
    NotStackableError,
    Pass,
    Step,
    Value,
    flatten,
    pool_before_relu_,
    pooled,
    refuse_shared,
    step_of_call,
)
from sparing.federated.methods.interface import Vector
from sparing.federated.placement import device_of

_CONVS: Final = (nn.Conv1d, nn.Conv2d)
_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d)
_LAYERS: Final = (*POINTWISE, *POOLS, *_CONVS, *_NORMS, nn.GroupNorm, nn.Linear, nn.Flatten, nn.Identity)


class StackedNet:
    """A model's layers on stacked parameters."""

    def __init__(self, model: nn.Module) -> None:
        """Read the graph.

        Raises:
            NotStackableError: If it holds what is not known here.
        """
        _refuse_unseen(model)
        self._names = {id(p): name for name, p in named_parameters(model).items()}
        self._buffers = {id(b): name for name, b in model.named_buffers()}
        was, before = model.training, {name: value.clone() for name, value in model.named_buffers()}
        try:
            # Clients train, so what depends on the mode is traced as in training.
            graph = fx.Tracer().trace(model.train())
            # A model's own train() or forward may keep one so: it normalises by the statistics sent, and leaves them.
            frozen = [path for path, m in model.named_modules() if isinstance(m, _BatchNorm) and not m.training]
        except Exception as error:  # noqa: BLE001  # the model's own forward runs on stand-ins here
            raise NotStackableError(f"its graph cannot be read ({type(error).__name__})") from None
        finally:
            model.train(was)
            changed = refill_(model, before)
        if changed:
            raise NotStackableError(f"its forward changes the buffer {changed[0]}, which no layer known here does")
        if frozen:
            raise NotStackableError(f"{frozen[0]} stays in evaluation mode")
        pool_before_relu_(graph, model)
        self._input, *others = list(graph.nodes)
        if any(node.op == "placeholder" for node in others):
            raise NotStackableError("its forward takes more than the inputs")
        self._steps = [(node, self._step_of(node, model)) for node in others]

    def __call__(
        self, params: Vector, inputs: Tensor, buffers: Vector | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Outputs of all clients; ``buffers`` are changed in place, and rows that are not ``real`` count nowhere."""
        known = Pass(len(inputs), params, buffers or {}, real)
        values: dict[fx.Node, Any] = {self._input: Value(inputs)}
        for node, step in self._steps:
            values[node] = step(known, fx.node.map_arg(node.args, values.__getitem__))
        return known.apart(values[self._steps[-1][0]])

    def _step_of(self, node: fx.Node, model: nn.Module) -> Step:
        """Turn a node of the graph into a step on stacked tensors."""
        if node.op == "output":
            if not isinstance(node.args[0], fx.Node):
                raise NotStackableError("it gives more than one tensor")
            return lambda known, args: args[0]
        if node.op == "get_attr":
            raise NotStackableError(f"{node.target} is used outside of a layer")
        if node.op != "call_module":
            return step_of_call(node, model)
        layer = model.get_submodule(str(node.target))
        if type(layer) not in _LAYERS or len(node.args) != 1 or node.kwargs:
            raise NotStackableError(f"{node.target} is a {type(layer).__name__}, which is not known stacked")
        if getattr(layer, "inplace", False):
            refuse_shared(node, model)
        return self._layer(layer)

    def _layer(self, layer: nn.Module) -> Step:
        """A layer of a known type."""
        if isinstance(layer, nn.Linear):
            return lambda known, args: Value(self._linear(known, layer, known.apart(args[0])))
        if isinstance(layer, _CONVS):
            if layer.padding_mode != "zeros":
                raise NotStackableError(f"a convolution pads by {layer.padding_mode!r}")
            return lambda known, args: Value(self._conv(known, layer, known.beside(args[0])), side=True)
        if isinstance(layer, _NORMS):
            return lambda known, args: Value(self._batch_norm(known, layer, known.beside(args[0])), side=True)
        if isinstance(layer, nn.GroupNorm):
            return lambda known, args: Value(self._group_norm(known, layer, known.beside(args[0])), side=True)
        if isinstance(layer, nn.Flatten):
            return flatten(layer.start_dim, layer.end_dim)
        if isinstance(layer, POOLS):
            if getattr(layer, "return_indices", False):
                raise NotStackableError("a pooling layer returns indices")
            return pooled(layer, type(layer).__name__)
        plain = copy.copy(layer)
        # In place, autograd might lack what it has to keep; a copy of the layer, so that the model's own stays.
        if hasattr(plain, "inplace"):
            plain.inplace = False  # type: ignore[assignment]
        return lambda known, args: Value(plain(args[0].tensor), args[0].side)

    def _stacked(self, known: Pass, parameter: Tensor | None) -> Tensor | None:
        """A parameter of all clients; one that does not train is the model's own."""
        if parameter is None:
            return None
        found = known.params.get(self._names[id(parameter)])
        return parameter.detach().expand(known.clients, *parameter.shape) if found is None else found

    def _laid(self, known: Pass, parameter: Tensor | None) -> Tensor | None:
        """A parameter of all clients, end to end."""
        stacked = self._stacked(known, parameter)
        return None if stacked is None else stacked.flatten(0, 1)

    def _linear(self, known: Pass, layer: nn.Linear, inputs: Tensor) -> Tensor:
        weight, bias = self._stacked(known, layer.weight), self._stacked(known, layer.bias)
        assert weight is not None
        deep = inputs.flatten(1, -2)
        turned = weight.transpose(1, 2)
        deep = torch.bmm(deep, turned) if bias is None else torch.baddbmm(bias[:, None], deep, turned)
        return deep.view(*inputs.shape[:-1], deep.shape[-1])

    def _conv(self, known: Pass, layer: nn.Conv1d | nn.Conv2d, inputs: Tensor) -> Tensor:
        weight, bias = self._laid(known, layer.weight), self._laid(known, layer.bias)
        assert weight is not None
        groups = known.clients * layer.groups
        if isinstance(layer, nn.Conv2d):
            return F.conv2d(inputs, weight, bias, layer.stride, layer.padding, layer.dilation, groups)
        # As an image of one line: channels-last kernels are there for images only.
        padding = layer.padding if isinstance(layer.padding, str) else (0, *layer.padding)
        stride, dilation = (1, *layer.stride), (1, *layer.dilation)
        image = inputs.unsqueeze(2)
        return F.conv2d(image, weight.unsqueeze(2), bias, stride, padding, dilation, groups).squeeze(2)

    def _batch_norm(self, known: Pass, layer: _BatchNorm, inputs: Tensor) -> Tensor:
        """Every client by the statistics of its own batch."""
        weight, bias = self._laid(known, layer.weight), self._laid(known, layer.bias)
        mean, var, tracked = (
            None if one is None else known.buffers[self._buffers[id(one)]]
            for one in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        )
        factor = 0.0
        if mean is not None and var is not None and tracked is not None:
            tracked.add_(1)
            # All clients have counted the same batches: they began at one model and step together.
            factor = 1.0 / float(tracked[0]) if layer.momentum is None else layer.momentum
        places = math.prod(inputs.shape[2:])
        if known.real is None:
            # Views: torch changes the running statistics of all clients in place.
            flat = [None if one is None else one.view(-1) for one in (mean, var)]
            return F.batch_norm(inputs, flat[0], flat[1], weight, bias, True, factor, layer.eps)
        # (clients,), as the loop would refuse them
        counts = known.real.sum(1) * places
        if int(counts.min()) < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        channels = inputs.shape[1] // known.clients
        # (rows, clients · channels, 1, ...): padded rows count nowhere, and get no gradient.
        real = known.real.T.repeat_interleave(channels, 1).to(inputs.dtype)
        real = real.view(*real.shape, *[1] * (inputs.ndim - 2))
        each = counts.repeat_interleave(channels).to(inputs.dtype)
        sums = (0, *range(2, inputs.ndim))
        line = (1, -1, *[1] * (inputs.ndim - 2))
        center = (inputs * real).sum(sums) / each
        gap = inputs - center.view(line)
        spread = (gap.square() * real).sum(sums) / each
        if mean is not None and var is not None:
            with torch.no_grad():
                mean.view(-1).lerp_(center.detach().to(mean.dtype), factor)
                var.view(-1).lerp_((spread * each / (each - 1)).detach().to(var.dtype), factor)
        outputs = gap * (spread + layer.eps).rsqrt().view(line)
        outputs = outputs if weight is None else outputs * weight.view(line)
        return outputs if bias is None else outputs + bias.view(line)

    def _group_norm(self, known: Pass, layer: nn.GroupNorm, inputs: Tensor) -> Tensor:
        weight, bias = self._laid(known, layer.weight), self._laid(known, layer.bias)
        return F.group_norm(inputs, known.clients * layer.num_groups, weight, bias, layer.eps)


def why_not_layered(model: nn.Module, inputs: Tensor) -> str:
    """Return why a model's layers cannot be stacked, empty if they can; ``inputs`` are rows of a client."""
    try:
        net = StackedNet(model)
        # Two clients with two rows of zeros: layers that need another layout than they get raise here, not in a round.
        params = {name: p.detach().expand(2, *p.shape) for name, p in named_parameters(model).items()}
        rows = torch.zeros_like(inputs[:1], device=device_of(model))
        buffers = {name: value.repeat(2, *[1] * value.ndim) for name, value in model.named_buffers()}
        with torch.no_grad():
            net(params, rows.expand(2, 2, *inputs.shape[1:]), buffers)
    except NotStackableError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # whatever a layer raises
        return f"its layers do not fit side by side ({type(error).__name__})"
    return ""


def refill_(model: nn.Module, before: Vector) -> list[str]:
    """Give buffers the values that they had; returns the names of those that had changed."""
    changed = [name for name, value in model.named_buffers() if not torch.equal(value, before[name])]
    here = dict(model.named_buffers())
    for name in changed:
        with torch.no_grad():
            here[name].copy_(before[name])
    return changed


def _refuse_unseen(model: nn.Module) -> None:
    """Refuse what would not be called or found on stacked parameters: hooks, forwards put on an object, two names."""
    for path, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks):
            raise NotStackableError(f"{path or 'the model'} has a hook, which layers side by side would not call")
        if "forward" in vars(module):
            raise NotStackableError(f"{path or 'the model'} has a forward of its own")
    if len(list(model.named_modules())) != len(list(model.named_modules(remove_duplicate=False))):
        raise NotStackableError("a layer has two names")

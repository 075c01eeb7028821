"""What the module tree tells about a parameter: owner, fans, block, whether it reads out or ends a branch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from sparing.blocks import find_blocks, named_parameters, submodule, tied
from sparing.errors import UserError

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1, "LSTMCell": 4, "GRUCell": 3, "RNNCell": 1}
_PARTS = {
    "query": {"q_proj", "query", "q_lin", "to_q", "wq", "q", "q_proj_weight"},
    "key": {"k_proj", "key", "k_lin", "to_k", "wk", "k", "k_proj_weight"},
    "value": {"v_proj", "value", "v_lin", "to_v", "wv", "v", "v_proj_weight"},
    "qkv": {"c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj_weight"},
}

Fans = tuple[int, int]  # inputs and outputs of a layer: channels times positions of the kernel (counts)


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The places in a model that roles depend on."""

    body: frozenset[str] | None  # parameters of the repeated blocks; None if there is no single family of them
    layers: int  # blocks of the body (count); 0 if not known
    readout: str | None  # path of the module that gives the output
    stem: str | None  # parameter that first takes in data that no embedding has looked up
    residual: frozenset[str]  # last matrices of the residual branches
    fixed_outputs: frozenset[str]  # matrices from width to a number of features that does not grow with it


def find_structure(model: nn.Module, base: Mapping[str, Sequence[int]] | None = None) -> Structure:
    """Find body, readout, stem and ends of branches; nothing is run but what ``find_blocks`` runs on fake tensors."""
    try:
        found = find_blocks(model)
    except UserError:  # no repeated blocks, or several kinds
        found = []
    blocks = [block for block in found if block.role == "body"]
    body = frozenset(name for block in blocks for name in block.params) if blocks else None
    held = [(name, submodule(model, owner(name)[0]), p.shape) for name, p in named_parameters(model).items()]
    matrices = [name for name, module, shape in held if is_matrix(module, owner(name)[1], shape)]
    residual = frozenset(
        name
        for block in blocks
        for name in _branch_ends(model, block.name, [name for name in matrices if name in block.params])
    )
    fixed_outputs = _fixed_outputs(model, matrices, body or frozenset(), residual, base)
    stem = _stem(model, body or frozenset(), fixed_outputs)
    return Structure(
        body=body,
        layers=len(blocks),
        readout=_readout(model, matrices, body or frozenset(), stem, fixed_outputs, base),
        stem=stem,
        residual=residual,
        fixed_outputs=fixed_outputs,
    )


def owner(name: str) -> tuple[str, str]:
    """Divide a parameter's name into the path of its module and its name there."""
    path, _, local = name.rpartition(".")
    return path, local


def layer_kind(module: nn.Module, local: str) -> str:
    """Return the class of a known layer; ``parameter`` for one that a module of no known type holds."""
    if _is_conv1d(module):
        return "Conv1D"
    known = (nn.Linear, *_CONVS, *_TRANSPOSED, *_EMBEDDINGS, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    if isinstance(module, known):
        return next((cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn")), "Linear")
    return type(module).__name__ if local in {"weight", "bias"} else "parameter"


def is_matrix(module: nn.Module, local: str, shape: Sequence[int]) -> bool:
    """Tell whether a parameter multiplies activations, in a layer whose orientation is known."""
    if len(shape) < 2:
        return False
    known = (nn.Linear, *_CONVS, *_TRANSPOSED, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    return (_is_conv1d(module) or isinstance(module, known)) and "bias" not in local


def is_embedding(module: nn.Module) -> bool:
    """Tell whether a module looks vectors up."""
    return isinstance(module, _EMBEDDINGS)


def is_transposed(module: nn.Module) -> bool:
    """Tell whether the weight has inputs first."""
    return _is_conv1d(module) or isinstance(module, _TRANSPOSED)


def channels_per_group(module: nn.Module) -> int | None:
    """Return input channels per group of a grouped convolution, None for any other module; 1 is depthwise."""
    if isinstance(module, (*_CONVS, *_TRANSPOSED)) and module.groups > 1:
        return module.in_channels // module.groups
    return None


def fans(module: nn.Module, local: str, shape: Sequence[int]) -> Fans:
    """Return fan-in and fan-out of a parameter of this shape, the model's or the base's; of a vector 1 and its size."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    if is_embedding(module):
        return 1, shape[-1]
    kernel = math.prod(shape[2:])
    if isinstance(module, _CONVS):
        return shape[1] * kernel, shape[0] * kernel
    if isinstance(module, _TRANSPOSED):
        return shape[0] // module.groups * kernel, shape[1] * module.groups * kernel
    if _is_conv1d(module):
        return shape[0], shape[1]
    # Packed weights count one of their parts: each is a layer of its own.
    if isinstance(module, nn.MultiheadAttention) and local == "in_proj_weight":
        return shape[1], shape[0] // 3
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and "_hr" not in local:
        return shape[1], shape[0] // _gates(module)
    return shape[-1], shape[-2]


def init_fan(module: nn.Module, local: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the fan-in by which torch's default draws a parameter; ``shapes`` are those of its whole module."""
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):  # everything is drawn by the hidden size
        return next(shape[0] for name, shape in shapes.items() if name.startswith("weight_ih")) // _gates(module)
    shape = shapes.get("weight", ()) if local == "bias" else shapes[local]  # a bias has its weight's fan-in
    if len(shape) < 2:
        return 1
    if isinstance(module, _TRANSPOSED):  # torch takes the outputs for the inputs there
        return math.prod(shape[1:])
    if not is_matrix(module, local if local != "bias" else "weight", shape):
        return shape[-1]  # of a table the last dimension, by which some authors draw
    return fans(module, local if local != "bias" else "weight", shape)[0]


def part_of(name: str) -> str:
    """Return which part of attention a matrix is; only its name tells queries from keys."""
    path, local = owner(name)
    last = path.rpartition(".")[2]
    return next((part for part, names in _PARTS.items() if local in names or last in names), "")


def attention_path(model: nn.Module, path: str) -> str:
    """Return the path of the attention to which the projection at ``path`` belongs."""
    return path if isinstance(submodule(model, path), nn.MultiheadAttention) else path.rpartition(".")[0]


def modules_sharing_weight(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the layer at a path, then the others with its weight that use it the same way, lookup or product."""
    layer = submodule(model, path)
    weight = layer._parameters.get("weight")
    tied = (m for m in model.modules() if weight is not None and m._parameters.get("weight") is weight)
    return [layer, *(m for m in tied if m is not layer and is_embedding(m) == is_embedding(layer))]


def _gates(module: nn.Module) -> int:
    known = (_GATES[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _GATES)
    return next(known, 1)


def _is_conv1d(module: nn.Module) -> bool:
    """Tell whether a module is GPT-2's Conv1D, without importing transformers."""
    return any(cls.__name__ == "Conv1D" and hasattr(module, "nf") for cls in type(module).__mro__)


def _readout(
    model: nn.Module,
    matrices: Sequence[str],
    body: frozenset[str],
    stem: str | None,
    fixed_outputs: frozenset[str],
    base: Mapping[str, Sequence[int]] | None,
) -> str | None:
    """Return the path of what the model declares; else of a matrix tied to a table; else of the one that ends it."""
    root = submodule(model, "")
    declared = getattr(root, "get_output_embeddings", None)
    try:
        head = declared() if callable(declared) else None
    except (AttributeError, NotImplementedError):  # models of transformers that have none
        head = None
    # A declared head may be tied: its own path is then that of an alias.
    if isinstance(head, nn.Module):
        paths = [owner(name)[0] for name in (*named_parameters(model), *tied(model))]
        return next((path for path in paths if submodule(model, path) is head), None)
    for alias, first in tied(model).items():
        (path, local), table = owner(alias), submodule(model, owner(first)[0])
        if is_embedding(table) and is_matrix(submodule(model, path), local, named_parameters(model)[first].shape):
            return path
    # The one matrix of fixed outputs outside the body, wherever it is registered. Of several none, so that the caller
    # must say; without any the last, unless its outputs grow or the model says that it is a bare backbone.
    backbone = isinstance(getattr(type(root), "base_model_prefix", None), str)
    backbone = backbone and getattr(root, "base_model", None) is root
    outside = [name for name in matrices if name not in body and (name == matrices[-1] or name != stem)]
    heads = [name for name in outside if name in fixed_outputs]
    if len(heads) > 1 or not outside or backbone:
        return None
    last = heads[0] if heads else outside[-1]
    grows = base is not None and _growing(model, last, base)[1]
    return None if grows else owner(last)[0]


def _growing(model: nn.Module, name: str, base: Mapping[str, Sequence[int]]) -> tuple[bool, bool]:
    """Tell whether the inputs and the outputs of a matrix differ in number from the base's."""
    path, local = owner(name)
    module = submodule(model, path)
    ours, theirs = fans(module, local, module.get_parameter(local).shape), fans(module, local, base[name])
    return ours[0] != theirs[0], ours[1] != theirs[1]


def _fixed_outputs(
    model: nn.Module,
    matrices: Sequence[str],
    body: frozenset[str],
    residual: frozenset[str],
    base: Mapping[str, Sequence[int]] | None,
) -> frozenset[str]:
    """Find heads, routers and bottlenecks: by two widths, or, of one, by outputs that no other matrix takes in."""
    # Exempt are: keys and values, which may be fewer than queries; packed projections, which their attention splits;
    # and ends of branches where only the inner width of blocks grows, for they return the stream's own width.
    params = named_parameters(model)
    channels = {name: _channels(model, name) for name in matrices}
    attention = {_parent(name) for name in matrices if part_of(name) in {"query", "qkv"}}
    rows = [name for name in matrices if not (part_of(name) and _parent(name) in attention)]
    if base is not None and any(tuple(base[name]) != tuple(p.shape) for name, p in params.items()):
        inside = {channels[name][0] for name in body & channels.keys()}
        grow = {name: _growing(model, name, base) for name in rows}
        ends = {name for name in residual & channels.keys() if channels[name][1] in inside}
        return frozenset(name for name in rows if grow[name] == (True, False) and name not in ends)
    taken = {into for into, _ in channels.values()}
    modules = {name: submodule(model, owner(name)[0]) for name in rows}
    found = set()
    for name in rows:
        (into, out), module, outside = channels[name], modules[name], name not in body
        # Inside a block more outputs than inputs are packed ones, and a convolution's outputs may be read in groups.
        if out in taken or (out >= into and not outside) or isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            continue
        packed = isinstance(module, (*_CONVS, *_TRANSPOSED)) and any(number % out == 0 for number in taken)
        if not packed and (out < into or outside):
            found.add(name)
    return frozenset(found)


def _parent(name: str) -> str:
    """Return the path of the attention that a projection would belong to."""
    path, local = owner(name)
    return path.rpartition(".")[0] if local == "weight" else path


def _channels(model: nn.Module, name: str) -> tuple[int, int]:
    """Return inputs and outputs of a layer without the positions of a kernel."""
    path, local = owner(name)
    module = submodule(model, path)
    if isinstance(module, (*_CONVS, *_TRANSPOSED)):
        return module.in_channels, module.out_channels
    return fans(module, local, module.get_parameter(local).shape)


def _stem(model: nn.Module, body: frozenset[str], fixed_outputs: Collection[str]) -> str | None:
    """Return the first matrix without fixed outputs, if it lies outside the body and no embedding comes before it."""
    for name, parameter in named_parameters(model).items():
        path, local = owner(name)
        module = submodule(model, path)
        if is_embedding(module):
            return None
        if is_matrix(module, local, parameter.shape) and name not in fixed_outputs:
            return name if name not in body else None
    return None


def _branch_ends(model: nn.Module, block: str, matrices: Sequence[str]) -> Iterator[str]:
    """Yield the last matrix of every child of a block with outputs as wide as the stream; direct ones are one child."""
    last: dict[str, tuple[str, int]] = {}
    for name in matrices:
        path, local = owner(name)
        child, _, rest = path[len(block) + 1 :].partition(".")
        module = submodule(model, path)
        last[child if rest else ""] = name, fans(module, local, module.get_parameter(local).shape)[1]
    if len(matrices) > 1:
        width = last[list(last)[-1]][1]
        yield from (name for name, out in last.values() if out == width)

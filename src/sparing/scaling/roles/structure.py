"""What a parameter is in the module tree: owner, fans, block, whether it reads out or ends a branch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from sparing.blocks import find_blocks, named_parameters, submodule
from sparing.errors import UserError
from sparing.scaling.roles.branches import added_at, branch_ends
from sparing.scaling.roles.seen import Seen

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1, "LSTMCell": 4, "GRUCell": 3, "RNNCell": 1}
Fans = tuple[int, int]  # inputs and outputs of a layer: channels times positions of the kernel (counts)


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The places in a model that roles depend on."""

    body: frozenset[str] | None  # parameters of the repeated blocks; None if there is no single family of them
    layers: int  # blocks of the body (count); 0 if not known
    blocks: Mapping[str, frozenset[str]]  # path of a block of the body -> its parameters
    residual: frozenset[str]  # last matrices of the residual branches
    seen: Seen | None  # what a forward pass showed; None if none was watched
    fixed_outputs: frozenset[str]  # matrices from width to a number of features that does not grow with it
    readouts: Mapping[str, str]  # matrix that no matrix follows -> path of the module that reads out by it
    returning: frozenset[str]  # ends of branches that return a stream which does not grow


def find_structure(
    model: nn.Module, base: Mapping[str, Sequence[int]] | None = None, seen: Seen | None = None
) -> Structure:
    """Find body, readouts and ends of branches, from the module tree and from what a forward pass showed."""
    try:
        found = find_blocks(model)
    except UserError:  # no repeated blocks, or several kinds
        found = []
    blocks = [block for block in found if block.role == "body"]
    body = frozenset(name for block in blocks for name in block.params) if blocks else None
    params = named_parameters(model)
    held = [(name, submodule(model, owner(name)[0]), p.shape) for name, p in params.items()]
    matrices = [name for name, module, shape in held if is_matrix(module, owner(name)[1], shape)]
    inside_of = {block.name: frozenset(block.params) for block in blocks}
    residual = frozenset(
        name
        for path, inner in inside_of.items()
        for name in _branch_ends(model, path, [name for name in matrices if name in inner])
    )
    if seen is not None:
        ends = branch_ends(seen.flow, body or frozenset())
        residual = frozenset(use.parameter for at, use in ends.items() if added_at(seen.flow, use, at) is not None)
    wider = base is not None and any(tuple(base[name]) != tuple(p.shape) for name, p in params.items())
    products = list(seen.contracted) if seen else []
    known = [name for name in dict.fromkeys([*matrices, *products]) if name in products or seen is None]
    rows = [name for name in known if not is_embedding(submodule(model, owner(name)[0]))]
    grow = {name: _growing(model, name, base, seen) for name in rows} if wider and base is not None else {}
    fixed = frozenset(name for name, one in grow.items() if one == (True, False))
    inside = {_channels(model, name)[0] for name in matrices if name in (body or frozenset())}
    returning = frozenset(n for n in fixed & residual if n in matrices and _channels(model, n)[1] in inside)
    return Structure(
        body=body, layers=len(blocks), blocks=inside_of, residual=residual, seen=seen, fixed_outputs=fixed,
        returning=returning, readouts=_readouts(model, seen, body or frozenset(), grow) if seen else {},
    )  # fmt: skip


def _readouts(
    model: nn.Module, seen: Seen, body: Collection[str], grow: Mapping[str, tuple[bool, bool]]
) -> dict[str, str]:
    """Return the matrices that give the model's output: no matrix follows them, and their outputs do not grow."""
    # At one width nothing grows: of a bare backbone, and in a repeated block, what comes last gives the stream.
    root = submodule(model, "")
    backbone = isinstance(getattr(type(root), "base_model_prefix", None), str)
    backbone = backbone and getattr(root, "base_model", None) is root
    found = {}
    for name, path in seen.ends.items():
        table = is_embedding(submodule(model, owner(name)[0]))
        if table or (not grow[name][1] if grow else not backbone and name not in body):
            found[name] = path
    return found


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


def is_layer(module: nn.Module) -> bool:
    """Tell whether a module is a layer that multiplies activations, of which the orientation is known."""
    known = (nn.Linear, *_CONVS, *_TRANSPOSED, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    return _is_conv1d(module) or isinstance(module, known)


def is_matrix(module: nn.Module, local: str, shape: Sequence[int]) -> bool:
    """Tell whether a parameter multiplies activations, in a layer whose orientation is known."""
    return len(shape) > 1 and is_layer(module) and "bias" not in local


def is_embedding(module: nn.Module) -> bool:
    """Tell whether a module looks vectors up."""
    return isinstance(module, _EMBEDDINGS)


def can_be_called(module: nn.Module) -> bool:
    """Tell, of a model that was not watched, whether a hook of this layer sees its input: a layer of torch as it is."""
    return type(module) in {nn.Linear, *_CONVS, *_TRANSPOSED, *_EMBEDDINGS} or _is_conv1d(module)


def is_transposed(module: nn.Module) -> bool:
    """Tell whether the weight has inputs first."""
    return _is_conv1d(module) or isinstance(module, _TRANSPOSED)


def channels_per_group(module: nn.Module) -> int | None:
    """Return input channels per group of a grouped convolution, None for any other module; 1 is depthwise."""
    if isinstance(module, (*_CONVS, *_TRANSPOSED)) and module.groups > 1:
        return module.in_channels // module.groups
    return None


def groups_of(module: nn.Module) -> int:
    """Return into how many groups a layer's channels fall; 1 where it is no convolution."""
    return module.groups if isinstance(module, (*_CONVS, *_TRANSPOSED)) else 1


def fans(module: nn.Module, local: str, shape: Sequence[int], contracted: int | None = None) -> Fans:
    """Return fan-in and fan-out of a parameter of this shape, the model's or the base's; of a vector 1 and its size.

    ``contracted`` is the dimension that a product sums over, of a parameter that no known layer holds.
    """
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
    if contracted is not None and len(shape) > 1:
        return shape[contracted], shape[-1 if contracted % len(shape) != len(shape) - 1 else -2]
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


def _growing(model: nn.Module, name: str, base: Mapping[str, Sequence[int]], seen: Seen | None) -> tuple[bool, bool]:
    """Tell whether the inputs and the outputs of a matrix differ in number from the base's."""
    path, local = owner(name)
    module, axis = submodule(model, path), seen.contracted.get(name) if seen else None
    ours, theirs = (fans(module, local, s, axis) for s in (module.get_parameter(local).shape, base[name]))
    return ours[0] != theirs[0], ours[1] != theirs[1]


def _channels(model: nn.Module, name: str) -> tuple[int, int]:
    """Return inputs and outputs of a layer without the positions of a kernel."""
    path, local = owner(name)
    module = submodule(model, path)
    if isinstance(module, (*_CONVS, *_TRANSPOSED)):
        return module.in_channels, module.out_channels
    return fans(module, local, module.get_parameter(local).shape)


def _branch_ends(model: nn.Module, block: str, matrices: Sequence[str]) -> Iterator[str]:
    """Yield the last matrix of every child of a block with outputs as wide as the stream; direct ones are one child.

    It is a guess by order of registration, for models that were not watched.
    """
    last: dict[str, tuple[str, int]] = {}
    for name in matrices:
        path, local = owner(name)
        child, _, rest = path[len(block) + 1 :].partition(".")
        module = submodule(model, path)
        last[child if rest else ""] = name, fans(module, local, module.get_parameter(local).shape)[1]
    if len(matrices) > 1:
        width = last[list(last)[-1]][1]
        yield from (name for name, out in last.values() if out == width)

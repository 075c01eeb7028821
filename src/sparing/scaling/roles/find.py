"""Every parameter's role with the reason: what its dimensions do as the model widens, and so which rule it follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import get_args

from torch import nn

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError
from sparing.scaling.roles.narrow import Base, Shapes, build_base
from sparing.scaling.roles.structure import (
    Structure,
    channels_per_group,
    fans,
    find_structure,
    init_fan,
    is_embedding,
    is_matrix,
    is_transposed,
    layer_kind,
    owner,
    part_of,
)
from sparing.scaling.rules import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known about one parameter."""

    name: str
    kind: str  # class of the layer that holds it; ``parameter`` if a module of no known type does
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]  # in the base
    fan_in: int  # inputs of the layer: channels times positions of the kernel (count); 1 for vectors and lookups
    fan_out: int  # outputs, packed queries, keys and values or gates counted once (count)
    base_fan_in: int  # fan-in in the base
    base_fan_out: int  # fan-out in the base
    init_fan: int = 1  # fan-in by which torch's default initialisation goes: of a bias that of its weight (count)
    base_init_fan: int = 1  # the same in the base
    transposed: bool = False  # whether inputs are the first dimension (Conv1D of GPT-2, transposed convolutions)
    part: str = ""  # of attention: query, key, value, qkv (packed) or none
    residual: bool = False  # whether it is the last matrix of a residual branch
    readout: bool = False  # whether its module gives the model's output, which a tied embedding does besides looking up
    matrix: bool = False  # whether it is a weight of a known layer, by which inputs are multiplied
    lookup: bool = False  # whether it is a table of embeddings
    stem: bool = False  # whether it is the first to take in data
    grouped: int | None = None  # input channels per group of a grouped convolution; 1 is depthwise
    body: bool | None = None  # whether it lies in a repeated block; None if the model has no one family of blocks
    fixed_outputs: bool = False  # whether width goes in and a number of features comes out that does not go with it
    same_shapes: bool = False  # whether model and base have all shapes in common, so that shapes tell nothing

    @property
    def module(self) -> str:
        """Path of its module."""
        return owner(self.name)[0]

    @property
    def m_in(self) -> float:
        """Times the base's fan-in."""
        return self.fan_in / self.base_fan_in

    @property
    def m_out(self) -> float:
        """Times the base's fan-out."""
        return self.fan_out / self.base_fan_out

    @property
    def m_init(self) -> float:
        """Times the base's fan-in, as initialisation sees it."""
        return self.init_fan / self.base_init_fan

    @property
    def widths(self) -> int:
        """Dimensions that differ from the base's (count)."""
        return sum(ours != theirs for ours, theirs in zip(self.shape, self.base_shape, strict=True))


def facts(model: nn.Module, base: Base | Shapes = None) -> dict[str, Facts]:
    """Collect what is known about every parameter."""
    shapes = dict(base) if isinstance(base, Mapping) else build_base(model, base).shapes
    return facts_in(find_structure(model, shapes), model, shapes)


def facts_in(structure: Structure, model: nn.Module, shapes: Shapes) -> dict[str, Facts]:
    """Collect the facts of a model whose structure is known; ``shapes`` are the base's."""
    ours = {name: tuple(parameter.shape) for name, parameter in named_parameters(model).items()}
    same_shapes = all(ours[name] == tuple(shapes[name]) for name in ours)
    reads_out = [] if structure.readout is None else submodule(model, structure.readout).parameters(recurse=False)
    readout = {id(parameter) for parameter in reads_out}  # its weight may be tied to a table, which then reads out too
    found = {}
    for name, shape in ours.items():
        path, local = owner(name)
        module, base = submodule(model, path), tuple(shapes[name])
        (fan_in, fan_out), (base_in, base_out) = (_fans(module, local, which, base) for which in (shape, base))
        found[name] = Facts(
            name=name, kind=layer_kind(module, local), shape=shape, base_shape=base,
            fan_in=fan_in, fan_out=fan_out, base_fan_in=base_in, base_fan_out=base_out,
            init_fan=init_fan(module, local, _module_shapes(path, module, ours)),
            base_init_fan=init_fan(module, local, _module_shapes(path, module, shapes)),
            transposed=is_transposed(module) and len(shape) > 1, part=part_of(name),
            residual=name in structure.residual, stem=name == structure.stem,
            readout=path == structure.readout or id(module.get_parameter(local)) in readout,
            matrix=is_matrix(module, local, shape), lookup=is_embedding(module),
            fixed_outputs=name in structure.fixed_outputs, grouped=channels_per_group(module),
            body=None if structure.body is None else name in structure.body, same_shapes=same_shapes,
        )  # fmt: skip
    return found


def role_of(known: Facts) -> tuple[Role | None, str]:
    """Return the role of a parameter and the reason; None with what is missing where its role is unclear."""
    # A tied table is an embedding first: the factor on its readout is on the readout's input, not in the weight.
    if known.lookup:
        return "embedding", "a table that is looked up" + ("; also read out (tied)" if known.readout else "")
    if known.readout and known.matrix:
        return "output", "the model's output is read from it"
    if known.matrix:
        return _matrix(known)
    if known.readout or not known.shape:
        return "fixed", "as wide as the output" if known.readout else "a single number"
    if len(known.shape) == 1:
        return ("vector", "one dimension") if known.widths or known.same_shapes else ("fixed", "no dimension grows")
    return _bare(known)


def roles_of(known: Mapping[str, Facts], overrides: Mapping[str, Role] | None = None) -> dict[str, tuple[Role, str]]:
    """Return the role and the reason of every parameter; the first pattern of ``overrides`` that matches decides."""
    overrides = overrides or {}
    for pattern, role in overrides.items():
        if role not in get_args(Role):
            raise UserError("roles", got=repr(role), why="no such role", do=f"pass one of {', '.join(get_args(Role))}")
        if not any(fnmatchcase(name, pattern) for name in known):
            why, do = "no parameter fits the pattern", "match names of named_parameters"
            raise UserError("roles", got=repr(pattern), why=why, do=do)
    found: dict[str, tuple[Role, str]] = {}
    unknown: list[str] = []
    for name, fact in known.items():
        first = next((pattern for pattern in overrides if fnmatchcase(name, pattern)), None)
        given, why = (overrides[first], f"given for {first!r}") if first is not None else role_of(fact)
        if given is None:
            unknown.append(f"{name} {list(fact.shape)} ({why})")
        else:
            found[name] = given, why
    if unknown:
        raise UserError(
            "model",
            got=f"{len(unknown)} parameters that cannot be classified: {', '.join(unknown)}",
            why="a wrong role would spoil training without a word",
            do='say what they are with roles={"pattern": "hidden"}, or embedding, output (heads, routers), vector, '
            "depthwise, fixed",
        )
    return found


def with_linear_fans(known: Facts, role: Role) -> Facts:
    """Give a weight of no known layer the fans of ``nn.Linear``, if its role says that it multiplies."""
    if known.matrix or known.lookup or len(known.shape) < 2 or role not in {"hidden", "output"}:
        return known
    (out, into), (base_out, base_in) = known.shape[-2:], known.base_shape[-2:]
    return replace(known, fan_in=into, fan_out=out, base_fan_in=base_in, base_fan_out=base_out)


def _matrix(known: Facts) -> tuple[Role | None, str]:
    """Classify a weight of a known layer that does not read out."""
    if known.grouped == 1:
        return "depthwise", "each channel has its own filter: fan-in stays"
    if known.fixed_outputs:
        return None, f"{known.kind} from width to {known.fan_out}: another head, a router or a bottleneck"
    if known.stem:
        return "embedding", "the first weight, which takes data in"
    # In a block the same shapes are a bottleneck's way back to width, which is hidden.
    if known.m_in == 1 and known.m_out != 1 and known.grouped is None and not known.body:
        return "embedding", "takes data in: only its outputs grow"
    if known.m_in != 1 and known.m_out == 1:
        return "hidden", "multiplies width by a fixed number of keys or values, which attention takes in"
    return "hidden", "multiplies width by width"


def _bare(known: Facts) -> tuple[Role | None, str]:
    """Classify a parameter of several dimensions that no known layer holds."""
    if known.widths == 0 and not known.same_shapes:
        return "fixed", "no dimension grows"
    # (1, 1, width) in a block is a gain or a bias; outside it is taken for a class token, an embedding.
    if max(known.shape) == math.prod(known.shape) and known.body is not False:
        return "vector", "one dimension but for ones"
    if known.widths > 1:
        return None, f"{known.kind}: {known.widths} dimensions grow"
    if known.body:
        return None, f"{known.kind}: a table or a product with it"
    return "embedding", "a table of which one dimension is width"


def _module_shapes(path: str, module: nn.Module, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters by their local names, without those tied to another owner's."""
    prefix = f"{path}." if path else ""
    return {local: tuple(shapes[prefix + local]) for local in module._parameters if prefix + local in shapes}


def _fans(module: nn.Module, local: str, shape: tuple[int, ...], base: tuple[int, ...]) -> tuple[int, int]:
    """Return the fans; a weight of no known layer is a table of its one growing dimension, unless two grow."""
    if len(shape) < 2 or is_embedding(module) or is_matrix(module, local, shape):
        return fans(module, local, shape)
    pairs = zip(module.get_parameter(local).shape, base, strict=True)
    growing = [axis for axis, (ours, theirs) in enumerate(pairs) if ours != theirs]
    return (1, shape[growing[0]]) if len(growing) == 1 else (shape[-1], shape[-2])

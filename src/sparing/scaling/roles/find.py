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
from sparing.scaling.roles.observe import Inputs, observe
from sparing.scaling.roles.seen import NOWHERE, Hook, look
from sparing.scaling.roles.structure import (
    Structure,
    can_be_called,
    channels_per_group,
    fans,
    find_structure,
    init_fan,
    is_embedding,
    is_layer,
    is_matrix,
    is_transposed,
    layer_kind,
    owner,
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
    hook: Hook = NOWHERE  # of a query projection, where its logits can be multiplied
    called: bool = False  # whether the input of its module (a table's output) can carry a factor
    watched: bool = False  # whether a forward pass was watched
    product: bool = False  # whether activations are multiplied by it there
    gate: bool = False  # whether its outputs choose or weigh
    chosen: bool = False  # whether it is looked up by numbers that a weight gave
    changed: str = ""  # operation that makes another matrix of it before it is used, beyond a number that multiplies it
    turned: bool = False  # whether products sum along more than one of its dimensions
    untaken: bool = False  # whether nothing follows it and no other weight takes in as many features as it gives
    contracted: int | None = None  # dimension that is summed over, of a product without a known layer
    residual: bool = False  # whether it is the last matrix of a residual branch
    readout: bool = False  # whether its module gives the model's output, which a tied embedding does besides looking up
    matrix: bool = False  # whether it is a weight of a known layer, by which inputs are multiplied
    lookup: bool = False  # whether it is a table of embeddings
    stem: bool = False  # whether it is the first to take in data
    grouped: int | None = None  # input channels per group of a grouped convolution; 1 is depthwise
    body: bool | None = None  # whether it lies in a repeated block; None if the model has no one family of blocks
    returning: bool = False  # whether it ends a branch of a stream that does not grow
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


def facts(model: nn.Module, base: Base = None, inputs: Inputs | None = None) -> dict[str, Facts]:
    """Collect what is known about every parameter, in one forward pass of the model and of its base."""
    built = build_base(model, base)
    seen = look(model, *observe(model, built.model, inputs))
    return facts_in(find_structure(model, built.shapes, seen), model, built.shapes)


def facts_in(structure: Structure, model: nn.Module, shapes: Shapes) -> dict[str, Facts]:
    """Collect the facts of a model whose structure is known; ``shapes`` are the base's."""
    ours = {name: tuple(parameter.shape) for name, parameter in named_parameters(model).items()}
    same_shapes = all(ours[name] == tuple(shapes[name]) for name in ours)
    seen = structure.seen
    paths = {path for path in structure.readouts.values() if is_layer(submodule(model, path))}
    found: dict[str, Facts] = {}
    for name, shape in ours.items():
        path, local = owner(name)
        module, base = submodule(model, path), tuple(shapes[name])
        axis = seen.contracted.get(name) if seen else None
        (fan_in, fan_out), (base_in, base_out) = (_fans(module, local, which, base, axis) for which in (shape, base))
        known = is_matrix(module, local, shape)
        found[name] = Facts(
            name=name, kind=layer_kind(module, local), shape=shape, base_shape=base,
            fan_in=fan_in, fan_out=fan_out, base_fan_in=base_in, base_fan_out=base_out,
            init_fan=init_fan(module, local, _module_shapes(path, module, ours)),
            base_init_fan=init_fan(module, local, _module_shapes(path, module, shapes)),
            transposed=len(shape) > 1 and (is_transposed(module) or (not known and axis == len(shape) - 2)),
            part=seen.parts.get(name, "") if seen else "", hook=seen.hooks.get(name, NOWHERE) if seen else NOWHERE,
            called=name in seen.called if seen else can_be_called(module), watched=seen is not None,
            product=seen is not None and name in seen.contracted, gate=seen is not None and name in seen.gates,
            chosen=seen is not None and name in seen.chosen,
            changed=seen.flow.changed.get(name, "") if seen else "", turned=seen is not None and name in seen.turned,
            contracted=axis, residual=name in structure.residual, returning=name in structure.returning,
            stem=seen is not None and name in seen.stems,
            readout=name in structure.readouts or (len(shape) < 2 and path in paths),
            matrix=known, lookup=is_embedding(module), fixed_outputs=name in structure.fixed_outputs,
            grouped=channels_per_group(module),
            body=None if structure.body is None else name in structure.body, same_shapes=same_shapes,
        )  # fmt: skip
    taken = {(fact.fan_in, fact.base_fan_in) for fact in found.values() if fact.product}
    last = [fact for name, fact in found.items() if seen and name in seen.ends and not fact.lookup and fact.m_out != 1]
    found |= {f.name: replace(f, untaken=True) for f in last if (f.fan_out, f.base_fan_out) not in taken}
    return found


def role_of(known: Facts) -> tuple[Role | None, str]:
    """Return the role of a parameter and the reason; None with what is missing where its role is unclear."""
    # A tied table is an embedding first: the factor on its readout is on the readout's input, not in the weight.
    if known.lookup and known.shape[0] != known.base_shape[0]:
        return None, f"a table of {known.shape[0]} rows, where the base has {known.base_shape[0]}"
    if known.lookup and not known.changed:
        return "embedding", "a table that is looked up" + ("; also read out (tied)" if known.readout else "")
    if known.matrix or known.lookup or (known.product and len(known.shape) > 1):
        return _matrix(known)
    if known.product and known.widths:
        return None, f"{known.kind}: a vector that is summed over, of which only nn.Linear(width, 1) would be a readout"
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
    if known.contracted is not None:
        return known
    if len(known.shape) > 2:
        got = f"{known.kind} of shape {list(known.shape)} as {role}"
        why = "it has more than two dimensions, and which of them are summed over is not known"
        raise UserError(known.name, got=got, why=why, do="hold it as two dimensions, or in a layer of torch")
    (out, into), (base_out, base_in) = known.shape[-2:], known.base_shape[-2:]
    return replace(known, fan_in=into, fan_out=out, base_fan_in=base_in, base_fan_out=base_out)


def _matrix(known: Facts) -> tuple[Role | None, str]:
    """Classify what activations are multiplied by."""
    if not known.watched or not known.product:
        return None, f"{known.kind}: {'the forward pass does not use it' if known.watched else 'no pass was watched'}"
    if known.changed:
        return None, f"{known.kind}: {known.changed} makes another matrix of it before it multiplies"
    if known.turned:
        return None, f"{known.kind}: products sum along more than one of its dimensions"
    if known.untaken:
        return None, f"{known.kind}: nothing takes in its {known.fan_out} outputs, {known.base_fan_out} in the base"
    if known.readout:
        return "output", "no matrix follows it, and its outputs do not grow: the model's output is read from it"
    if known.grouped == 1:
        return "depthwise", "each channel has its own filter: fan-in stays"
    if not known.matrix and known.contracted is None:
        return None, f"{known.kind}: a product along a dimension that is not known"
    if known.gate and (known.fixed_outputs or (known.same_shapes and known.fan_out < known.fan_in)):
        return "output", "its outputs choose or weigh: a gate or router, from width to a fixed number"
    if known.fixed_outputs and not known.returning and not known.part:
        return None, f"{known.kind} from width to {known.fan_out}: a bottleneck"
    return _inner(known)


def _inner(known: Facts) -> tuple[Role, str]:
    """Classify a matrix that neither reads out nor chooses."""
    if known.stem and known.m_in == 1:
        return "embedding", "no weight precedes it: it takes data in"
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
    if known.chosen and known.widths < 2:
        return "vector", "a vector for each of several experts"
    if known.widths > 1:
        return None, f"{known.kind}: {known.widths} dimensions grow"
    if known.body:
        return None, f"{known.kind}: a table or a product with it"
    return "embedding", "a table of which one dimension is width"


def _module_shapes(path: str, module: nn.Module, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters by their local names, without those tied to another owner's."""
    prefix = f"{path}." if path else ""
    return {local: tuple(shapes[prefix + local]) for local in module._parameters if prefix + local in shapes}


def _fans(
    module: nn.Module, local: str, shape: tuple[int, ...], base: tuple[int, ...], axis: int | None
) -> tuple[int, int]:
    """Return the fans; of no layer and in no product it is a table of its one growing dimension, unless two grow."""
    if len(shape) < 2 or is_embedding(module) or is_matrix(module, local, shape) or axis is not None:
        return fans(module, local, shape, axis)
    pairs = zip(module.get_parameter(local).shape, base, strict=True)
    growing = [axis for axis, (ours, theirs) in enumerate(pairs) if ours != theirs]
    return (1, shape[growing[0]]) if len(growing) == 1 else (shape[-1], shape[-2])

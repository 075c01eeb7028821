"""One parameter's entry in a plan, and the arithmetic from facts and a rule to its factors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparing.errors import UserError
from sparing.scaling.roles.find import Facts
from sparing.scaling.roles.initial import Init
from sparing.scaling.roles.seen import NOWHERE, Hook
from sparing.scaling.rules import Factors, Optimizer, Role, Rule, shift, stepper

LEAST_LIVE = 16  # live inputs per neuron (count); below, the law of large numbers has not set in and rates drift


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the plan says of one parameter."""

    name: str
    """Canonical name."""
    role: Role
    """What its dimensions do as the model widens."""
    why: str
    """Reason for the role."""
    kind: str
    """Class of its layer."""
    shape: tuple[int, ...]
    """Shape in the model."""
    fan_in: int
    """Inputs of the layer (count)."""
    fan_out: int
    """Outputs (count)."""
    m_in: float
    """Fan-in over the base's."""
    m_out: float
    """Fan-out over the base's."""
    density: float = 1.0
    """Share of live weights, ρ."""
    part: str = ""
    """Part of attention: query, key, value, qkv (packed) or none."""
    residual: bool = False
    """Whether it ends a residual branch."""
    transposed: bool = False
    """Whether inputs are the first dimension."""
    init: Init = "constant"
    """How its initial scale depends on width as the model draws it."""
    factors: Factors
    """Multipliers on the base's values."""
    depth: float = 1.0
    """Depth over the base's if it lies in a block, else 1."""
    m_init: float = 1.0
    """Fan-in over the base's, as the model's initialisation sees it."""
    undo: float = 1.0
    """Factor that takes a depth-dependent initial scale back to that of the base's depth (CompleteP)."""
    drawn: float | None = None
    """Standard deviation of the weights as the model drew them; None if they are on the meta device."""
    called: bool = False
    """Whether the input of its module, or the output of an embedding's, can carry a factor."""
    hook: Hook = NOWHERE
    """Hook of a projection of queries, where logits can be multiplied."""
    stacked: bool = False
    """Whether it is a stack of matrices, one for each expert."""
    own: float = 1.0
    """Number by which the model's own code multiplies the output of an embedding, over the base's; the rule undoes
    it."""

    @property
    def module(self) -> str:
        """Path of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def masked(self) -> bool:
        """Whether it gets a mask."""
        return self.density < 1

    @property
    def rescale(self) -> float:
        """Factor on the weights as the model drew them, due exactly once; refused if the initialization is unknown."""
        if self.init == "unknown":
            raise unknown_init([self.name])
        if self.init in {"zero", "given"}:
            return 1.0
        # The model has shrunk its weights by the root of this ratio already: undo it before the rule's factor.
        drawn_by = {"fan_in": self.m_init, "fan_out": self.m_out}.get(self.init, 1.0)
        return self.factors.std * self.undo * math.sqrt(drawn_by)

    @property
    def std(self) -> float | None:
        """Standard deviation that live weights will have at the start; None if not known."""
        return None if self.drawn is None or self.init == "unknown" else self.drawn * self.rescale


def unknown_init(names: list[str]) -> UserError:
    """Return the error that lists parameters whose initialization must be stated, and says how."""
    return UserError(
        "init",
        got=f"{len(names)} weights whose scale fits neither law: {', '.join(names[:4])}" + " …" * (len(names) > 4),
        why="a scale that falls with fan-in must not be corrected for width again",
        do='pass base= a function that builds the freshly initialised base, or init={"pattern": "constant"} or "fan_in"'
        ' or "given" (leave as is)',
    )


def rule_factors(entry: Entry, rule: Rule, optimizer: Optimizer, density: float) -> Factors:
    """Return what a rule says of an entry at some density."""
    return rule.factors(
        entry.role, fan_in=entry.m_in, fan_out=entry.m_out, density=density, depth=entry.depth, optimizer=optimizer,
        residual=entry.residual, part=entry.part,
    )  # fmt: skip


def entry_factors(entry: Entry, rule: Rule, optimizer: Optimizer) -> Factors:
    """Return the factors of an entry under a rule, in a form that its layer can hold."""
    found = rule_factors(entry, rule, optimizer, entry.density)
    if entry.own != 1.0:
        found = replace(found, forward=found.forward / entry.own)
    # A hook can scale only what a module is called with. Attention with packed weights, recurrent layers and bare
    # parameters take the factor into the weights instead, which is the same function.
    if found.forward != 1.0 and not entry.called:
        return shift(found, 1.0 / found.forward, stepper(entry.role, optimizer))
    return found


def make_entry(
    facts: Facts, role: tuple[Role, str], rule: Rule, optimizer: Optimizer, **known: float | str | None
) -> Entry:
    """Return a parameter's entry; ``role`` is the role and its reason, ``known`` what the facts do not say."""
    entry = Entry(
        name=facts.name, role=role[0], why=role[1], kind=facts.kind, shape=facts.shape,
        fan_in=facts.fan_in, fan_out=facts.fan_out, m_in=facts.m_in, m_out=facts.m_out, m_init=facts.m_init,
        part=facts.part, residual=facts.residual, transposed=facts.transposed, factors=Factors(),
        called=facts.called, hook=facts.hook, stacked=facts.product and not facts.matrix and len(facts.shape) > 2,
        **known,  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(entry, factors=entry_factors(entry, rule, optimizer))


def layer_pattern(name: str) -> str:
    """Return a parameter's name with ``*`` for the number of its layer: ``model.layers.*.mlp.up_proj.weight``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def merge_layers(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows that differ in the number of their layer only; ``layers`` counts them, ``std`` is their mean."""
    kinds: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        same = tuple(value for name, value in row.items() if name not in {"parameter", "std"})
        kinds.setdefault((layer_pattern(row["parameter"]), *same), []).append(row)
    found = []
    for (kind, *_), merged in kinds.items():
        stds = [row["std"] for row in merged if row["std"] != ""]
        name = kind if len(merged) > 1 else merged[0]["parameter"]
        mean = sum(stds) / len(stds) if stds else ""
        found.append({"parameter": name, "layers": len(merged)} | {**merged[0], "parameter": name, "std": mean})
    return found


def few_live(entries: Iterable[Entry]) -> str:
    """What a title says of masked weights with so few live inputs that no rule was seen to hold; empty without any."""
    masked = [entry for entry in entries if entry.masked]
    few = [entry for entry in masked if entry.fan_in * entry.density < LEAST_LIVE]
    said = f"{len(few)} of {len(masked)} masked weights have fewer than {LEAST_LIVE} live inputs a neuron"
    return f"; {said}: tune their rate anew" if few else ""

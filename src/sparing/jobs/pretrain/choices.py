"""From the words of the command line to the values of the scaling room."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sparing.errors import UserError, require
from sparing.scaling.dynamic import GMP, SET, Method, RigL
from sparing.scaling.masks import Bernoulli, Blocks, ConstantFanIn, ExactCount, Law, NofM
from sparing.scaling.rules import SP, CompleteP, InitOnly, MuP, RateOnly, Rule, SuPar

if TYPE_CHECKING:
    from sparing.jobs.pretrain.settings import LawName, Pretrain

PRUNE_FROM = 0.25  # share of a run after which GMP begins to prune


def number_of(word: str, whole: object) -> float:
    """Parse a number or a fraction; ``whole`` is shown if it is neither.

    Example:
        >>> number_of("1/4", "1/4")
        0.25
    """
    try:
        return float(Fraction(word.strip()))
    except (ValueError, ZeroDivisionError):
        do = "pass 0.25, 1/4, erk:0.1, er:20 or patterns such as *.mlp.*=1/8,*.attn.*=1/4"
        raise UserError("density", got=whole, why=f"{word.strip()!r} is no number", do=do) from None


def shares_of(density: float | str) -> Any:
    """A density as ``sparing.scaling`` takes it: a number, numbers by pattern, or a law.

    Example:
        >>> shares_of("1/8"), shares_of("*.mlp.*=1/8, *.attn.*=0.5")
        (0.125, {'*.mlp.*': 0.125, '*.attn.*': 0.5})
    """
    from sparing.scaling.density import parse_law

    word = str(density)
    if word.partition(":")[0] in {"erk", "er"}:
        return parse_law(word)
    if "=" in word:
        pairs = [part.rpartition("=") for part in word.split(",") if part.strip()]
        return {pattern.strip(): _share(number_of(value, word)) for pattern, _, value in pairs}
    return _share(number_of(word, word))


def _share(value: float) -> float:
    require(0 < value <= 1, "density", value, "it is a share of live weights", "pass 0 < density <= 1")
    return value


def rule_of(settings: Pretrain) -> Rule:
    """The parameterization that settings name."""
    if settings.rule == "sp":
        given = {
            "form": settings.form != "rescaled",
            "base_layers": settings.base_layers is not None,
            "input_scale": settings.input_scale != 1,
            "output_scale": settings.output_scale != 1,
        }
        for name in (name for name, there in given.items() if there):
            why, do = "the standard parameterization touches nothing", "omit it, or pass another --rule"
            raise UserError(name, got=getattr(settings, name), why=why, do=do)
        return SP()
    kinds: dict[str, Any] = {"mup": MuP, "supar": SuPar, "init-only": InitOnly, "rate-only": RateOnly}
    rule: Rule = kinds[settings.rule](
        decay=settings.decay,
        form=settings.form,
        depth=None if settings.base_layers is None else CompleteP(base_layers=settings.base_layers),
        input=settings.input_scale,
        output=settings.output_scale,
    )
    return rule


def law_of(name: LawName) -> Law:
    """The law of masks that a word names."""
    laws: Mapping[str, Law] = {
        "bernoulli": Bernoulli(),
        "exact": ExactCount(),
        "fan-in": ConstantFanIn(),
        "balanced": ConstantFanIn(balanced=True),
        "blocks": Blocks(),
        "2:4": NofM(n=2, m=4),
    }
    return laws[name]


def dynamic_of(settings: Pretrain) -> Method | None:
    """The method that changes masks; None where they stay."""
    pace: dict[str, Any] = {"every": settings.every, "until": settings.until}
    if settings.dynamic == "none":
        return None
    if settings.dynamic == "gmp":
        final = shares_of(settings.density)
        one = isinstance(final, float)
        require(one, "density", settings.density, "gmp prunes every layer to one density", "pass a number")
        return GMP(final=final, start=PRUNE_FROM, **pace)
    return RigL(share=settings.drop, **pace) if settings.dynamic == "rigl" else SET(share=settings.drop, **pace)


def planned_density(settings: Pretrain) -> Any:
    """The density at the first step: what is pruned later starts dense."""
    return 1.0 if settings.dynamic == "gmp" else shares_of(settings.density)

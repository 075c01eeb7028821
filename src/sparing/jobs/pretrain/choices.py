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

PRUNE_FROM = 0.25
"""Share of a run after which GMP begins to prune."""


def number_of(word: str, whole: object) -> float:
    """Read a number or a fraction.

    Args:
        word: Such as `0.25` or `1/4`.
        whole: What to show if it is neither.

    Returns:
        The number.

    Raises:
        UserError: If it is neither.

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
    """What the scaling room understands by a density.

    Args:
        density: A number, or one of the forms of the setting.

    Returns:
        A number, numbers by pattern, or a law of densities.

    Raises:
        UserError: If it is none of them, or not a share above 0.

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
    """The parameterization that settings name.

    Args:
        settings: ``rule``, ``form``, ``decay``, ``base_layers`` and the multipliers.

    Returns:
        A rule.

    Raises:
        UserError: If `sp` is given what only other rules know.
    """
    if settings.rule == "sp":
        given = {
            "form": settings.form != "rescaled",
            "base_layers": settings.base_layers is not None,
            "input_scale": settings.input_scale != 1,
            "output_scale": settings.output_scale != 1,
        }
        for name in (name for name, there in given.items() if there):
            why, do = "the standard parameterization touches nothing", "leave it away or pass another --rule"
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
    """The law of masks that a word names.

    Args:
        name: The word.

    Returns:
        A law.
    """
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
    """How masks change, as a value.

    Args:
        settings: ``dynamic``, ``drop``, ``every``, ``until`` and ``density``.

    Returns:
        A method, or None for masks that stay.

    Raises:
        UserError: If the method needs one density for all, or its schedule does not fit.
    """
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
    """The density at the first step: what is pruned later begins dense.

    Args:
        settings: ``dynamic`` and ``density``.

    Returns:
        As ``shares_of``.
    """
    return 1.0 if settings.dynamic == "gmp" else shares_of(settings.density)

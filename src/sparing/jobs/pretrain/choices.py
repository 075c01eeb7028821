"""From the words of the command line to values: density, rule, law, what changes masks, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparing.errors import UserError, require
from sparing.jobs.pretrain.settings import Pretrain
from sparing.scaling.masks.dynamic import GMP, SET, Method, RigL
from sparing.scaling.masks.laws import Bernoulli, Blocks, ConstantFanIn, ExactCount, Law, NofM
from sparing.scaling.plans.planning import Plan
from sparing.scaling.rules import SP, CompleteP, InitOnly, MuP, RateOnly, Rule, SuPar
from sparing.scaling.spectral import Spectral

if TYPE_CHECKING:
    from sparing.jobs.pretrain.settings import LawName

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
    from sparing.scaling.masks.density import parse_law

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
        for name, none in (("form", "rescaled"), ("base_layers", None)):
            value, why = getattr(settings, name), "the standard parameterization corrects nothing"
            require(value == none, name, value, why, "omit it, or pass another --rule")
        return SP(input=settings.input_scale, output=settings.output_scale)
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
        "bernoulli": Bernoulli(), "exact": ExactCount(), "fan-in": ConstantFanIn(),
        "balanced": ConstantFanIn(balanced=True), "blocks": Blocks(), "2:4": NofM(n=2, m=4),
    }  # fmt: skip
    return laws[name]


def dynamic_of(settings: Pretrain) -> Method | None:
    """The method that changes masks; None where they stay."""
    pace: dict[str, Any] = {"every": settings.mask_updates.every, "until": settings.mask_updates.until}
    if settings.dynamic == "none":
        return None
    if settings.dynamic == "gmp":
        final = shares_of(settings.density)
        one = isinstance(final, float)
        require(one, "density", settings.density, "gmp prunes every layer to one density", "pass a number")
        return GMP(final=final, start=PRUNE_FROM, **pace)
    return (RigL if settings.dynamic == "rigl" else SET)(share=settings.mask_updates.share, **pace)


def planned_density(settings: Pretrain) -> Any:
    """The density at the first step: what is pruned later starts dense."""
    return 1.0 if settings.dynamic == "gmp" else shares_of(settings.density)


EPS = 1e-8  # of Adam in the base


class Both(torch.optim.Optimizer):
    """Two optimizers over different parameters as one, with common groups and a common state.

    Example:
        >>> one, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> both = Both(torch.optim.SGD([one], lr=1.0), torch.optim.SGD([other], lr=2.0))
        >>> (3 * one + other).sum().backward()
        >>> both.step()
        >>> one.item(), other.item()
        (-2.0, -1.0)
    """

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        """Join two; the first has no state yet."""
        super().__init__([*first.param_groups, *second.param_groups], {})
        self.parts = (first, second)
        self._share()

    def _share(self) -> None:
        """Have both parts work on the groups and the state of the whole."""
        # ``load_state_dict`` of torch replaces both objects, so they are shared again after it.
        cut = len(self.parts[0].param_groups)
        self.parts[0].param_groups, self.parts[1].param_groups = self.param_groups[:cut], self.param_groups[cut:]
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step with each."""
        assert closure is None
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        super().load_state_dict(dict(state_dict))
        self._share()


def groups_for(settings: Pretrain, model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Parameter groups with ``lr_scale`` at their peak rates, of an optimizer that treats each weight alone."""
    same: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        return plan.groups(model, **same, momentum=settings.betas[0])
    return plan.groups(model, **same, betas=tuple(settings.betas), eps=EPS)


def factory_for(settings: Pretrain) -> Callable[[Any], torch.optim.Optimizer]:
    """A function from groups to an optimizer, sgd or adamw."""
    if settings.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=settings.lr)
    return partial(torch.optim.AdamW, lr=settings.lr, fused=True)


def optimizer_for(
    settings: Pretrain, model: nn.Module, plan: Plan, masks: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """An optimizer of torch over all parameters, its groups at their peak rates."""
    if settings.optimizer != "muon":
        return factory_for(settings)(groups_for(settings, model, plan))
    same: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    moments: dict[str, Any] = {"betas": tuple(settings.betas), "eps": EPS}
    momentum: dict[str, Any] = {"momentum": settings.betas[0]}
    # Muon is defined for hidden matrices; embeddings, head and vectors go to AdamW.
    hidden = {name for name, entry in plan.entries.items() if entry.role == "hidden"}
    muon = torch.optim.Muon(plan.groups(model, names=hidden, **same, **momentum), lr=settings.lr)
    rest = plan.groups(model, names=plan.entries.keys() - hidden, **same, **moments)
    both = Both(muon, torch.optim.AdamW(rest, lr=settings.lr, fused=True))
    return Spectral(both, model, plan, masks, seed=settings.seed)

"""mergekit's methods and settings, and the values of ours that do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sparing.errors import UserError, require
from sparing.valley.merging.breadcrumbs import Breadcrumbs
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.della import Della
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.method import Method
from sparing.valley.merging.sce import Sce
from sparing.valley.merging.spherical import ModelStock, MultiSlerp, Slerp
from sparing.valley.merging.ties import Ties
from sparing.valley.recipes.recipe import Recipe

_TASKS: Final = {"int8_mask", "normalize", "rescale", "lambda", "weight", "density"}

# Settings of each method; whatever else a recipe sets is refused, for it would do nothing
SETTINGS: Final = {
    "linear": {"weight", "normalize"},
    "slerp": {"t"},
    "nuslerp": {"weight", "nuslerp_row_wise", "nuslerp_flatten"},
    "multislerp": {"weight", "normalize_weights", "eps"},
    "karcher": {"max_iter", "tol"},
    "model_stock": {"filter_wise"},
    "passthrough": {"scale"},
    "sce": {"select_topk", "int8_mask"},
    "task_arithmetic": _TASKS,
    "ties": _TASKS,
    "dare_linear": _TASKS,
    "dare_ties": _TASKS,
    "breadcrumbs": _TASKS | {"gamma"},
    "breadcrumbs_ties": _TASKS | {"gamma"},
    "della": _TASKS | {"epsilon"},
    "della_linear": _TASKS | {"epsilon"},
}

_WITHOUT_BASE: Final = {"linear", "karcher", "passthrough"}  # to these the base is a model as any other
_NEEDS_BASE: Final = set(SETTINGS) - _WITHOUT_BASE - {"nuslerp", "multislerp"}


def check_method(recipe: Recipe) -> None:
    """Refuse an unknown method, settings that it does not have, and a missing base."""
    known = SETTINGS.get(recipe.method)
    if known is None:
        why = f"known are {', '.join(sorted(SETTINGS))}"
        raise UserError("merge_method", got=recipe.method, why=why, do="take one of these, or run mergekit")
    scopes = [recipe.parameters]
    for piece in recipe.slices:
        scopes += [piece.parameters, *(one.parameters for one in piece.inputs)]
        base = piece.base or recipe.base
        names = [one.model for one in piece.inputs]
        if recipe.method in _NEEDS_BASE:
            why, do = f"{recipe.method} needs one among the models of each slice", "write base_model: FOLDER"
            require(base is not None and base in names, "base_model", base or "none", why, do)
        limits = {"slerp": (2, 2), "model_stock": (3, 99), "passthrough": (1, 1)}.get(recipe.method, (1, 99))
        if recipe.method == "nuslerp":
            limits = (3, 3) if base in names else (2, 2)
        count = f"{len(names)} in a slice"
        why = f"{recipe.method} takes {limits[0]}" + ("" if limits[0] == limits[1] else " or more") + ", base included"
        require(limits[0] <= len(names) <= limits[1], "models", count, why, "name as many")
    for name in {name for scope in scopes for name in scope}:
        why = f"{recipe.method} has {', '.join(sorted(known)) or 'none'}"
        require(name in known, f"parameters of {recipe.method}", name, why, "take it out: it would do nothing")


@dataclass(frozen=True, slots=True)
class Choice:
    """How one tensor is merged: the method, the places of the models, and that of the base."""

    method: Method
    models: tuple[int, ...]
    base: int | None


# setting, place of a model (None: shared), default -> its value for the tensor at hand
Look = Callable[[str, int | None, Any], Any]


def choose(name: str, look: Look, count: int, base: int | None, seed: int) -> Choice:
    """Return how a tensor of ``count`` models is merged; the base is the model at place ``base``."""
    if name in _WITHOUT_BASE:
        return Choice(_without_base(name, look, count), tuple(range(count)), None)
    others = tuple(at for at in range(count) if at != base)
    if name == "slerp":
        assert base is not None
        return Choice(Slerp(float(look("t", None, Required))), (base, *others), None)
    if name in {"nuslerp", "multislerp"}:
        return Choice(_spherical(name, look, others, around=base is not None), others, base)
    if name == "model_stock":
        across: Any = "rows" if look("filter_wise", None, False) else "tensor"
        return Choice(ModelStock(across, like_mergekit=True), others, base)
    if name == "sce":
        kept = float(look("select_topk", None, 1.0))
        return Choice(Sce(kept, like_mergekit=True) if others else TaskArithmetic(), others or (0,), base)
    return Choice(_tasks(name, look, others, seed), others or (base or 0,), base)


class Required:
    """In place of a default: there is none."""


def _without_base(name: str, look: Look, count: int) -> Method:
    if name == "karcher":
        return MultiSlerp(steps=int(look("max_iter", None, 10)), tolerance=float(look("tol", None, 1e-5)))
    if name == "passthrough":
        scale = look("scale", 0, None)
        return Linear() if scale is None else Linear((float(scale),), normalize=False)
    weights = tuple(float(look("weight", at, Required)) for at in range(count))
    if look("normalize", None, True) and min(weights) >= 0:
        return Linear(weights)
    total = sum(weights) if look("normalize", None, True) else 1.0
    require(abs(total) > 1e-8, "weight", weights, "the sum of weights divides", "write weights that do not cancel")
    return Linear(tuple(weight / total for weight in weights), normalize=False)


def _spherical(name: str, look: Look, others: Sequence[int], *, around: bool) -> Method:
    weights = tuple(float(look("weight", at, Required)) for at in others)
    if name == "multislerp":
        if len(others) == 1:
            return Linear()
        return MultiSlerp(weights, of_changes=around, normalize=bool(look("normalize_weights", None, True)))
    t = 0.5 if abs(sum(weights)) < 1e-6 else weights[1] / sum(weights)
    # mergekit's "row-wise" is along the first axis
    parts = "columns" if look("nuslerp_row_wise", None, False) else "rows"
    across: Any = "tensor" if look("nuslerp_flatten", None, True) else parts
    return Slerp(t, across=across, of_changes=around, straight_above=1.0)


def _tasks(name: str, look: Look, others: Sequence[int], seed: int) -> Method:
    """Methods that start from task vectors: thinned in one of four ways, added up or elected."""
    weights = tuple(float(look("weight", at, Required)) for at in others)
    density = tuple(float(look("density", at, 1.0)) for at in others)
    scale, elects = float(look("lambda", None, 1.0)), name in {"ties", "dare_ties", "breadcrumbs_ties", "della"}
    normalize = bool(look("normalize", None, name in {"ties", "della"}))
    require(all(value >= 0 for value in density), "density", density, "it is a share", "write a number from 0 to 1")
    # A density of 0 leaves nothing of a model
    if 0 in density:
        why, do = "the weight of what is left out would still divide", "take the model out"
        require(elects or not normalize, "density", density, why, do)
        weights = tuple(weight if share else 0.0 for weight, share in zip(weights, density, strict=True))
    keep = tuple(min(share, 1.0) or 1.0 for share in density)
    drop = tuple(1.0 - share for share in keep)
    if not any(weights):
        return TaskArithmetic(0.0)
    then: TaskArithmetic | Ties = TaskArithmetic(scale, weights=weights, normalize=normalize)
    if elects:
        share = keep if name == "ties" else 1.0
        then = Ties(share, scale=scale, weights=weights, normalize=normalize, tied="plus")
    thins = name.partition("_")[0]
    rescale = bool(look("rescale", None, thins in {"dare", "della"}))
    if thins in {"dare", "della"}:
        how: Any = "norm" if rescale else "none"
        if thins == "dare":
            return Dare(drop, then=then, seed=seed, rescale=how)
        return Della(drop, tuple(float(look("epsilon", at, 0.15)) for at in others), then=then, seed=seed, rescale=how)
    why, do = f"{name} keeps the size of what is left here", "write rescale: false"
    require(not rescale, "rescale", True, why, do)
    if thins == "breadcrumbs":
        return Breadcrumbs(keep, tuple(float(look("gamma", at, 0.01)) for at in others), then=then)
    return then

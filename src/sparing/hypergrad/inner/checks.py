"""Checks of a problem before its run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sparing.errors import UserError, require
from sparing.hypergrad.estimate import finite
from sparing.hypergrad.inner.ranks import begin_together
from sparing.hypergrad.inner.repeatability import FirstPass, NoForeignWrites, first_difference
from sparing.hypergrad.inner.unroll import ModeParity, State, Unroll, reproducible, rng_states, same_rng_states
from sparing.hypergrad.optimizers import ours, setting_at, settings_of, steers
from sparing.hypergrad.problem import Bilevel, BlackBox, check_scalar, same_data
from sparing.hypergrad.protocol import Composed, Optimizer, coupled_terms
from sparing.hypergrad.trees import Tree, detach_tree, differentiable, leaves, rebuild

# Largest rounding error of φ ± µv, relative to the step.
_MAX_ROUNDING = 0.05
# Elements of φ that are compared at once (count).
PIECE = 1 << 14


def check_tree(name: str, tree: Tree, *, do: str = "put other data in batches") -> Tree:
    """The same values, detached; UserError unless all leaves are floating tensors (``do`` is the advice)."""
    parts = leaves(tree)
    require(bool(parts), name, tree, "there is nothing to differentiate", "pass a tree of floating tensors")
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            got = f"a leaf {part.dtype}" if isinstance(part, Tensor) else f"a leaf of type {type(part).__name__}"
            raise UserError(name, got=got, why="only floating tensors have derivatives", do=do)
        if part.is_inference():
            raise UserError(
                name, got="a tensor made inside torch.inference_mode()", why="nothing can be recorded about it",
                do="clone it outside",
            )  # fmt: skip
    return detach_tree(tree)


def check_solution(tree: Tree, like: Tree = None) -> Tree:
    """What a solver returned, detached; ``like``: what it returned at φ, or None if this is that."""
    name = "solve(phi)"
    found = check_tree(name, tree, do="return tensors, for instance by torch.from_numpy, and nothing else")
    # a solver may write every solution into the same memory
    solution = tree_map(torch.clone, found)
    if like is None:
        if not finite(leaves(solution)):
            raise UserError(
                name, got="values that are not finite", why="nothing can be differenced there",
                do="pass a φ inside the domain of the solver",
            )  # fmt: skip
        return solution
    if [leaf.shape for leaf in leaves(solution)] != [leaf.shape for leaf in leaves(like)]:
        raise UserError(
            name, got="other shapes than at φ itself", why="the two are subtracted",
            do="return u on the same grid for every φ",
        )  # fmt: skip
    return solution


def refuse_changed_phi(before: Sequence[Tensor], phi: Tree) -> None:
    """Refuse a solver that changed its φ in place; ``before``: copies of its leaves."""
    if not same_data(list(before), leaves(phi)):
        raise UserError(
            "solve(phi)", got="a φ that it changed in place", why="it is asked again, beside that φ",
            do="work on a copy: phi.clone()",
        )  # fmt: skip


def refuse_other_values(name: str, one: Tree, two: Tree) -> None:
    """Refuse a function whose values at one point differ by more than rounding: differences would be noise over µ."""
    for first, again in zip(leaves(one), leaves(two), strict=True):
        eps = torch.finfo(first.dtype).eps
        same = first.shape == again.shape
        if not same or first_difference(first.reshape(-1).tolist(), again.reshape(-1).tolist(), eps):
            raise UserError(
                name, got="other values when asked again", why="the difference of two calls would be noise",
                do="fix its randomness, so that the same input gives the same values",
            )  # fmt: skip


def refuse_lost_step(name: str, step: float, ends: Sequence[Tree], row: Tensor) -> None:
    """Refuse a step that an element of φ cannot represent, such as 1e-3 in bfloat16; ``ends``: φ ± µ·row."""
    up, down = ([leaf.reshape(-1) for leaf in leaves(end)] for end in ends)
    # of the whole row, since its smallest elements count little
    size = 2 * step * float(torch.linalg.vector_norm(row, dtype=torch.float64)) / math.sqrt(max(len(row), 1))
    parts = torch.split(row, [len(leaf) for leaf in up])
    # in pieces: the whole row in float64, a few times over, would be the peak of a call
    cut = ([piece for leaf in each for piece in torch.split(leaf, PIECE)] for each in (up, down, parts))
    for above, below, along in zip(*cut, strict=True):
        wanted = 2 * step * along.double()
        error = (above.double() - below.double() - wanted).abs()
        lost = (error > _MAX_ROUNDING * wanted.abs().clamp(min=size)).nonzero()
        if len(lost):
            at = float(above[int(lost[0])])
            why = f"φ of {above.dtype} cannot hold it beside {at:.3g}"
            raise UserError(name, got=f"{step:.3g}", why=why, do="pass a longer step, or φ in float64")


def refuse_lost_move(
    name: str, radius: float, theta: Sequence[Tensor], end: Sequence[Tensor], step: float, along: Sequence[Tensor]
) -> None:
    """Refuse a move of θ that is lost in rounding as a whole; ``end``: θ + step·along, which is ``radius`` away."""
    error = wanted = 0.0
    for at, moved, part in zip(theta, end, along, strict=True):
        error += float(torch.linalg.vector_norm((moved - at).sub_(step * part), dtype=torch.float64)) ** 2
        wanted += (step * float(torch.linalg.vector_norm(part, dtype=torch.float64))) ** 2
    if error > _MAX_ROUNDING**2 * wanted:
        why = f"θ of {theta[0].dtype} cannot hold a move of that length"
        raise UserError(name, got=f"{radius:.3g}", why=why, do="pass a larger radius, θ in float64, or HessianFree()")


def refuse_bend(name: str, step: float, curvature: float) -> None:
    """Refuse runs whose second differences exceed the first: they say nothing about the slope."""
    if curvature > 1:
        raise UserError(
            name, got=f"{step:.3g}",
            why=f"second differences of the runs are {curvature:.2g} times the first: rounding, or a bend",
            do="pass a longer step (in low precision), or a shorter one, or run in float64",
        )  # fmt: skip


def check_kinds(problem: object, method: object) -> None:
    """Refuse anything but a problem and a method."""
    if not isinstance(problem, Bilevel | BlackBox):
        raise UserError("problem", got=type(problem).__name__, why="a problem is run", do="pass a Bilevel or BlackBox")
    if isinstance(method, type) or not hasattr(method, "estimate"):
        raise UserError("method", got=repr(method), why="a method is a value", do="pass one, such as Reverse()")
    refuse_inference_mode("hypergradient")


def refuse_inference_mode(name: str) -> None:
    """Refuse a call whose tensors nothing could be recorded about."""
    if torch.is_inference_mode_enabled():
        raise UserError(
            name, got="a call inside torch.inference_mode()", why="nothing made there has derivatives",
            do="call it outside; torch.no_grad() does no harm",
        )  # fmt: skip


def check_problem(problem: Bilevel, psi: Tree, seed: int, *, shared: str = "", through_updates: bool = True) -> Unroll:
    """The run, bound to its seed, after one forward pass of the first step: shapes, dependence, repeatable data.

    ``shared`` names what takes means over the ranks of ``group``; what does not refuses such a problem.
    ``through_updates``: whether the steps of the optimizer are to be differentiated.
    """
    refuse_inference_mode("problem")
    group = problem.group
    if group is None:
        return _checked(problem, psi, seed, through_updates)
    if not shared:
        raise UserError(
            "group", got="processes that share the inner loss", why="here each would see its own part of it alone",
            do="use Reverse, Truncated or Checkpointed, or dataclasses.replace(problem, group=None)",
        )  # fmt: skip
    unroll = error = None
    try:
        unroll = _checked(problem, psi, seed, through_updates)
    # whatever a loss raises on one rank: the others would wait for it
    except Exception as found:  # noqa: BLE001
        error = found
    phi = "phi" if problem.through is None else "through(phi)"
    begin: dict[str, Sequence[Tensor] | int | str] = {phi: leaves(psi), "init": leaves(unroll.theta) if unroll else []}
    begin_together(begin | {"steps": problem.steps, "seed": seed, "method": shared}, error, group)
    assert unroll is not None
    return unroll


def _checked(problem: Bilevel, psi: Tree, seed: int, through_updates: bool) -> Unroll:
    _check_batches(problem, seed)
    with torch.no_grad(), reproducible(seed, "init"):
        theta = check_tree("init", problem.start(psi, seed))
    _check_settings(problem, psi, theta, seed)
    unroll = Unroll(problem, seed, theta, first_pass=FirstPass())
    return replace(unroll, draws=_check_inner(unroll, psi, through_updates))


def _check_batches(problem: Bilevel, seed: int) -> None:
    """Refuse batches that differ on a second call, or change in place when the next one is made."""
    if problem.batches is None:
        return
    batch = problem.batch(0, seed)
    first_copy = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    last = problem.batch(problem.steps - 1, seed)
    if problem.steps > 1 and not same_data(batch, first_copy):
        raise UserError(
            "batches", got="a batch that changes when the next one is asked for",
            why="a graph holds the batches of many steps", do="return a new tensor each time, not one buffer",
        )  # fmt: skip
    if not (same_data(last, problem.batch(problem.steps - 1, seed)) and same_data(first_copy, problem.batch(0, seed))):
        raise UserError(
            "batches", got="other data on a second call",
            why="the run and each of its directions must see the same batches",
            do="make it a function of the step, or draw from the generator it is given",
        )  # fmt: skip


def _check_settings(problem: Bilevel, psi: Tree, theta: Tree, seed: int) -> None:
    """Refuse a schedule that is no function of the step, such as torch's own, which count their calls."""
    optimizer: Any = problem.optimizer
    if isinstance(optimizer, Composed):
        with torch.no_grad(), reproducible(seed, "through"):
            optimizer, psi = optimizer.optimizer, optimizer.through(psi)
    for name, setting in settings_of(optimizer).items():
        if not callable(setting):
            continue
        first, second = ([setting_at(setting, step, psi) for step in (0, problem.steps - 1)] for _ in range(2))
        if not same_data(first, second):
            raise UserError(
                f"optimizer.{name}", got="another value at the same step on a second call",
                why="every pass must take the same steps", do="make it a function of the step (and φ) alone",
            )  # fmt: skip
    check_nesting(optimizer, psi, theta, range(problem.steps))


def check_nesting(optimizer: Any, psi: Tree, theta: Tree, steps: Iterable[int]) -> None:
    """Refuse settings by leaf in another nesting than θ at some step."""
    shape = tree_flatten(theta)[1]
    for name, setting in settings_of(optimizer).items():
        if not callable(setting):
            continue
        of_phi = steers(setting)  # asked once: to read a signature takes longer than most schedules
        for step in steps:
            value = setting(step, psi) if of_phi else setting(step)
            # dicts are flattened in their order: in another one the values would go to other leaves
            if isinstance(value, dict | list | tuple) and tree_flatten(value)[1] != shape:
                raise UserError(
                    f"optimizer.{name}", got=f"values in another nesting or order than θ at step {step}",
                    why="each belongs to a leaf",
                    do="build them as {name: ... for name in theta}, or return one number",
                )  # fmt: skip


def _check_optimizer(unroll: Unroll, psi: Tree, weights: list[Tensor], loss: Tensor, through_updates: bool) -> None:
    """Refuse an optimizer of the user's that writes in place, counts its calls, has other shapes, or has no slope."""
    optimizer = unroll.problem.optimizer
    if ours(optimizer):
        return
    grads = [part.detach() for part in torch.autograd.grad(loss, weights, materialize_grads=True, retain_graph=True)]
    with torch.no_grad():
        state = unroll.start(psi)
        if leaves(state.slots):
            check_tree("optimizer.start", state.slots, do="return a tree of floating tensors")
        coupled_terms(optimizer, state.theta, unroll.steps - 1, psi)  # implicit methods ask for it after the run
        for step in sorted({0, min(1, unroll.steps - 1)}):
            with NoForeignWrites("optimizer"):
                found = optimizer.update(state.theta, grads, state.slots, step, psi)
            again = optimizer.update(state.theta, grads, state.slots, step, psi)
            wanted, got = ([(one.shape, one.dtype) for one in leaves(tree)] for tree in (state[:2], tuple(found)))
            if tree_flatten(tuple(found))[1] != tree_flatten(state[:2])[1] or wanted != got:
                raise UserError(
                    "optimizer.update", got="weights or state of another nesting, shape or dtype than before",
                    why="the next step takes what this one returns", do="return (list of weights, state) as received",
                )  # fmt: skip
            if not same_data(tuple(found), tuple(again)):
                raise UserError(
                    "optimizer.update", got="another step when asked again", why="every pass must take the same steps",
                    do="keep counters and statistics in the state, not in the object",
                )  # fmt: skip
            if through_updates:
                _refuse_update_by_value(optimizer, state, grads, step, psi, found)
            state = State(*found)


def _refuse_update_by_value(
    optimizer: Optimizer, state: State, grads: list[Tensor], step: int, psi: Tree, found: tuple[Any, Any]
) -> None:
    """Refuse new weights that depend on old ones or on gradients by value alone; ``found``: what it returned."""
    theta, slopes, slots = (differentiable(part) for part in (state.theta, grads, state.slots))
    try:
        with torch.enable_grad():
            after = optimizer.update(theta, slopes, rebuild(state.slots, slots), step, psi)
            moving = [leaf for leaf in after[0] if leaf.requires_grad]
            inputs, ones = [*theta, *slopes], [torch.ones_like(leaf) for leaf in moving]
            reached: Sequence[Tensor | None] = [None] * len(inputs)
            if moving:
                reached = torch.autograd.grad(moving, inputs, ones, allow_unused=True)
    except RuntimeError as failure:
        first = str(failure).splitlines()[0][:160]
        raise _no_slope(f"an operation that cannot be differentiated ({first})") from failure
    groups = {"the weights": (state.theta, reached[: len(theta)]), "the gradients": (grads, reached[len(theta) :])}
    for name, (parts, slope) in groups.items():
        if any(one is not None for one in slope):
            continue
        # no edge in the graph is right where there is no influence either: dual averaging never reads the weights
        nudged = [part + 0.1 * (part.abs() + 1) for part in parts]
        given = (nudged, grads) if parts is state.theta else (state.theta, nudged)
        if not same_data(tuple(found[0]), tuple(optimizer.update(*given, state.slots, step, psi)[0])):
            raise _no_slope(f"a step that takes {name} as constants")


def _no_slope(got: str) -> UserError:
    return UserError(
        "optimizer.update", got=got, why="the hypergradient through it would be zero, or none",
        do="compute the step without torch.no_grad(), .detach(), .item() and NumPy, or use ZerothOrder or "
        "FiniteDifference",
    )  # fmt: skip


def _check_inner(unroll: Unroll, psi: Tree, through_updates: bool) -> bool:
    """Whether the inner loss draws random numbers or registers hooks; it must be a scalar that depends on θ."""
    weights = differentiable(unroll.theta)
    with torch.enable_grad(), unroll.at(0, ignore_outer_hooks=True) as batch:
        before = rng_states()
        with NoForeignWrites(), ModeParity() as mode:
            loss = unroll.problem.inner(rebuild(unroll.theta, weights), psi, batch)
        draws = mode.has_hooks or not same_rng_states(rng_states(), before)
    if not check_scalar("inner", loss).requires_grad:
        raise UserError("inner", got="a loss that does not depend on theta", why="nothing would move", do="use theta")
    unroll.check_same("loss", 0, loss)
    _check_optimizer(unroll, psi, weights, loss, through_updates)
    return draws

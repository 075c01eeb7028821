"""What is looked at before a run is paid for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.hypergrad.estimate import finite
from sparing.hypergrad.problem import Bilevel, BlackBox, same, scalar
from sparing.hypergrad.trees import Tree, detached, leaves
from sparing.hypergrad.unroll import Unroll, places, reproducible, same_places


def check_tree(name: str, tree: Tree, *, do: str = "put other data in batches") -> Tree:
    """A tree without its history.

    Args:
        name: What to call it in an error.
        tree: Floating tensors.
        do: What mends a leaf that is none.

    Returns:
        The same values, detached.

    Raises:
        UserError: If a leaf is no tensor or not floating, or there is none.
    """
    parts = leaves(tree)
    if not parts:
        raise UserError(name, got=tree, why="there is nothing to differentiate", do="pass a tree of floating tensors")
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            got = f"a leaf {part.dtype}" if isinstance(part, Tensor) else f"a leaf of type {type(part).__name__}"
            raise UserError(name, got=got, why="only floating tensors have derivatives", do=do)
    return detached(tree)


def check_solution(tree: Tree, like: Tree = None) -> Tree:
    """What a black-box solver returned, without its history.

    Args:
        tree: u, floating tensors.
        like: What it returned at φ, finite already; None: this is that.

    Returns:
        The same values, detached.

    Raises:
        UserError: If u is no tree of floating tensors, is not finite at φ, or has other shapes beside φ than at it.
    """
    name = "solve(phi)"
    found = check_tree(name, tree, do="return tensors, for instance by torch.from_numpy, and nothing else")
    if like is None:
        if not finite(leaves(found)):
            raise UserError(
                name, got="values that are not finite", why="nothing can be differenced there",
                do="pass a φ inside the domain of the solver",
            )  # fmt: skip
        return found
    if [leaf.shape for leaf in leaves(found)] != [leaf.shape for leaf in leaves(like)]:
        raise UserError(
            name, got="other shapes than at φ itself", why="the two are subtracted",
            do="return u on the same grid for every φ",
        )  # fmt: skip
    return found


def check_kinds(problem: object, method: object) -> None:
    """Refuse what is no problem or no method.

    Args:
        problem: A ``Bilevel`` or ``BlackBox``.
        method: A value with ``estimate``.

    Raises:
        UserError: If either is something else.
    """
    if not isinstance(problem, Bilevel | BlackBox):
        raise UserError("problem", got=type(problem).__name__, why="a problem is run", do="pass a Bilevel or BlackBox")
    if isinstance(method, type) or not hasattr(method, "estimate"):
        raise UserError("method", got=repr(method), why="a method is a value", do="pass one, such as Reverse()")


def check_problem(problem: Bilevel, psi: Tree, seed: int) -> Unroll:
    """Look at the first step once: shapes, dependence, repeatable data.

    Args:
        problem: The two-level problem.
        psi: φ or ψ(φ).
        seed: Seed of the run.

    Returns:
        The run, bound to its seed.

    Raises:
        UserError: If something cannot work.
    """
    if callable(problem.batches) and not same(problem.batch(0, seed), problem.batch(0, seed)):
        raise UserError(
            "batches",
            got="other data on a second call",
            why="the run and each of its directions must see the same batches",
            do="make it a function of the step, or draw from the generator it is given",
        )
    with torch.no_grad(), reproducible(seed, "init"):
        theta = check_tree("init", problem.start(psi, seed))
    unroll = Unroll(problem, seed, theta)
    return replace(unroll, draws=_check_inner(unroll, psi))


def _check_inner(unroll: Unroll, psi: Tree) -> bool:
    """Whether the inner loss draws random numbers; it is one number that depends on θ.

    Only the forward pass of the first step is paid for.

    Args:
        unroll: The inner run.
        psi: φ or ψ(φ).

    Returns:
        Whether torch's generators moved.

    Raises:
        UserError: If the loss is no such number.
    """
    watched = [weight.detach().requires_grad_() for weight in leaves(unroll.theta)]
    with torch.enable_grad(), unroll.at(0) as batch:
        before = places()
        loss = unroll.masked(watched, psi, batch)
        draws = not same_places(places(), before)
    if not scalar("inner", loss).requires_grad:
        raise UserError("inner", got="a loss that does not depend on theta", why="nothing would move", do="use theta")
    return draws

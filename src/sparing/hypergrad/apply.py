"""One call for a hypergradient by any method."""

from __future__ import annotations

import contextlib
import time
import warnings as python_warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sparing.errors import RunError, UserError
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.estimate import Estimate, Method, Report, Result, finite
from sparing.hypergrad.implicit import ConjugateGradient, FiniteDifference, HessianFree, Neumann
from sparing.hypergrad.inner.checks import check_kinds, check_problem, check_tree, refuse_inference_mode
from sparing.hypergrad.inner.ranks import mean, require_same_end
from sparing.hypergrad.inner.repeatability import sample
from sparing.hypergrad.inner.unroll import Unroll, reproducible, vjp
from sparing.hypergrad.problem import Bilevel, BlackBox
from sparing.hypergrad.reverse import Reverse, Truncated
from sparing.hypergrad.trees import Tree, add, detach_tree, differentiable, leaves, rebuild
from sparing.hypergrad.zeroth import ZerothOrder, black_box
from sparing.memory import Ledger

# Methods that never differentiate a step of the optimizer, so that it may be any code that repeats its answers.
_NOT_THROUGH_UPDATES = (ZerothOrder, FiniteDifference, HessianFree, Neumann, ConjugateGradient)


def hypergradient(
    problem: Bilevel | BlackBox, phi: Tree, method: Method, *, seed: int = 0, measure: bool = False
) -> Result:
    """∇h(φ) for h(φ) = f(θ_T(φ), φ), by the given method.

    The inner run, its batches, its dropout and all directions are functions of the seed: the same call gives the same
    bits, and all methods see the same run. The user's tensors and torch's global generators keep their values.

    Args:
        problem: The two-level problem.
        phi: Tree of floating tensors; need not require gradients.
        method: The method, a value such as ``ForwardGradient(directions=16)``.
        seed: Seed of everything random.
        measure: Whether to measure ``report.bytes`` on the CPU too. A ledger of live tensors then watches the call,
            which takes several times as long, also in ``report.seconds``; on CUDA the allocator counts at no cost.

    Returns:
        Gradient in the shape of φ, value, end of the run, report.

    Raises:
        UserError: If problem, φ and method do not fit.
        RunError: If the inner run overflows; the step is named.

    Example:
        >>> import torch
        >>> from sparing import hypergrad as hg
        >>> problem = hg.Bilevel(
        ...     inner=lambda theta, phi, batch: ((theta - phi) ** 2).sum() / 2,
        ...     outer=lambda theta, phi: (theta**2).sum() / 2,
        ...     init=torch.zeros(3),
        ...     optimizer=hg.SGD(lr=0.5),
        ...     steps=2,
        ... )
        >>> result = hg.hypergradient(problem, torch.ones(3), hg.Checkpointed())
        >>> result.grad
        tensor([0.5625, 0.5625, 0.5625])
    """
    begin = time.perf_counter()
    check_kinds(problem, method)
    phi = check_tree("phi", phi)
    device = leaves(phi)[0].device
    held_before = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held_before = torch.cuda.memory_allocated(device)
    ledger = Ledger(nn.Module()) if measure and held_before is None else None
    with ledger or contextlib.nullcontext():
        if isinstance(problem, BlackBox):
            if not isinstance(method, ZerothOrder):
                why, do = "a black box has no derivative", "pass ZerothOrder(directions=...)"
                raise UserError("method", got=str(method), why=why, do=do)
            estimate, u = black_box(problem, phi, method, seed)
            if not torch.isfinite(estimate.value):
                raise RunError("the outer loss is not finite though solve(phi) is; look at outer(u, phi)")
            _refuse_no_direction(estimate)
            grad = rebuild(phi, add(estimate.through, estimate.direct))
            result = _result(method, estimate, begin, 0, grad=grad, theta=u, psi=phi)
        else:
            psi, _ = bottleneck(problem, phi, seed)
            shares = isinstance(method, Reverse | Truncated | Checkpointed)
            through_updates = not isinstance(method, _NOT_THROUGH_UPDATES)
            unroll = check_problem(
                problem, psi, seed, shared=str(method) if shares else "", through_updates=through_updates
            )
            # ψ(φ) is computed again for its graph at the end, and must then be the same
            unroll.check_same("psi", 0, sample(leaves(psi)))
            estimate = method.estimate(unroll, psi, phi)
            if problem.group is not None:
                estimate = _over_ranks(estimate, problem.group)
            result = assemble_result(problem, unroll, phi, method, estimate, begin)
    peak = ledger.peak.total if ledger else None
    if held_before is not None:
        peak = torch.cuda.max_memory_allocated(device) - held_before
    return emit_warnings(replace(result, report=replace(result.report, bytes=peak)))


def _over_ranks(estimate: Estimate, group: ProcessGroup) -> Estimate:
    """The mean over ranks: what each has is its own part of the losses, pulled back through the common run."""
    require_same_end(estimate.state.theta, group)
    parts = mean([*estimate.through, *estimate.direct, estimate.value], group)
    count = len(estimate.through)
    return replace(estimate, through=list(parts[:count]), direct=list(parts[count:-1]), value=parts[-1])


def assemble_result(
    problem: Bilevel,
    unroll: Unroll,
    phi: Tree,
    method: Method,
    estimate: Estimate,
    begin: float,
    steps: int | None = None,
) -> Result:
    """From an estimate in the space of ψ to the result in that of φ; ``begin`` by ``perf_counter`` (s)."""
    psi, graph = bottleneck(problem, phi, unroll.seed)
    if graph is not None:
        unroll.check_same("psi", 0, sample(leaves(psi)))
    # before anything is said about the values: a run that differs each time has no meaningful ones
    if unroll.first_pass is not None:
        unroll.first_pass.compare_pending()
    if not (finite(estimate.state.theta) and torch.isfinite(estimate.value)):
        raise RunError(overflow_message(unroll, psi, estimate.details.get("growth", ())))
    _refuse_no_direction(estimate)
    # sums over the steps of a ψ of 16 bits come in 32
    held = through = [part.to(leaf.dtype) for part, leaf in zip(estimate.through, leaves(psi), strict=True)]
    if graph is not None:
        through = vjp(leaves(graph[0]), graph[1], held, name="through")
    grad = rebuild(phi, add(estimate.direct, through))
    if not finite(leaves(grad)):
        if finite(estimate.through) and not finite(held):
            raise RunError("the hypergradient is larger than phi's dtype can hold; give phi in float32 or bfloat16")
        raise RunError(
            "the hypergradient is not finite though the run is: something has no derivative where it stands, such as a "
            "root or a norm at 0; add a small number under it"
        )
    theta = rebuild(unroll.theta, estimate.state.theta)
    return _result(method, estimate, begin, problem.steps if steps is None else steps, grad=grad, theta=theta, psi=psi)


def solve(problem: Bilevel, phi: Tree, *, seed: int = 0) -> Tree:
    """The inner run alone: θ_T as every method sees it, to rounding (and mostly to the bit).

    Args:
        problem: The two-level problem.
        phi: Tree of floating tensors.
        seed: Seed of batches, initial weights and dropout.

    Returns:
        θ_T.

    Raises:
        UserError: If problem and φ do not fit.
        RunError: If the run overflows; the step is named.
    """
    refuse_inference_mode("solve")
    phi = check_tree("phi", phi)
    psi, _ = bottleneck(problem, phi, seed)
    unroll = check_problem(problem, psi, seed, shared="solve", through_updates=False)
    state = unroll.run(psi)
    if not finite(state.theta):
        raise RunError(overflow_message(unroll, psi))
    return rebuild(unroll.theta, state.theta)


def phases(*parts: tuple[Method, int | None]) -> Callable[[int], Method]:
    """A sequence of methods over the outer steps, such as a cheap biased one first and an unbiased one after it.

    Args:
        *parts: (method, outer steps); None as the last count means without end.

    Returns:
        Outer step, from 0 -> method; the last one goes on when all counts are used up.

    Raises:
        UserError: If there is no part, or a count that can never be reached.

    Source: Shen et al. 2024, the two-phase paradigm of Section 3.

    Example:
        >>> from sparing import hypergrad as hg
        >>> plan = hg.phases((hg.HessianFree(), 2), (hg.ForwardGradient(directions=8), None))
        >>> [str(plan(step)) for step in range(4)]
        ['Hessian-free', 'Hessian-free', '(FG)²U b=8', '(FG)²U b=8']
    """
    endless = any(count is None for _, count in parts[:-1])
    if not parts or endless or any(count is not None and count < 1 for _, count in parts):
        why = "each but the last needs a count of outer steps"
        raise UserError("phases", got=parts, why=why, do="pass (method, count >= 1)")

    def method(step: int) -> Method:
        for part, count in parts:
            if count is None or step < count:
                return part
            step -= count
        return parts[-1][0]

    return method


def bottleneck(problem: Bilevel, phi: Tree, seed: int) -> tuple[Tree, tuple[Tree, list[Tensor]] | None]:
    """ψ(φ) detached, and with its graph beside the leaves of φ; φ itself and None without a bottleneck."""
    if problem.through is None:
        return phi, None
    with torch.enable_grad(), reproducible(seed, "through"):
        inputs = differentiable(phi)
        psi = problem.through(rebuild(phi, inputs))
    check_tree("through(phi)", psi)
    return detach_tree(psi), (psi, inputs)


def overflow_message(unroll: Unroll, psi: Tree, grown: Sequence[float] = ()) -> str:
    """Names the first inner step whose weights are not finite; the run is repeated to find it."""
    state = unroll.run(psi, last=0)
    phi = "phi" if unroll.problem.through is None else "through(phi)"
    for name, parts in ((phi, leaves(psi)), ("init", state.theta)):
        if not finite(parts):
            return f"{name} holds values that are not finite, and so does the inner run; look at where they come from"
    for step in range(unroll.steps):
        state = unroll.run(psi, state=state, first=step, last=step + 1)
        if not finite(state.theta):
            size = f", ‖y_t‖/‖v‖ = {grown[step]:.3g}" if step < len(grown) else ""
            return (
                f"the inner run is not finite after step t = {step + 1} of {unroll.steps}{size}; its learning rate is "
                "too large: lower optimizer.lr, or pass clip="
            )
    return "the outer loss is not finite though θ_T is; look at outer(theta, phi)"


def _refuse_no_direction(estimate: Estimate) -> None:
    """Refuse an estimate from no direction at all."""
    # it would be zero, and look like an optimum
    if estimate.details.get("masked") and estimate.details["masked"] == estimate.details["directions"]:
        raise RunError(
            f"all {estimate.details['masked']} directions were lost or overflowed though the run itself did not: the "
            "tangents grow too fast, lower optimizer.lr or pass clip="
        )


def emit_warnings(result: Result) -> Result:
    """Raise the warnings of a report, and return the result."""
    for warning in result.report.warnings:
        # level 3 is the line of the user, who called ``hypergradient`` or ``peek``
        python_warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return result


def _result(
    method: Method, estimate: Estimate, begin: float, steps: int, *, grad: Tree, theta: Tree, psi: Tree
) -> Result:
    """The result with the report of the method."""
    report = Report(method=str(method), steps=steps, seconds=time.perf_counter() - begin, **estimate.details)
    control = None if estimate.control is None else rebuild(psi, estimate.control)
    return Result(grad=grad, value=estimate.value, theta=theta, report=report, control=control)

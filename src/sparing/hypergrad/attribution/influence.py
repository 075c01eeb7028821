"""The influence of every training row on a prediction, exactly: one pass back through the whole run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparing.errors import RunError, UserError, require
from sparing.hypergrad.apply import overflow_message
from sparing.hypergrad.attribution.smoothness import Smoothness, metasmoothness
from sparing.hypergrad.attribution.training import Target, TrainingRun, row_numbers
from sparing.hypergrad.checkpointed import Checkpointed, Held, backward_stretches
from sparing.hypergrad.estimate import finite
from sparing.hypergrad.inner.checks import check_problem
from sparing.hypergrad.inner.repeatability import NoForeignWrites, first_difference
from sparing.hypergrad.inner.unroll import ModeParity, State, Unroll, reproducible, vjp
from sparing.hypergrad.reverse import Reverse, pullback_init
from sparing.hypergrad.trees import Tree, differentiable, leaves, rebuild


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """How the losses of predictions move with the weight of every training row."""

    influence: Tensor
    """∂target/∂w_i, shape (n,), or (k, n) for k predictions; below zero: the row helps. Zero for a row that no batch
    holds."""
    value: Tensor
    """The target at the end of the run, shape () or (k,)."""
    theta: Tree
    """θ_T."""
    seconds: float
    """Wall-clock time, the check of smoothness included (s)."""
    smoothness: Smoothness | None = None
    """Whether first-order predictions mean anything for this run; None: not asked."""

    def predict(self, drop: Sequence[int] | Tensor) -> Tensor:
        """First-order change of the target were these rows dropped: −Σ of their influences, shape () or (k,)."""
        rows = row_numbers(drop, self.influence.shape[-1]).to(self.influence.device)
        return -self.influence[..., rows].sum(-1)

    def helpful(self, count: int) -> Tensor:
        """Numbers of the rows that lower the target most, the best first, shape (count,) or (k, count)."""
        return self._extreme(count, largest=False)

    def harmful(self, count: int) -> Tensor:
        """Numbers of the rows that raise the target most, the worst first, shape (count,) or (k, count)."""
        return self._extreme(count, largest=True)

    def _extreme(self, count: int, *, largest: bool) -> Tensor:
        rows = self.influence.shape[-1]
        require(
            isinstance(count, int) and 1 <= count <= rows,
            "count",
            count,
            f"there are {rows} rows",
            "pass 1 to that many",
        )
        return self.influence.topk(count, largest=largest).indices


def attribute(
    run: TrainingRun,
    target: Target,
    method: Checkpointed | Reverse | None = None,
    *,
    seed: int = 0,
    check: float = 0.01,
) -> Attribution:
    """The influence of every training row on predictions of the trained model, exact for this very run.

    The run is replayed and differentiated step by step, moments included (a metagradient): the result is the derivative
    of retraining with the same order and randomness, not an approximation of it at the end. One prediction costs about
    three plain runs, as ``Checkpointed`` does; each further one adds a backward pass, but shares the replays.

    Args:
        run: The training run.
        target: θ_T -> the loss of a prediction, shape (), or those of k, shape (k,).
        method: ``Checkpointed``, which is the default, or ``Reverse()`` where the graph of the whole run fits.
        seed: Seed of dropout.
        check: Share of the rows whose weight ``metasmoothness`` moves beforehand, in three plain runs; 0: no check.

    Returns:
        Influences, targets, end of the run; a ``RuntimeWarning`` in one line where the run is not smooth.

    Raises:
        UserError: If run, target and method do not fit.
        RunError: If the run overflows.

    Source: Engstrom et al. 2025 (arXiv:2503.13751); Ilyas & Engstrom 2025 (MAGIC, arXiv:2504.16430).

    Example:
        >>> from sparing import hypergrad as hg
        >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 6.0])
        >>> run = hg.TrainingRun(
        ...     losses=lambda theta, rows: ((x[rows] @ theta - y[rows]) ** 2) / 2,
        ...     rows=3,
        ...     batches=[torch.tensor([0, 1]), torch.tensor([2])],
        ...     init=torch.zeros(1),
        ...     optimizer=hg.SGD(lr=0.1),
        ... )
        >>> found = hg.attribute(run, lambda theta: ((theta[0] - 1.0) ** 2) / 2, check=0)
        >>> found.influence, found.helpful(1)
        (tensor([0.0041, 0.0165, 1.2994]), tensor([0]))
    """
    begin = time.perf_counter()
    method = Checkpointed() if method is None else method
    if not isinstance(method, Checkpointed | Reverse):
        raise UserError(
            "method", got=str(method), why="a derivative for each row takes the exact way back",
            do="pass Checkpointed() or Reverse(); hypergradient(run.problem(target), …) takes any method",
        )  # fmt: skip
    if method.offload is not None:
        raise UserError(
            "method", got=str(method), why="attribution keeps its states in the memory of the run",
            do="pass Checkpointed(states=...) without offload",
        )  # fmt: skip
    require(callable(target), "target", target, "it is called", "pass a function of θ_T")
    run.refuse_mixed_rows(seed)
    weights = run.weights()
    unroll = check_problem(run.problem(), weights, seed)
    smooth = metasmoothness(run, share=check, seed=seed) if check else None
    end, value, influence = _pull_all(unroll, weights, target, method)
    assert unroll.first_pass is not None
    unroll.first_pass.compare_pending()
    if not finite([value]):
        raise RunError("the target is not finite though θ_T is; look at target(theta)")
    if not finite([influence]):
        raise RunError(
            "the influence is not finite though the run is: something has no derivative where it stands, such as a "
            "root or a norm at 0; add a small number under it"
        )
    if smooth is not None and smooth.warning:
        warnings.warn(smooth.warning, RuntimeWarning, stacklevel=2)
    theta = rebuild(unroll.theta, end.theta)
    seconds = time.perf_counter() - begin
    return Attribution(influence=influence, value=value, theta=theta, seconds=seconds, smoothness=smooth)


def _pull_all(
    unroll: Unroll, weights: Tensor, target: Target, method: Checkpointed | Reverse
) -> tuple[State, Tensor, Tensor]:
    """θ_T, targets and influences; all targets share the replay and the graph of each stretch."""
    with torch.no_grad():
        start = unroll.start(weights)
    leaf, states = (unroll.steps, 0) if isinstance(method, Reverse) else method.schedule(unroll, weights, start)
    cotangents: list[State] = []
    for first, last, state in backward_stretches(unroll, weights, leaf, 0, unroll.steps, Held(start), states):
        inputs, graph_weights = differentiable(state), weights.detach().requires_grad_()
        current = rebuild(state, inputs)
        for step in range(first, last):
            with unroll.at(step) as batch:
                current = unroll.graph_step(step, current, graph_weights, batch)
        ends = leaves(unroll.check_end(last, current))
        if not cotangents:
            end = rebuild(current, [tensor.detach() for tensor in ends])
            if not finite(end.theta):
                raise RunError(overflow_message(unroll, weights))
            value, cotangents = _targets(unroll, end, target)
            influence = weights.new_zeros(len(cotangents), len(weights))
        # where the start is a constant, before the first step only the weights are asked for
        asked = [graph_weights] if first == 0 and unroll.constant_start else [*inputs, graph_weights]
        for at, cotangent in enumerate(cotangents):
            *back, part = vjp(ends, asked, leaves(cotangent), keep=at < len(cotangents) - 1)
            influence[at] += part
            if back:
                cotangents[at] = rebuild(state, back)
        del current, ends, state  # freed before the next stretch is run: a budget counts on it
    if not unroll.constant_start:
        for row, cotangent in zip(influence, cotangents, strict=True):
            row += pullback_init(unroll, weights, cotangent)[0]
    return end, value, influence if value.ndim else influence[0]


def _targets(unroll: Unroll, end: State, target: Target) -> tuple[Tensor, list[State]]:
    """Values of the targets and the cotangent of each at the end of the run."""

    def pick(at: int) -> tuple[Tensor, State]:
        def outer(theta: Tree, phi: Tree) -> Tensor:
            value = target(theta).reshape(-1)[at]
            if not value.requires_grad:
                why, do = "no row would have any influence", "compute it from theta, without no_grad or detach"
                raise UserError("target", got="a value that does not depend on theta", why=why, do=do)
            again = first_difference(
                [seen[at]], [float(value.detach())], torch.finfo(value.dtype).eps, max(map(abs, seen))
            )
            if again:
                raise UserError(
                    "target", got=f"another value when asked again ({again[0]:.9g}, then {again[1]:.9g})",
                    why="the value and its influences would be of two predictions",
                    do="draw from torch's global generators, or not at all",
                )  # fmt: skip
            return value

        at_end = replace(unroll, problem=replace(unroll.problem, outer=outer))
        value, cotangent, _ = at_end.outer_gradients(end, [])
        return value, cotangent

    # the randomness and the kernels of `Unroll.outer`
    rng, kernels = reproducible(unroll.seed, "outer"), sdpa_kernel(SDPBackend.MATH)
    with torch.no_grad(), rng, kernels, NoForeignWrites("target"), ModeParity():
        value = target(rebuild(unroll.theta, end.theta))
    shape = value.shape if isinstance(value, Tensor) else None
    if shape is None or len(shape) > 1 or shape.numel() == 0:
        got = "no tensor" if shape is None else f"shape {tuple(shape)}"
        raise UserError("target", got=got, why="each prediction has one loss", do="return shape () or (k,)")
    seen: list[float] = value.double().reshape(-1).tolist()
    values, cotangents = zip(*(pick(at) for at in range(shape.numel())), strict=True)
    return torch.stack(values).reshape(shape), list(cotangents)

"""A training run whose rows have weights, so that its end can be differentiated with respect to each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparing.errors import UserError, require
from sparing.hypergrad.inner.checks import check_tree
from sparing.hypergrad.inner.repeatability import NoForeignWrites
from sparing.hypergrad.inner.unroll import reproducible, rng_states, same_rng_states
from sparing.hypergrad.problem import Bilevel
from sparing.hypergrad.protocol import Optimizer
from sparing.hypergrad.trees import Tree, leaves, rebuild
from sparing.seeds import stream

Target = Callable[[Tree], Tensor]  # θ_T -> the loss of a prediction, shape (), or those of k predictions, shape (k,)


def row_numbers(drop: Sequence[int] | Tensor, rows: int) -> Tensor:
    """Row numbers as int64 on the CPU, (k,); each below ``rows`` and named once."""
    numbers = torch.as_tensor(drop).cpu()
    if numbers.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    # a truth value for each row would be taken for the rows 0 and 1
    whole = numbers.dtype in {torch.int64, torch.int32} and numbers.ndim == 1
    got = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
    require(whole, "drop", got, "rows are named by number", "pass a list of row numbers")
    inside = int(numbers.min()) >= 0 and int(numbers.max()) < rows
    got, why = f"rows {int(numbers.min())} to {int(numbers.max())}", f"rows are numbered 0 to {rows - 1}"
    require(inside, "drop", got, why, "pass numbers of rows")
    once = len(torch.unique(numbers)) == len(numbers)
    require(once, "drop", f"{len(numbers)} numbers", "one stands there twice", "name each row once")
    return numbers.long()


def _beside(theta: Tree, seed: int) -> Tree:
    """Weights a little off θ₀: at zero, many losses do not see their data. A sign stays what it is."""
    moved = []
    for place, leaf in enumerate(leaves(theta)):
        noise = torch.randn(leaf.shape, generator=stream(seed, "mixed rows", place)).clamp(-3, 3).to(leaf)
        moved.append(torch.where(leaf == 0, noise / 10, leaf * (1 + noise / 100)).detach())
    return rebuild(theta, moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRun:
    """A training run with a weight w_i for each row, one in the run itself and zero for a row that is dropped.

    Step t minimizes (1/B) Σ w_i ℓ_i over its B rows; w_i counts each time the row appears. A dropped row leaves its
    place in the batch empty, so that order and step count stay what they are. Each loss must depend on its row alone.

    Source: Ilyas & Engstrom 2025 (MAGIC, arXiv:2504.16430).

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
        >>> hg.solve(run.problem(), run.weights(drop=[2]))
        tensor([0.2500])
    """

    losses: Callable[[Tree, Tensor], Tensor]
    """(θ, rows) -> the loss ℓ of each of these rows, shape (B,); ``rows``: row numbers, int64, (B,)."""

    rows: int
    """Training rows n (count)."""

    batches: Sequence[Tensor]
    """Row numbers of step t = 0 … T−1, int64, (B,), each from 0 to n − 1; T is their number."""

    init: Tree
    """θ₀: a tree of floating tensors."""

    optimizer: Optimizer
    """The optimizer of the run; its moments are unrolled with the weights."""

    def __post_init__(self) -> None:
        why, do = "it is called with θ and row numbers", "pass a function that returns one loss a row"
        require(callable(self.losses), "losses", type(self.losses).__name__, why, do)
        check_tree("init", self.init, do="pass the weights themselves, such as a dict of tensors")
        why, do = "it is a count", "pass a whole number, such as len(x)"
        require(isinstance(self.rows, Integral), "rows", self.rows, why, do)
        require(self.rows >= 1, "rows", self.rows, "there is nothing to attribute to", "pass the number of rows")
        listed = isinstance(self.batches, Sequence) and len(self.batches) > 0
        do = "pass a list of index tensors, one a step, such as torch.randperm(rows).split(64)"
        require(listed, "batches", type(self.batches).__name__, "the order of rows is replayed", do)
        for step, batch in enumerate(self.batches):
            whole = isinstance(batch, Tensor) and batch.dtype == torch.int64 and batch.ndim == 1 and len(batch) > 0
            got = f"{batch.dtype} of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            require(whole, f"batches[{step}]", got, "weights are found by row number", do)
            low, high = int(batch.min()), int(batch.max())
            fits, why = low >= 0 and high < self.rows, f"rows are numbered 0 to {self.rows - 1}"
            require(fits, f"batches[{step}]", f"rows {low} to {high}", why, "number rows from 0, or raise rows")

    def weights(self, drop: Sequence[int] | Tensor = ()) -> Tensor:
        """The weights of a run, in float32 or the wider dtype of θ₀, and on its device.

        Args:
            drop: Numbers of the rows whose weight is zero.

        Returns:
            Shape (n,).

        Raises:
            UserError: If a number is not that of a row, or is named twice.
        """
        first = leaves(self.init)[0]
        # in bfloat16 the influence of a row would stop growing after some hundreds of steps
        dtype = torch.promote_types(first.dtype, torch.float32)
        made = torch.ones(self.rows, dtype=dtype, device=first.device)
        made[row_numbers(drop, self.rows).to(first.device)] = 0
        return made

    def problem(self, target: Target | None = None) -> Bilevel:
        """The run as a two-level problem in the weights of its rows, for ``solve`` and ``hypergradient``.

        Args:
            target: θ_T -> a loss, shape (); none where only the run matters.

        Returns:
            The problem; its φ is ``weights()``.

        Raises:
            UserError: When it runs, if ``losses`` does not return one loss a row.
        """

        def inner(theta: Tree, weights: Tensor, rows: Tensor) -> Tensor:
            losses = self.losses(theta, rows)
            if not isinstance(losses, Tensor) or losses.shape != rows.shape:
                got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
                raise UserError(
                    "losses", got=f"{got} for {len(rows)} rows", why="each row has its own weight",
                    do='return one loss a row, for instance with reduction="none"',
                )  # fmt: skip
            return (weights[rows] * losses).sum() / len(rows)

        def outer(theta: Tree, weights: Tensor) -> Tensor:
            return weights.sum() * 0 if target is None else target(theta)

        batches = list(self.batches)
        return Bilevel(
            inner=inner, outer=outer, init=self.init, optimizer=self.optimizer, steps=len(batches), batches=batches
        )

    def refuse_mixed_rows(self, seed: int) -> None:
        """Refuse losses that depend on the other rows of a batch, as with batch norm and contrastive losses.

        Args:
            seed: Seed of the run.

        Raises:
            UserError: If they do, or if they write into what they did not make, such as running statistics.
        """
        rows = next((batch for batch in self.batches if len(torch.unique(batch)) > 1), None)
        if rows is None:
            return
        # as many rows, so that random masks stay those of the first half, and a batch norm has its two rows
        half, others = len(rows) // 2, rows.clone()
        others[half:] = rows[rows != rows[-1]][0]
        theta, found, drawn = _beside(self.init, seed), [], []
        for asked in (rows, others):
            with torch.no_grad(), reproducible(seed, "step", 0), sdpa_kernel(SDPBackend.MATH):
                with NoForeignWrites("losses"):
                    found.append(self.losses(theta, asked))
                drawn.append(rng_states())
        if not all(isinstance(one, Tensor) and one.shape == rows.shape and one.is_floating_point() for one in found):
            return  # which has its own refusal
        whole, changed = found
        # how much is drawn may depend on the rows, and then the masks of the first half do too
        if not same_rng_states(*drawn) or not bool(torch.isfinite(whole).all()):
            return
        # √ε: kernels may differ by rounding, statistics of a batch differ by per cents
        scale = torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().max().clamp(min=1e-30)
        if not bool((whole - changed)[:half].abs().max() <= scale):
            raise UserError(
                "losses", got="a loss that changes with the other rows of its batch",
                why="a row of weight 0 would still act on the others", do="use GroupNorm, or model.eval()",
            )  # fmt: skip

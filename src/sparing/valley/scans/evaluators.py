"""What is measured at every point: loss and error on fixed rows; and whether an ``evaluate`` can be trusted.

``evaluate`` is any function of a model that returns numbers by name. It must return the same numbers for the same
weights, to the bit, and leave the model as it is; both are checked once, at λ = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.blocks.modes import evaluating
from sparing.errors import UserError, require
from sparing.valley.apply import state_digests
from sparing.valley.scans.batch_norm import run_model

# model -> numbers by name, such as {"loss": nat, "error": share}. An attribute ``rows``, if any, counts the rows; an
# attribute ``better`` declares "lower" or "higher" for metrics whose name does not say which is better; a method
# ``each``, model -> numbers of every row by name, shape (rows,), lets a soup be compared with its best member row by
# row. With a method ``choose``, indices of rows -> the same on these rows alone, and a length, a scan measures only as
# many rows as its precision takes.
Evaluate = Callable[[nn.Module], Mapping[str, float]]


class Classification:
    """Cross-entropy and error of a classifier on fixed rows; an ``evaluate`` for scans that can be sent to workers.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.eye(2))
        >>> Classification(torch.eye(2), torch.tensor([0, 0]))(model)["error"]
        0.5
    """

    def __init__(self, inputs: Tensor, targets: Tensor, *, batch_size: int = 512) -> None:
        """Take inputs of shape (rows, ...) and classes, integers, of shape (rows,); ``batch_size`` rows run at once."""
        require(
            len(inputs) == len(targets) > 0 and targets.ndim == 1, "rows",
            f"{len(inputs)} inputs and targets of shape {tuple(targets.shape)}",
            "every input has one class", "pass inputs of shape (rows, ...) and targets of shape (rows,)",
        )  # fmt: skip
        require(batch_size > 0, "batch_size", batch_size, "rows come in batches", "pass batch_size >= 1")
        self.inputs, self.targets, self.batch_size = inputs, targets, batch_size
        self.rows = len(targets)
        """Rows behind each number (count)."""

    def __len__(self) -> int:
        """Rows (count)."""
        return len(self.targets)

    def choose(self, rows: Tensor) -> Classification:
        """Return the same on some rows alone, by their indices, int64, shape (n,)."""
        return Classification(self.inputs[rows], self.targets[rows], batch_size=self.batch_size)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return "loss" (mean, nat, raw: infinite or NaN where it is) and "error" (share of rows), in eval mode."""
        return self._scores(model).means

    @torch.no_grad()
    def each(self, model: nn.Module) -> dict[str, Tensor]:
        """Return "loss" (nat) and "error" (0 or 1) of every row, float64, shape (rows,)."""
        return self._scores(model).each

    def _scores(self, model: nn.Module) -> _RowScores:
        parts = zip(*(torch.split(one, self.batch_size) for one in (self.inputs, self.targets)), strict=True)
        with evaluating(model):
            return _RowScores((logits_of(run_model(model, inputs)), targets) for inputs, targets in parts)

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, Tensor, float]) -> Tensor:
        """Return a loss to differentiate: over ``batches``, its mean is the mean cross-entropy of a row (nat)."""
        inputs, targets, share = batch
        logits = logits_of(run_model(model, inputs))
        return F.cross_entropy(logits, targets.to(logits.device), reduction="sum") * share

    def batches(self, rows: int | None = None) -> list[tuple[Tensor, Tensor, float]]:
        """Return the first rows, all by default, as batches for ``loss_of``: inputs, targets, batches / rows."""
        pairs = [torch.split(one[:rows], self.batch_size) for one in (self.inputs, self.targets)]
        share = len(pairs[0]) / len(self.targets[:rows])
        return [(inputs, targets, share) for inputs, targets in zip(*pairs, strict=True)]


class NextToken:
    """Cross-entropy and error of a language model's next token on fixed sequences; an ``evaluate`` for scans."""

    def __init__(self, tokens: Tensor, *, batch_size: int = 16) -> None:
        """Take token ids, shape (sequences, length >= 2), without padding; ``batch_size`` sequences run at once."""
        require(
            tokens.ndim == 2 and tokens.shape[0] > 0 and tokens.shape[1] > 1, "tokens", f"shape {tuple(tokens.shape)}",
            "every token but the first of a sequence is predicted", "pass shape (sequences, length) with length >= 2",
        )  # fmt: skip
        require(batch_size > 0, "batch_size", batch_size, "sequences come in batches", "pass batch_size >= 1")
        self.tokens, self.batch_size = tokens, batch_size
        self.rows = tokens.shape[0] * (tokens.shape[1] - 1)
        """Predicted tokens behind each number (count). Those of one sequence are correlated, so that a noise floor
        computed from them is rather too low."""

    def __len__(self) -> int:
        """Sequences (count)."""
        return len(self.tokens)

    def choose(self, rows: Tensor) -> NextToken:
        """Return the same on some sequences alone, by their indices, int64, shape (n,)."""
        return NextToken(self.tokens[rows], batch_size=self.batch_size)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return "loss" (mean, nat per token) and "error" (share of tokens) in eval mode; training flags are kept."""
        return self._scores(model).means

    @torch.no_grad()
    def each(self, model: nn.Module) -> dict[str, Tensor]:
        """Return "loss" (nat per token) and "error" (share) of every sequence, float64, shape (sequences,)."""
        found = self._scores(model).each
        return {name: values.view(len(self.tokens), -1).mean(1) for name, values in found.items()}

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
        """Return a loss to differentiate: over ``batches``, its mean is the mean cross-entropy of a token (nat)."""
        tokens, share = batch
        logits = logits_of(run_model(model, tokens))[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten().to(logits.device), reduction="sum") * share

    def batches(self, rows: int | None = None) -> list[tuple[Tensor, float]]:
        """Return the first sequences, all by default, as batches for ``loss_of``: tokens, batches / predicted."""
        parts = torch.split(self.tokens[:rows], self.batch_size)
        share = len(parts) / self.tokens[:rows, 1:].numel()
        return [(part, share) for part in parts]

    def _scores(self, model: nn.Module) -> _RowScores:
        parts = torch.split(self.tokens, self.batch_size)
        with evaluating(model):
            return _RowScores(
                (logits_of(run_model(model, part))[:, :-1].flatten(0, 1), part[:, 1:].flatten()) for part in parts
            )


class _RowScores:
    """Loss and error of every row and their means, in float64, from the logits and targets of each batch."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        loss, losses, wrong = 0.0, [], []
        for logits, targets in batches:
            logits, targets = logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.to(logits.device)
            losses.append(F.cross_entropy(logits, targets, reduction="none").double())
            loss += float(losses[-1].sum())
            # argmax takes NaN for the largest: a row that holds one is wrong
            right = (logits.argmax(-1) == targets) & ~logits.isnan().any(-1)
            wrong.append((~right).double())
        self.each = {"loss": torch.cat(losses).cpu(), "error": torch.cat(wrong).cpu()}
        rows = len(self.each["error"])
        self.means = {"loss": loss / rows, "error": int(self.each["error"].sum()) / rows}


def logits_of(output: Any) -> Tensor:
    """Return the logits of what a model returned: a tensor, something with ``logits``, or a tuple starting with one."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(found, tuple | list) and found:
        return logits_of(found[0])
    if not isinstance(found, Tensor):
        got, why = type(output).__name__, "loss and error are read from logits"
        raise UserError("model output", got=got, why=why, do="return a tensor, or write an evaluate of your own")
    return found


def run_evaluate(evaluate: Evaluate, model: nn.Module) -> dict[str, float]:
    """Evaluate without gradients; refuse all but numbers by name."""
    with torch.no_grad():
        found = evaluate(model)
    why, do = "it must say what it measured", 'return numbers by name, such as {"loss": 0.3, "error": 0.1}'
    require(isinstance(found, Mapping) and len(found) > 0, "evaluate", _describe(found), why, do)
    return {str(name): _as_float(str(name), value) for name, value in found.items()}


def require_same_metrics(found: Mapping[str, float], first: Mapping[str, float]) -> None:
    """Refuse metrics that come back for some models only."""
    if odd := sorted(found.keys() ^ first.keys()):
        why, do = "a curve needs the same numbers everywhere", "return the same names for every model"
        raise UserError("evaluate", got=f"{odd[0]!r} at some points only", why=why, do=do)


def _as_float(name: str, value: Any) -> float:
    scalar = getattr(value, "shape", ()) == () and not isinstance(value, str | bytes | bool)
    try:
        if scalar:
            return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        pass
    why, do = "a curve is made of real numbers", "return floats, or tensors of shape ()"
    raise UserError(f"evaluate: {name!r}", got=_describe(value), why=why, do=do)


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else f" {value!r:.60}")


def check_evaluate(evaluate: Evaluate, model: nn.Module) -> dict[str, float]:
    """Evaluate at θ, twice; refuse numbers that differ in a bit or are not finite, and any change of the model."""
    # Digests, not copies: they see a change of a single bit and take no memory
    before = state_digests(model)
    first = run_evaluate(evaluate, model)
    after = state_digests(model)
    if changed := [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]:
        more = f" and {len(changed) - 1} more changes" if len(changed) > 1 else ""
        do = "evaluate in eval mode, without a training step, and leave the flags alone"
        why = "it must leave the model as it is"
        raise UserError("evaluate", got=f"a change of {changed[0]}{more}", why=why, do=do)
    for name, value in first.items():
        require(
            math.isfinite(value), f"evaluate: {name!r} at λ = 0", value, "rises are counted from there",
            "check the model, its batch-norm calibration rows and the evaluated rows for numbers that are not finite",
        )  # fmt: skip
    again = run_evaluate(evaluate, model)
    # Of both, for a metric may be missing from either
    for name in [*first, *again]:
        require(
            first.get(name) == again.get(name), f"evaluate: {name!r}", f"{first.get(name)} and then {again.get(name)}",
            "the same weights must give the same numbers, or noise passes for a valley",
            "fix the rows and their order, switch dropout and augmentation off, seed what is drawn",
        )  # fmt: skip
    return first

"""Batch-norm statistics along a walk: re-estimated at every point, or stale, or of the evaluated batch itself.

Statistics that belong to θ are wrong for θ + λε: they can turn a curve's flat side into its steep one. So every point
clears them and estimates them anew from the same rows, as stochastic weight averaging and model soups do; this is what
the paper does (its appendix A.3).

A channel that does not vary at all, as in the network of zeros at λ = −1 along the weights themselves, is centred to
zero and divided by √ε: batch norm's own ε, which torch wants positive, is the guard.

Layers that keep no running statistics (LayerNorm, GroupNorm, batch norm without tracking) have nothing to re-estimate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sparing.errors import UserError, require

Statistics = Literal["exact", "cumulative", "stale", "batch"]
"""All calibration rows as one batch; mean over calibration batches; those of θ; those of each evaluated batch."""

Batch = Tensor | Mapping[str, Any] | Sequence[Any]
"""Inputs; keyword arguments of the model; or a pair whose first is one of these, such as (inputs, targets)."""


class Refresher:
    """Keeps the batch norms of one model in step with its parameters."""

    def __init__(self, model: nn.Module, calibrate: Iterable[Batch] | None, statistics: Statistics = "exact") -> None:
        """Look at the layers and the batches; nothing changes yet.

        Args:
            model: Any module.
            calibrate: Batches of training inputs, never of those that are evaluated; iterated anew at every point, so
                a list or a loader that does not shuffle. Not needed without batch norm, nor for "stale" and "batch".
            statistics: "exact": all rows pass as one batch, whose mean and unbiased variance are the statistics.
                "cumulative": the plain mean over batches of both, which needs less memory and leaves the variance of
                the batches' means out. "stale": none are estimated. "batch": each evaluated batch is normalised by
                itself, so that results depend on how rows are batched.

        Raises:
            UserError: If batches are needed and missing, can be iterated once only, or cannot be joined.
        """
        choices = get_args(Statistics)
        require(statistics in choices, "statistics", repr(statistics), "no such way", f"pass one of {choices}")
        self.model, self.statistics = model, statistics
        self.layers = batch_norms(model)
        self._batches: Iterable[Any] = ()
        if self.layers and statistics in {"exact", "cumulative"}:
            require(
                calibrate is not None, "calibrate", None,
                f"the model has {len(self.layers)} batch norms, whose statistics must follow the weights",
                'pass batches of training inputs, or statistics="stale" to see what goes wrong without',
            )  # fmt: skip
            assert calibrate is not None
            require(
                not isinstance(calibrate, Tensor | Mapping), "calibrate", type(calibrate).__name__,
                "it is a sequence of batches", "pass a list: [inputs]",
            )  # fmt: skip
            require(
                iter(calibrate) is not calibrate, "calibrate", type(calibrate).__name__,
                "it can be iterated once, and every point needs it", "pass a list or a loader",
            )  # fmt: skip
            self._batches = [joined([_inputs(batch) for batch in calibrate])] if statistics == "exact" else calibrate

    @contextlib.contextmanager
    def at_point(self) -> Iterator[None]:
        """Make the statistics right for the present parameters, for the length of a block.

        Yields:
            Nothing; inside, the model can be evaluated in eval mode.
        """
        if self.statistics == "batch":
            with _without_running_statistics(self.layers):
                yield
            return
        if self.layers and self.statistics != "stale":
            estimate_(self.model, self.layers, self._batches)
        yield


def batch_norms(model: nn.Module) -> list[_NormBase]:
    """Return the layers that normalise by running statistics.

    Args:
        model: Any module.

    Returns:
        Batch norms and instance norms that track, each once, in order of registration.
    """
    return [one for one in model.modules() if isinstance(one, _NormBase) and one.running_mean is not None]


def refresh_(model: nn.Module, calibrate: Iterable[Batch], statistics: Statistics = "exact") -> None:
    """Re-estimate a model's batch-norm statistics for good, after its weights were averaged or merged.

    Training flags and momenta stay as they were, and so does torch's random state; ``num_batches_tracked`` becomes the
    number of batches.

    Args:
        model: Any module; without batch norm nothing happens.
        calibrate: As in ``Refresher``.
        statistics: "exact" or "cumulative".

    Raises:
        UserError: As ``Refresher``.
    """
    refresher = Refresher(model, calibrate, statistics)
    with refresher.at_point():
        pass


@torch.no_grad()
def estimate_(model: nn.Module, layers: Sequence[_NormBase], batches: Iterable[Batch]) -> None:
    """Clear the statistics of these layers and estimate them from some batches, dropout off.

    Args:
        model: The model.
        layers: Its batch norms.
        batches: Batches of inputs; the statistics become the plain mean over them of mean and unbiased variance.

    Raises:
        UserError: If there is no batch, or one is too small for a variance.
        ValueError: Whatever else the model refuses.
    """
    momenta = [layer.momentum for layer in layers]
    flags = [(module, module.training) for module in model.modules()]
    count = 0
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the cumulative mean
            layer.training = True  # not train(): a subclass may hold children that must stay in eval mode
        for batch in batches:
            count += 1
            call(model, _inputs(batch))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        why, do = "a variance needs two values a channel", "pass batches of at least two rows"
        raise UserError("calibrate", got=str(error), why=why, do=do) from error
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, flag in flags:
            module.training = flag
    require(count > 0, "calibrate", "no batch", "statistics need rows", "pass at least one batch")


@contextlib.contextmanager
def _without_running_statistics(layers: Sequence[_NormBase]) -> Iterator[None]:
    """Take running statistics away: batch norm then uses the batch, whatever its training flag says."""
    held = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer, _, _ in held:
            layer._buffers["running_mean"] = layer._buffers["running_var"] = None
        yield
    finally:
        for layer, mean, variance in held:
            layer._buffers["running_mean"], layer._buffers["running_var"] = mean, variance


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on inputs, moved to where its parameters are.

    Args:
        model: Any module.
        inputs: A tensor, or keyword arguments.

    Returns:
        What the model returns.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    if isinstance(inputs, Mapping):
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        return model(**moved)
    return model(inputs.to(device))


def _inputs(batch: Batch) -> Tensor | Mapping[str, Any]:
    """The inputs of a batch, without its targets."""
    found = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(found, Tensor | Mapping):
        raise UserError(
            "calibrate", got=f"a batch of {type(batch).__name__}", why="a model takes a tensor or keyword arguments",
            do="pass tensors, mappings, or pairs of inputs and targets",
        )  # fmt: skip
    return found


def joined(batches: Sequence[Tensor | Mapping[str, Any]]) -> Tensor | dict[str, Any]:
    """Join batches of inputs into one.

    Args:
        batches: Tensors of one shape but for the rows, or mappings of such.

    Returns:
        All rows as one batch. What is no tensor is that of the first batch.

    Raises:
        UserError: If there is none, or they do not fit.
    """
    require(len(batches) > 0, "calibrate", "no batch", "statistics need rows", "pass at least one batch")
    first = batches[0]
    try:
        if isinstance(first, Tensor):
            return first if len(batches) == 1 else torch.cat([one for one in batches if isinstance(one, Tensor)])
        rows = [one for one in batches if isinstance(one, Mapping)]
        return {
            name: torch.cat([one[name] for one in rows]) if isinstance(value, Tensor) and value.ndim else value
            for name, value in first.items()
        }
    except (RuntimeError, KeyError) as error:
        why, do = "one exact pass needs batches of one shape", 'pad them alike, or pass statistics="cumulative"'
        raise UserError("calibrate", got=str(error), why=why, do=do) from error

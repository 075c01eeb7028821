"""Batch-norm statistics at every point: re-estimated, or stale, or those of the evaluated batch itself.

The statistics of θ are wrong for θ + λε: they can turn a curve's flat side into its steep one. So every point clears
them and re-estimates them from the same rows, as stochastic weight averaging, model soups and the paper do (appendix
A.3). A channel that does not vary at all, as at λ = −1 along the weights themselves, is divided by batch norm's own √ε.
Layers without running statistics (LayerNorm, GroupNorm, batch norm without tracking) have nothing to re-estimate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sparing.blocks.modes import estimating
from sparing.errors import UserError, require

# all calibration rows as one batch; mean over calibration batches; those of θ; those of each evaluated batch
Statistics = Literal["exact", "cumulative", "stale", "batch"]

# inputs; keyword arguments of the model; or a pair whose first is one of these, such as (inputs, targets)
Batch = Tensor | Mapping[str, Any] | Sequence[Any]


class Refresher:
    """Keeps the batch norms of one model in step with its parameters.

    ``calibrate`` holds batches of training inputs, never the evaluated rows; it is iterated at every point. "exact"
    takes mean and unbiased variance of all rows as one batch; "cumulative" averages both over batches, which needs
    less memory and misses the variance of the batches' means; with "batch", results depend on how rows are batched.
    """

    def __init__(self, model: nn.Module, calibrate: Iterable[Batch] | None, statistics: Statistics = "exact") -> None:
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
            got, single = type(calibrate).__name__, isinstance(calibrate, Tensor | Mapping)
            require(not single, "calibrate", got, "it is a sequence of batches", "pass a list: [inputs]")
            # An iterator, unlike a list or a loader, is its own iter() and is used up at the first point
            why, do = "it can be iterated once, and every point needs it", "pass a list or a loader"
            require(iter(calibrate) is not calibrate, "calibrate", got, why, do)
            exact = statistics == "exact"
            self._batches = [concat_batches([_inputs_of(one) for one in calibrate])] if exact else calibrate

    @property
    def rows(self) -> int:
        """Calibration rows that are run at every point (count)."""
        return sum(_count(_inputs_of(batch)) for batch in self._batches)

    @contextlib.contextmanager
    def at_point(self) -> Iterator[None]:
        """Within a block, make the statistics those of the current parameters; evaluate in eval mode."""
        if self.statistics == "batch":
            with _batch_statistics_only(self.layers):
                yield
            return
        if self.layers and self.statistics != "stale":
            estimate_(self.model, self.layers, self._batches)
        yield


def batch_norms(model: nn.Module) -> list[_NormBase]:
    """Return the layers that normalize by running statistics, in order of registration."""
    return [one for one in model.modules() if isinstance(one, _NormBase) and one.running_mean is not None]


def refresh_(model: nn.Module, calibrate: Iterable[Batch], statistics: Statistics = "exact") -> None:
    """Re-estimate a model's batch-norm statistics in place, after its weights were averaged or merged.

    Training flags, momenta and torch's random state are kept; ``num_batches_tracked`` becomes the number of batches.
    """
    with Refresher(model, calibrate, statistics).at_point():
        pass


@torch.no_grad()
def estimate_(model: nn.Module, layers: Sequence[_NormBase], batches: Iterable[Batch]) -> None:
    """Set the statistics of these layers to the plain mean over batches of mean and unbiased variance, dropout off."""
    count = 0
    try:
        with estimating(model, layers):
            for batch in batches:
                count += 1
                run_model(model, _inputs_of(batch))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        why, do = "a variance needs two values a channel", "pass batches of at least two rows"
        raise UserError("calibrate", got=str(error), why=why, do=do) from error
    require(count > 0, "calibrate", "no batch", "statistics need rows", "pass at least one batch")


@contextlib.contextmanager
def _batch_statistics_only(layers: Sequence[_NormBase]) -> Iterator[None]:
    """Remove running statistics: norms then use those of the batch, in eval mode too."""
    held = [(layer, layer.running_mean, layer.running_var, layer.track_running_stats) for layer in layers]
    try:
        for layer, *_ in held:
            layer._buffers["running_mean"] = layer._buffers["running_var"] = None
            layer.track_running_stats = False  # by which instance norm decides
        yield
    finally:
        for layer, mean, variance, tracks in held:
            layer._buffers["running_mean"], layer._buffers["running_var"] = mean, variance
            layer.track_running_stats = tracks


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model on inputs (or keyword arguments), moved to the device of its parameters."""
    device = next((parameter.device for parameter in model.parameters()), None)
    if isinstance(inputs, Mapping):
        return model(**{name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()})
    return model(inputs.to(device))


def _inputs_of(batch: Batch) -> Tensor | Mapping[str, Any]:
    """The inputs of a batch, without its targets."""
    found = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(found, Tensor | Mapping):
        raise UserError(
            "calibrate", got=f"a batch of {type(batch).__name__}", why="a model takes a tensor or keyword arguments",
            do="pass tensors, mappings, or pairs of inputs and targets",
        )  # fmt: skip
    return found


def _count(inputs: Tensor | Mapping[str, Any]) -> int:
    """Rows of a batch of inputs."""
    if isinstance(inputs, Tensor):
        return len(inputs)
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 0)


def concat_batches(batches: Sequence[Tensor | Mapping[str, Any]]) -> Tensor | dict[str, Any]:
    """Concatenate batches of inputs; what is no tensor is taken from the first batch."""
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

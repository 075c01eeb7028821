"""Whether lower or higher is better: known by a metric's name, declared by the caller, or refused; never guessed.

Asymmetry, widths, gaps, barriers, greedy soups and figure titles all say how much worse a model gets. Read the wrong
way round, each says the opposite of what was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from sparing.errors import UserError, require

Better = Literal["lower", "higher"]
"""Where the good values of a metric are."""

SHARES: Final = frozenset({"error", "accuracy"})  # metrics that are shares of rows by their name, in [0, 1]

_KNOWN: Final[Mapping[Better, frozenset[str]]] = {
    "lower": frozenset({
        "loss", "error", "cross_entropy", "crossentropy", "ce", "nll", "perplexity", "ppl", "bpb", "bits_per_byte",
        "mse", "rmse", "mae", "error_rate", "wer", "cer", "brier", "ece", "negative_log_likelihood",
        "mean_squared_error", "mean_absolute_error", "log_loss", "brier_score",
    }),
    "higher": frozenset({
        "accuracy", "acc", "balanced_accuracy", "top1", "top5", "f1", "precision", "recall", "auc", "auroc", "roc_auc",
        "bleu", "rouge", "rouge1", "rouge2", "rougel", "exact_match", "iou", "dice", "psnr", "ssim", "r2",
        "log_likelihood", "accuracy_score", "f1_macro", "macro_f1", "f1_micro", "micro_f1", "f1_weighted",
        "weighted_f1", "f1_score", "roc_auc_score", "auc_roc", "pr_auc", "average_precision", "map", "miou", "mean_iou",
        "spearman", "spearmanr", "pearson", "pearsonr", "mcc", "matthews_correlation", "r2_score",
    }),
}  # fmt: skip
T = TypeVar("T")
S = TypeVar("S")
N = TypeVar("N", float, NDArray[np.float64])
_SPLIT_PREFIX = re.compile(r"^(?:train|val|valid|validation|test|eval|dev)[_/]")
# metrics of the first k answers, which all rise: top-1, acc@5, top5_acc, recall@10
_TOP_K = re.compile(r"(?:top|acc|accuracy|precision|recall|ndcg|map)_?\d+(?:_acc|_accuracy)?")


class ByMetric(dict[str, T]):
    """Results by metric that depend on which way is better; looking up a metric where that is unknown is refused."""

    def __missing__(self, name: str) -> T:
        """Refuse a metric of unknown direction."""
        raise UserError(
            f"metric {name!r}", got="a name that does not tell whether lower or higher is better",
            why="asymmetry, barriers, soups and titles are of how much worse a model gets",
            do=f'pass better={{{name!r}: "higher"}} or "lower", or set it on the function: evaluate.better = {{...}}',
        )  # fmt: skip

    def map(self, make: Callable[[str], S]) -> ByMetric[S]:
        """Compute something for every known metric; the others stay refused."""
        return ByMetric({name: make(name) for name in self})


def better_by_metric(metrics: Iterable[str], declared: Mapping[str, Better] | None = None) -> ByMetric[Better]:
    """Say for each metric whether lower or higher is better; what the caller declares outranks the name.

    Example:
        >>> better_by_metric(["val_Accuracy", "margin", "norm"], {"margin": "higher"})
        {'val_Accuracy': 'higher', 'margin': 'higher'}
    """
    names, given = list(metrics), dict(declared or {})
    for name, way in given.items():
        why, do = f"measured were {', '.join(names)}", "name metrics that evaluate returns"
        require(name in names, "better", repr(name), why, do)
        do = 'pass "lower" or "higher"'
        require(way in get_args(Better), f"better[{name!r}]", repr(way), "a metric gets better one way", do)
    found = {name: given.get(name) or _better_by_name(name) for name in names}
    return ByMetric({name: way for name, way in found.items() if way is not None})


def _better_by_name(name: str) -> Better | None:
    plain = _SPLIT_PREFIX.sub("", re.sub(r"(?<=.)[-@ ]", "_", name.lower()))  # not a leading minus: it flips the metric
    if _TOP_K.fullmatch(plain):
        return "higher"
    return next((way for way, known in _KNOWN.items() if plain in known), None)


def declared_better(evaluate: object, better: Mapping[str, Better] | None) -> Mapping[str, Better] | None:
    """Return what the caller declares: the argument, or else the attribute ``better`` of ``evaluate``."""
    found: Any = getattr(evaluate, "better", None) if better is None else better
    holds = found is None or isinstance(found, Mapping)
    require(holds, "better", type(found).__name__, "it says of each metric by name", 'pass {"accuracy": "higher"}')
    return found  # type: ignore[no-any-return]


def as_cost(value: N, way: Better) -> N:
    """Return the value, or its negative where higher is better: lower is then better."""
    return -value if way == "higher" else value

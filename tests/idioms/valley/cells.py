"""What users do with valleys and merges, and what they get: equal to an independent answer, or refused."""

from __future__ import annotations

from idioms.table import Cell

METRICS = {
    "error, falls": ("error", None, "lower"), "loss, falls": ("loss", None, "lower"),
    "accuracy, rises": ("accuracy", None, "higher"), "val_accuracy, rises": ("val_accuracy", None, "higher"),
    "F1, rises": ("F1", None, "higher"), "Top-1, rises": ("Top-1", None, "higher"),
    "acc@1, rises": ("val/acc@1", None, "higher"), "margin, said to rise": ("margin", {"margin": "higher"}, "higher"),
    "margin, said to fall": ("margin", {"margin": "lower"}, "lower"),
    "accuracy, said to fall": ("accuracy", {"accuracy": "lower"}, "lower"),
    "margin, of which nobody says": ("margin", None, None),
}  # fmt: skip
"""Subject -> name of the metric, what the caller says, which way it gets better."""

SUMMARIES = (
    "asymmetry index", "interval of the index", "rise of both sides", "half-widths", "odd and even parts", "log ratio",
    "title of a curve", "not a minimum", "gap of an average", "barrier", "title of a line", "greedy soup",
    "steering",
)  # fmt: skip
"""Numbers and words that say which model, or which side, is better."""

PAGES = ("scan page", "scan panels")
PAGE_METRICS = ("accuracy, rises", "margin, said to rise", "margin, of which nobody says")

MEASURES = {
    "float": "equal", "int": "equal", "tensor": "equal", "tensor that needs a gradient": "equal",
    "NumPy number": "equal", "infinite far out": "equal", "NaN far out": "equal", "draws at random": "refused",
    "changes a weight": "refused", "changes a buffer": "refused", "leaves training mode on": "refused",
    "raises": "refused", "NaN at the model": "refused", "infinite at the model": "refused",
    "a name at some points only": "refused", "text": "refused", "a truth value": "refused", "a vector": "refused",
    "nothing": "refused", "a complex number": "refused", "accuracy in per cent": "refused",
}  # fmt: skip
"""What ``evaluate`` does -> the outcome of a scan with it."""

STATES = {
    "float64": "equal", "float32": "equal", "bfloat16": "equal", "bfloat16 beside float32": "equal",
    "training mode": "equal", "frozen in part": "equal", "tied weights": "equal", "other order of names": "equal",
    "one model twice": "equal", "base equal to a parent": "equal", "batch norm and counters": "equal",
    "other names": "refused", "other shapes": "refused", "an extra key": "refused", "NaN in a weight": "refused",
    "masks that differ": "refused", "pruned by torch, masks that differ": "refused", "LoRA factors": "refused",
    "complex weights": "refused", "8-bit weights": "refused", "an entry that is no tensor": "refused",
    "another activation": "refused",
}  # fmt: skip
"""Models -> the outcome of averaging them."""

LINES = {
    "float32 states in a bfloat16 model": "refused", "untied state in a tied model": "refused",
    "batch norm without calibration": "refused", "states alone": "refused", "tied models": "equal",
    "models in training mode": "equal", "another activation": "refused", "another epsilon": "refused",
    "another buffer outside the state": "refused", "other settings of transformers": "refused",
    "another dropout": "equal", "another stochastic depth": "equal", "another momentum of batch norm": "equal",
    "another dropout of an LSTM": "equal", "activation in place in one": "equal", "dropout in one, identity": "equal",
    "another padding row of an embedding": "equal", "another end of text": "equal",
    "another norm of a pooling": "refused",
}  # fmt: skip
"""Pairs -> the outcome of interpolating them."""

FOLDERS = {
    "layer_norm_epsilon": "refused", "rope base": "refused", "number of heads": "refused", "activation": "refused",
    "tied in one": "refused", "tokens in another order": "refused", "another token under a number": "refused",
    "merges in another order": "refused", "another normaliser": "refused", "another image mean": "refused",
    "labels in another order": "refused", "broken config.json": "refused", "broken tokenizer.json": "refused",
    "dropout": "equal", "chat template": "equal", "one more token": "equal", "pad token set in one": "equal",
    "generation settings": "equal", "tokenizer in one alone": "equal", "version of transformers": "equal",
    "end of a text": "equal", "padding of a rotary model": "equal", "marks of trainers": "equal",
    "home of its code": "equal", "a setting that nobody reads": "equal", "longest text, rotary": "equal",
    "longest text, rotary in steps of Llama 3": "equal", "longest text, dynamic rotary": "refused",
    "longest text, YaRN": "refused", "windows that are off": "equal", "a setting that masks read": "refused",
    "F32 models, BF16 base": "equal", "BF16 model before an F32 one": "equal", "F32 beside BF16 in one file": "equal",
}  # fmt: skip
"""How two folders differ -> the outcome of merging them; equal: the mean, in the dtype that its config.json names."""

SIGNS = {"zeros": "equal", "negative zeros": "equal", "NaN": "refused", "all zero": "equal", "bfloat16": "equal"}
"""Weights -> the outcome of comparing their signs."""

SETTINGS = {
    "floor for a metric that is not there": "refused", "direction for a metric that is not there": "refused",
    "a direction that is no direction": "refused", "a negative floor": "refused", "a zero direction": "refused",
    "masked weights": "equal", "frozen weights": "equal", "an exception on the way": "equal",
}  # fmt: skip
"""What else is asked of a scan -> its outcome."""


def _outcome(subject: str) -> str:
    return "equal" if METRICS[subject][2] else "refused"


def _cells(idiom: str, outcomes: dict[str, str]) -> list[Cell]:
    return [Cell(idiom, subject, outcome) for subject, outcome in outcomes.items()]  # type: ignore[arg-type]


CELLS: tuple[Cell, ...] = (
    *(Cell(summary, subject, _outcome(subject)) for summary in SUMMARIES for subject in METRICS),  # type: ignore[arg-type]
    *(Cell(page, subject, _outcome(subject)) for page in PAGES for subject in PAGE_METRICS),  # type: ignore[arg-type]
    *_cells("scan with a measure that returns or does", MEASURES),
    *_cells("average models", STATES),
    *_cells("interpolate", LINES),
    *_cells("merge folders that differ in", FOLDERS),
    *_cells("compare signs of weights with", SIGNS),
    *_cells("scan with", SETTINGS),
)

"""What a person may choose about a merge, checked before anything is opened."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from tyro.conf import Positional, UseAppendAction, arg

from sparing.errors import require
from sparing.jobs import hub
from sparing.jobs.hub import OnHub
from sparing.jobs.limits import AtLeast, Count, Group, Length, Share, ShareAboveZero, ShareBelowOne, Size
from sparing.jobs.settings import Evaluated, FromHub, Resumable, Seeded

How = Literal[
    "auto", "soup", "greedy", "linear", "slerp", "nuslerp", "multislerp", "karcher", "task", "ties", "dare",
    "dare-ties", "breadcrumbs", "breadcrumbs-ties", "della", "della-linear", "sce", "model-stock", "sign-aware",
    "fisher", "regmean",
]  # fmt: skip

# Ways that add up, or elect, what each model changed of a common ancestor: they have a factor λ.
SCALED: Final = (
    "task", "ties", "dare", "dare-ties", "breadcrumbs", "breadcrumbs-ties", "della", "della-linear", "sce",
    "sign-aware",
)  # fmt: skip

# Ways that need the common ancestor.
FROM_BASE: Final = (*SCALED, "model-stock")

# Ways that measure on rows what they weigh models by.
MEASURED: Final = ("fisher", "regmean")

# Ways that have a weight for each model.
WEIGHTED: Final = ("linear", "fisher", "nuslerp", "multislerp", "karcher", *(how for how in SCALED if how != "sce"))

# Methods with nothing to search, or whose statistics would have to be measured anew for every trial.
CLOSED: Final = ("soup", "greedy", "model-stock", "fisher", "regmean")

# Ways that add changes up: a weight below 0 unlearns a task.
_ADDED: Final = ("task", "dare", "breadcrumbs", "della-linear")

Across = Literal["tensor", "rows", "columns"]


@dataclass(frozen=True, kw_only=True)
class Slerp(Group, name="slerp", flag="method", choices=("slerp", "nuslerp")):
    """Settings of slerp, used by `--method slerp` and, but for t, `nuslerp`."""

    t: Share = 0.5
    """Place on the arc from the first model (0) to the second (1)."""

    across: Across = "tensor"
    """What is turned as one vector: each tensor, each of its rows, or each of its columns."""


@dataclass(frozen=True, kw_only=True)
class ModelStock(Group, name="model_stock", flag="method", choices=("model-stock",)):
    """Settings of model stock, used by `--method model-stock`."""

    across: Across = "tensor"
    """What has an angle of its own: each tensor, each of its rows, or each of its columns."""


@dataclass(frozen=True, kw_only=True)
class Ties(Group, name="ties", flag="method", choices=("auto", "ties", "sign-aware")):
    """Settings of ties, used by `--method ties`, `sign-aware` and `auto`."""

    keep: ShareAboveZero = 0.2
    """Share of the largest changes that it keeps of each model, k."""


@dataclass(frozen=True, kw_only=True)
class Dare(Group, name="dare", flag="method", choices=("dare", "dare-ties")):
    """Settings of dare, used by `--method dare` and `dare-ties`."""

    drop: ShareBelowOne = 0.9
    """Share of the changes that it drops at random, p."""


@dataclass(frozen=True, kw_only=True)
class Breadcrumbs(Group, name="breadcrumbs", flag="method", choices=("breadcrumbs", "breadcrumbs-ties")):
    """Settings of breadcrumbs, used by `--method breadcrumbs` and `breadcrumbs-ties`."""

    keep: ShareAboveZero = 0.9
    """Share of the changes that it keeps of each model, between the smallest and the largest."""

    outliers: ShareBelowOne = 0.01
    """Share of the largest changes that it drops of each model, γ."""


@dataclass(frozen=True, kw_only=True)
class Della(Group, name="della", flag="method", choices=("della", "della-linear")):
    """Settings of della, used by `--method della` and `della-linear`."""

    drop: ShareBelowOne = 0.7
    """Share of the changes that it drops, small ones more often than large ones, p."""

    spread: ShareBelowOne = 0.15
    """How far the probabilities lie above and below that share, ε."""

    def __post_init__(self) -> None:
        """Refuse probabilities outside 0 to 1."""
        super().__post_init__()
        fine = self.drop == 0 or 0 < self.drop - self.spread <= self.drop + self.spread < 1
        got = f"{self.spread} with --della.drop {self.drop:g}"
        require(fine, "della.spread", got, "drop ± spread are probabilities", "pass a smaller one")


@dataclass(frozen=True, kw_only=True)
class Sce(Group, name="sce", flag="method", choices=("sce",)):
    """Settings of sce, used by `--method sce`."""

    keep: ShareAboveZero = 1.0
    """Share of the elements that it keeps: those in which the models differ most, τ."""


@dataclass(frozen=True, kw_only=True)
class Regmean(Group, name="regmean", flag="method", choices=("regmean",)):
    """Settings of RegMean, used by `--method regmean`."""

    shrink: Share = 0.9
    """Factor of products of different inputs, α: at 1 least squares, at 0 each input by itself."""


@dataclass(frozen=True, kw_only=True)
class Settings(Resumable, Evaluated, Seeded, FromHub):
    """Predict whether models can be merged, merge them, and measure what the merge loses.

    First comes the prediction, from the weights alone. Then the merge, read and written tensor by tensor, so that
    models larger than the memory can be merged. Then, with `--data`, the loss and error of every parent and of the
    merge, one model in memory at a time. With `--method auto` a merge that is predicted to fail, or that loses on the
    validation rows, is not made: the page says why and what to do, and the exit status is 0. OUT gets model/ (or
    model.safetensors), report.html and record.jsonl.
    """

    models: Annotated[Positional[tuple[Path, ...]], arg(metavar="MODEL"), OnHub("model")]
    """Two or more checkpoints of one architecture: folders of save_pretrained, names on the Hugging Face hub
    (OWNER/NAME), or .safetensors files of weights. Or one
    recipe of mergekit's, a .yml file, which is carried out as it is."""

    base: Annotated[Path | None, OnHub("model")] = None
    """The model that all of them were fine-tuned from. Methods that merge changes need it, nuslerp and multislerp turn
    changes where it is given, and the prediction is better with it; none: unknown."""

    method: How = "auto"
    """auto chooses by the prediction and, with `--data`, by the validation rows. soup: the mean. greedy: the mean of
    those models that help on validation rows. linear: a weighted mean. slerp, nuslerp: two models along an arc;
    multislerp, karcher: means of several on a sphere. task: base + factor · sum of the changes; dare, breadcrumbs,
    della-linear: the same after dropping some of them. ties, dare-ties, breadcrumbs-ties, della, sce, sign-aware: after
    resolving conflicts of sign between them. model-stock: between the base and the mean, by the angle of the changes.
    fisher: each weight by the squared gradients of its model on validation rows. regmean: linear layers by least
    squares on the inputs that they get there. Each is as its paper has it; a recipe does as mergekit."""

    model_weights: tuple[float, ...] | None = None
    """Weight of each model, in order, for methods that have one; below 0, where changes are added up, a task is
    unlearned; none: equal."""

    data: UseAppendAction[tuple[str, ...]] = ()
    """Rows to measure on: a .txt or .jsonl file, or a text that `sparing fetch` lists, for language models, of which
    encoders fill in masked tokens, and those of two parts read the first half of a row, or prompts of a .jsonl file;
    mnist, fashion-mnist, cifar10 or digits for image classifiers; none: nothing is measured. Given several times,
    each text is a task with as many rows as the others and a table of its own; fisher and regmean measure each model
    on its own text, in order, where there are as many."""

    align: Literal["weights", "activations"] | None = None
    """Bring the units of all models into the order of the first before merging, for models that were trained from
    different starts: by their weights, or by what the units answer to the validation rows, which mostly fits better;
    none: as they are. Holds two models in memory, and needs `--data`."""

    entry: str | None = None
    """Entry point `module:function` that builds the model of a .safetensors file, to measure it; none: folders."""

    slerp: Slerp = field(default_factory=Slerp)
    model_stock: ModelStock = field(default_factory=ModelStock)
    ties: Ties = field(default_factory=Ties)
    dare: Dare = field(default_factory=Dare)
    breadcrumbs: Breadcrumbs = field(default_factory=Breadcrumbs)
    della: Della = field(default_factory=Della)
    sce: Sce = field(default_factory=Sce)
    regmean: Regmean = field(default_factory=Regmean)

    factor: Size | None = None
    """Factor on the merged change, λ; none: the best of a few on the validation rows, without data 0.4 where changes
    are added up and 1 where signs are elected, as Yadav et al. 2023 take without validation rows."""

    search: Count | None = None
    """Trials of a search for the weights of the models, λ and the method's own settings, by the loss on the validation
    rows (count), beside the fixed ones: of the named method, or with auto of linear, slerp, task, ties and sign-aware.
    Needs `--data`; none: only the fixed ones."""

    rows: Count = 256

    points: Annotated[int, AtLeast(3, "both ends and the middle are measured")] = 11
    """Points of a curve (count, odd): places on the way from the first model to the second that are measured."""

    length: Length | None = None
    """Tokens per row (count), for a language model; none: 128, or fewer if the model has fewer positions."""

    out: Path = Path("runs/merge")

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict."""
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        super().__post_init__()
        once = len(set(self.data)) == len(self.data)
        require(once, "data", " ".join(self.data), "a text stands there twice", "pass each once")
        if self.recipe is not None:
            self._check_recipe()
            return
        several = len(self.models) >= 2
        require(several, "models", len(self.models), "a merge takes two or more", "name another checkpoint")
        require(self.points % 2 == 1, "points", self.points, "the middle must be one of them", "pass an odd number")
        self._check_method()
        self._check_weights()
        self._check_alignment()
        self._check_search()

    @property
    def recipe(self) -> Path | None:
        """The recipe where one is named in place of models."""
        recipes = [path for path in self.models if path.suffix in {".yml", ".yaml"}]
        alone = not recipes or len(self.models) == 1
        why = "a recipe names its models itself"
        require(alone, "models", f"{recipes[:1]} beside others", why, "pass it alone")
        return recipes[0] if recipes else None

    def _check_recipe(self) -> None:
        """What would be ignored beside a recipe."""
        given: dict[str, object] = {name: getattr(self, name) for name in ("base", "data", "entry", "factor", "align")}
        given |= {
            "search": self.search,
            "method": None if self.method == "auto" else self.method,
            "model-weights": self.model_weights,
        }
        for name, value in given.items():
            why = "a recipe says it itself, and nothing is measured"
            require(value in {None, ()}, name, f"{value} beside a recipe", why, f"omit --{name}")

    def _check_method(self) -> None:
        """What a way of merging needs beside the models."""
        based = self.method not in FROM_BASE or self.base is not None
        why = f"{self.method} merges what the models changed of a common ancestor"
        require(based, "base", "none", why, "pass --base, or --method soup")
        why = "greedy adds models while validation rows like it"
        why = f"{self.method} weighs models by what it measures on validation rows" if self.method in MEASURED else why
        require(self.method not in {"greedy", *MEASURED} or bool(self.data), "data", "none", why, "pass --data")
        scaled = self.factor is None or self.method in SCALED
        why = "only methods that merge changes have one"
        require(scaled, "factor", f"{self.factor} with --method {self.method}", why, "omit it, or pass --method task")
        two = self.method not in {"slerp", "nuslerp"} or len(self.models) == 2
        why = f"{self.method} goes from one model to another"
        require(two, "models", len(self.models), why, "name two, or pass --method multislerp")
        files = all(path.suffix == ".safetensors" for path in self.models)
        fits = self.entry is None or files
        require(fits, "entry", self.entry, "a folder says itself what its model is", "omit --entry")
        known = not self.data or not files or self.entry is not None
        do = "pass --entry module:function, which builds the model"
        require(known, "data", " ".join(self.data), "weights alone are no model that could be measured", do)

    def _check_alignment(self) -> None:
        """What reordering needs, and what it would break."""
        if self.align is None:
            return
        do = "pass --data, and for .safetensors files --entry"
        require(bool(self.data), "data", "none", "units are reordered by a forward pass on rows", do)
        why = "models of one ancestor have their units in one order already"
        require(self.base is None, "align", f"{self.align} with --base", why, "omit --align, or the base")

    def _check_search(self) -> None:
        """What a search needs, and what it would have to ignore."""
        if self.search is None:
            return
        require(bool(self.data), "data", "none", "a search chooses by validation rows", "pass --data")
        closed = self.method in CLOSED
        do = "omit --search, or name a method such as linear"
        require(not closed, "search", f"{self.search} with --method {self.method}", "it has nothing to search", do)
        why = "they are what is searched"
        require(self.model_weights is None, "model_weights", "some with --search", why, "omit them, or --search")
        require(self.factor is None, "factor", f"{self.factor} with --search", "λ is searched", "omit it, or --search")

    def _check_weights(self) -> None:
        """One for each model, for methods that have them."""
        weights, got = self.model_weights, f"--method {self.method}"
        do = "pass --model-weights W1 W2 …, or --method soup"
        given = weights is not None or self.method != "linear" or self.search is not None
        require(given, "model_weights", "none", "linear is a weighted mean", do)
        if weights is None:
            return
        why, do = f"it has no weights; {', '.join(WEIGHTED)} do", "omit --model-weights, or name one of them"
        require(self.method in WEIGHTED, "model_weights", f"some with {got}", why, do)
        fits = len(weights) == len(self.models)
        do = "pass one for each"
        require(fits, "model_weights", len(weights), f"there are {len(self.models)} models", do)
        least = -math.inf if self.method in _ADDED else 0.0
        sound = all(math.isfinite(weight) and weight >= least for weight in weights)
        sound = sound and (least < 0 or sum(weights) > 0)
        shown = " ".join(map(str, weights))
        do = "pass numbers of 0 or more, of which one is above 0" if least == 0 else "pass finite numbers"
        require(sound, "model_weights", shown, f"{self.method} cannot merge by them", do)

    @property
    def labels(self) -> tuple[str, ...]:
        """What the models are called on terminal and page: A, B, C … with their names."""
        return tuple(f"{letter(at)} ({named(path)})" for at, path in enumerate(self.models))


def letter(at: int) -> str:
    """The letter of a model by its index: A to Z, then A2, B2 and so on.

    Example:
        >>> letter(1), letter(26)
        ('B', 'A2')
    """
    return chr(ord("A") + at % 26) + (str(at // 26 + 1) if at >= 26 else "")


def named(path: Path) -> str:
    """The name of a checkpoint: of the run, where it is the folder ``model`` of one."""
    if hub.name_of(path) is not None:
        return hub.title(path)
    return path.resolve().parent.name if path.name == "model" else path.resolve().name

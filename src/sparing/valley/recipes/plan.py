"""The tensors of a recipe's result: for each its name, the tensors it is merged of, and how."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.valley.merging.compatible import must_agree, require_averageable
from sparing.valley.merging.files import KINDS, TensorEntry, checked
from sparing.valley.merging.merge import rule_for
from sparing.valley.merging.method import Slices, zip_slices
from sparing.valley.recipes.methods import Choice, Required, choose
from sparing.valley.recipes.parts import ModelParts, Part
from sparing.valley.recipes.recipe import OutputSlice, Recipe, value_at
from sparing.valley.recipes.vocabulary import BY_TOKEN, INPUT_EMBEDDING, Vocabulary, aligned

# A tensor of a layer: what stands before its number, the number, what stands behind
_LAYER: Final = re.compile(r"^(?P<stack>.*?)\.(?P<index>\d+)\.(?P<rest>.+)$")

# Tensors behind the last layer; in a recipe of slices they are those of the last slice
_BEHIND: Final = re.compile(r"(^|\.)(norm|final_layernorm|final_layer_norm|ln_f|lm_head|embed_out|score|classifier)\.")


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of the result."""

    name: str
    inputs: tuple[Part, ...]
    places: tuple[int, ...]  # of the models they are of, among the recipe's
    choice: Choice
    kind: str  # dtype of the result, as safetensors spells it
    vocabulary: Vocabulary | None  # where its rows are tokens that must be brought to one order

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        first = self.inputs[0].shape
        return first if self.vocabulary is None else (self.vocabulary.rows, *first[1:])

    @property
    def entry(self) -> TensorEntry:
        """What the header of a file says of it."""
        return TensorEntry(self.inputs[0].entry.file, self.shape, self.kind, 0)

    def pieces(self, labels: Sequence[str]) -> Iterator[Tensor]:
        """Merge it, in slices of its dtype; ``labels`` are what the models are called where one is refused."""
        floating = KINDS[self.kind].is_floating_point
        pairs = zip(self.inputs, labels, strict=True)
        sources = [checked(part.slices(), self.name, label) for part, label in pairs]
        if self.vocabulary is not None:
            for source in sources:
                collections.deque(source(), maxlen=0)  # rows are picked from it, so all of it is checked first
            order = range(len(self.inputs))
            sources = [aligned(self.vocabulary, at, self.places, self.inputs) for at in order]
        elif must_agree(self.name, floating=floating):
            for parts in zip_slices(sources):
                require_averageable(self.name, parts, labels)
        if floating:
            wide = torch.float64 if any(part.entry.kind == "F64" for part in self.inputs) else torch.float32
            sources = [_cast(source, wide) for source in sources]
        base = None if self.choice.base is None else sources[self.choice.base]
        merging = rule_for(self.choice.method, self.name, floating)
        for piece in merging(self.name, [sources[at] for at in self.choice.models], base):
            yield piece.to(KINDS[self.kind])


def _cast(source: Slices, dtype: torch.dtype) -> Slices:
    return Slices(lambda: (part.to(dtype) for part in source()), source.shape)


def layers_of(model: ModelParts) -> int:
    """Layers of a model (count); refuses one with several stacks of them."""
    found: dict[str, int] = {}
    for name in model.parts:
        if match := _LAYER.match(name):
            found[match["stack"]] = max(found.get(match["stack"], 0), int(match["index"]) + 1)
    why, do = "slices are of the layers of one stack", "name whole models under models:"
    require(len(found) == 1, f"layers of {model.label}", f"{len(found)} stacks", why, do)
    return next(iter(found.values()))


class Planner:
    """Goes through the tensors of the result in order, and gives each its plan."""

    def __init__(self, recipe: Recipe, models: Sequence[ModelParts], vocabulary: Vocabulary | None, seed: int) -> None:
        self.recipe, self.models, self.vocabulary, self.seed = recipe, models, vocabulary, seed
        self.at = {model.label: place for place, model in enumerate(models)}

    def plan(self) -> list[Planned]:
        """All tensors of the result."""
        first, last = self.recipe.slices[0], self.recipe.slices[-1]
        outside = [name for name in self._names(first) if not _LAYER.match(name)]
        behind = [name for name in self._names(last) if not _LAYER.match(name) and _BEHIND.search(f"{name}.")]
        planned = [self._tensor(first, name, name, 0, 0.0) for name in outside if not _BEHIND.search(f"{name}.")]
        planned += self._whole_layers(first) if self.recipe.whole else self._sliced_layers()
        return planned + [self._tensor(last, name, name, 0, 0.0) for name in behind]

    def _whole_layers(self, piece: OutputSlice) -> list[Planned]:
        """Layers of whole models, each at its own place; the depth is counted in its own stack."""
        names = [name for name in self._names(piece) if _LAYER.match(name)]
        deepest: dict[str, int] = {}
        for name in names:
            match = _LAYER.match(name)
            assert match is not None
            deepest[match["stack"]] = max(deepest.get(match["stack"], 0), int(match["index"]))
        planned = []
        for name in names:
            match = _LAYER.match(name)
            assert match is not None
            last = deepest[match["stack"]]
            planned.append(self._tensor(piece, name, name, 0, int(match["index"]) / last if last else 1.0))
        return planned

    def _sliced_layers(self) -> list[Planned]:
        planned, offset = [], 0
        for piece in self.recipe.slices:
            model, (start, end) = self.models[self.at[piece.inputs[0].model]], piece.inputs[0].layers or (0, 0)
            for one in piece.inputs:
                count = layers_of(self.models[self.at[one.model]])
                why, do = f"{one.model} has {count} layers", "mend the range"
                require(one.layers is not None and one.layers[1] <= count, "layer_range", one.layers, why, do)
            for index in range(start, end):
                t = (index - start) / (end - start - 1) if end - start > 1 else 1.0
                for name in model.parts:
                    match = _LAYER.match(name)
                    if match is not None and int(match["index"]) == index:
                        out = f"{match['stack']}.{offset + index - start}.{match['rest']}"
                        planned.append(self._tensor(piece, out, name, index - start, t))
            offset += end - start
        return planned

    def _names(self, piece: OutputSlice) -> list[str]:
        """Names of all models of a slice, in the order of the first that has them."""
        return list(dict.fromkeys(name for one in piece.inputs for name in self.models[self.at[one.model]].parts))

    def _tensor(self, piece: OutputSlice, out: str, name: str, depth: int, t: float) -> Planned:
        """Plan one tensor: ``name`` is that in the first model of the slice, ``depth`` its layer in the slice."""
        parts: list[Part] = []
        for one in piece.inputs:
            model, inner = self.models[self.at[one.model]], name
            if (match := _LAYER.match(name)) is not None and one.layers is not None:
                inner = f"{match['stack']}.{one.layers[0] + depth}.{match['rest']}"
            parts.append(self._part(model, inner))
        places = tuple(self.at[one.model] for one in piece.inputs)
        base_name = piece.base or self.recipe.base
        names = [one.model for one in piece.inputs]
        base = names.index(base_name) if base_name in names else None

        def look(setting: str, at: int | None, default: Any) -> Any:
            tensor = out if at is None else parts[at].name
            for scope in self.recipe.sources(piece, None if at is None else names[at]):
                value = value_at(scope[setting], tensor, t) if setting in scope else None
                if value is not None:
                    return value
            why, do = f"{out} has none, and there is no default", f"write {setting}: under parameters"
            require(default is not Required, "parameters", f"no {setting}", why, do)
            return default

        by_token = self.vocabulary is not None and bool(BY_TOKEN.search(out))
        kind = self._kind(out, parts)
        choice = choose(self.recipe.method, look, len(parts), base, self.seed)
        if not by_token:
            shapes = {part.shape for part in parts}
            why = "models differ in their vocabularies or are of different architectures"
            do = "write tokenizer: {source: union} for the former"
            require(len(shapes) == 1, f"models at {out!r}", " and ".join(map(str, shapes)), why, do)
        vocabulary = replace(self.vocabulary, base=self.at.get(base_name or "")) if self.vocabulary else None
        return Planned(out, tuple(parts), places, choice, kind, vocabulary if by_token else None)

    def _part(self, model: ModelParts, name: str) -> Part:
        if name in model.parts:
            return model.parts[name]
        if re.search(r"(^|\.)lm_head\.weight$", name):
            # Tied: the output embedding is the input embedding, saved once
            for other, part in model.parts.items():
                if INPUT_EMBEDDING.search(other):
                    return replace(part, name=name)
        why, do = f"{model.label} has no such tensor", "merge models of one architecture"
        raise UserError(f"models at {name!r}", got="nothing", why=why, do=do)

    def _kind(self, name: str, parts: Sequence[Part]) -> str:
        """The dtype of the result: the recipe's, or that to which the models' promote."""
        kinds = {part.entry.kind for part in parts}
        floating = [KINDS[kind].is_floating_point for kind in kinds]
        why, do = "some are floating and some are not", "pass unquantised models"
        require(all(floating) or not any(floating), f"models at {name!r}", " and ".join(kinds), why, do)
        if not floating[0]:
            return parts[0].entry.kind
        wanted = reduce(torch.promote_types, (KINDS[kind] for kind in sorted(kinds)))
        return self.recipe.dtype or next(kind for kind, dtype in KINDS.items() if dtype == wanted)

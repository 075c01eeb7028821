"""What a recipe says: models, slices of layers, and settings by model, tensor name and depth; mergekit's YAML.

Sources: the README and ``mergekit.config`` of mergekit 0.1.5, whose rules of precedence, filters and gradients these
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sparing.errors import UserError, require

Parameters = Mapping[str, Any]

_TOP: Final = {
    "merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source",
    "tokenizer", "chat_template", "name",
}  # fmt: skip
_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


@dataclass(frozen=True, slots=True)
class Input:
    """A model in a slice: its folder, its layers, its own settings."""

    model: str  # a folder, or a folder and an adapter with + between
    layers: tuple[int, int] | None  # from, to (the latter excluded); None for all
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """Layers of the result: which layers of which models are merged to them."""

    inputs: tuple[Input, ...]
    parameters: Parameters
    base: str | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe."""

    method: str
    slices: tuple[OutputSlice, ...]
    whole: bool  # whether it names models, not slices of layers
    base: str | None
    parameters: Parameters
    dtype: str | None  # of the result, as safetensors spells it; None: of the models
    tokenizer: str | None  # "union", "base" or a model of the recipe
    tokens: Mapping[str, Any]  # where embeddings of tokens come from
    pad_to: int  # rows of embeddings are a multiple of it (count)
    chat_template: str | None
    text: str  # as it was written

    @property
    def models(self) -> list[str]:
        """All models, the base first."""
        named = [one.model for piece in self.slices for one in piece.inputs]
        bases = [self.base, *(piece.base for piece in self.slices)]
        return list(dict.fromkeys([*(base for base in bases if base), *named]))

    def sources(self, piece: OutputSlice, model: str | None = None) -> Iterator[Parameters]:
        """Settings that hold for a slice, or a model in it, from the most specific on."""
        if model is not None:
            yield from (one.parameters for one in piece.inputs if one.model == model)
        yield piece.parameters
        yield self.parameters


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a file; what is not supported is refused."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        why, do = "recipes are YAML", "pip install pyyaml"
        raise UserError("recipe", got="no yaml", why=why, do=do) from error
    path = Path(path)
    try:
        text = path.read_text("utf-8")
        documents = list(yaml.safe_load_all(text))
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())[:120]
        raise UserError("recipe", got=path, why=f"it cannot be read ({said})", do="pass a YAML file") from None
    do = "write one file for each and merge them in turn"
    require(len(documents) == 1, "recipe", f"{len(documents)} documents", "a recipe makes one model", do)
    require(isinstance(documents[0], dict), "recipe", path, "it is no mapping", "write merge_method: and models:")
    return parse_recipe(documents[0], text)


def parse_recipe(raw: Mapping[str, Any], text: str) -> Recipe:
    """Check the keys of a recipe and give them their places."""
    _known("recipe", raw, _TOP)
    method = raw.get("merge_method")
    method = "" if method is None else str(method)
    require(bool(method), "merge_method", method, "it says how to merge", "write merge_method: linear")
    one = bool(raw.get("models")) != bool(raw.get("slices"))
    got = "both" if raw.get("models") else "neither"
    require(one, "recipe, models and slices", got, "it has one of them", "write models: or slices:")
    base = _model(raw["base_model"]) if raw.get("base_model") else None
    if raw.get("models"):
        inputs = [_input(entry, whole=True) for entry in raw["models"]]
        # As mergekit: a base that is not among the models joins them
        if base is not None and base not in [each.model for each in inputs]:
            inputs.append(Input(base, None, {}))
        pieces = [OutputSlice(tuple(inputs), {}, None)]
    else:
        pieces = [_slice(entry) for entry in raw["slices"]]
    for piece in pieces:
        names = [each.model for each in piece.inputs]
        why = "its settings would be those of the first"
        require(len(set(names)) == len(names), "recipe", "a model twice in a slice", why, "name each model once")
    tokenizer = dict(raw.get("tokenizer") or {})
    both = bool(raw.get("tokenizer_source")) and bool(tokenizer)
    require(not both, "tokenizer_source", "tokenizer beside it", "they say the same", "keep tokenizer:")
    _known("tokenizer", tokenizer, {"source", "tokens", "pad_to_multiple_of"})
    source = tokenizer.get("source", "union") if tokenizer else raw.get("tokenizer_source")
    template = raw.get("chat_template")
    return Recipe(
        method, tuple(pieces), bool(raw.get("models")), base, _settings(raw.get("parameters")),
        _dtype(raw), None if source is None else _model(source), tokenizer.get("tokens") or {},
        int(tokenizer.get("pad_to_multiple_of") or 1), template, text,
    )  # fmt: skip


def _dtype(raw: Mapping[str, Any]) -> str | None:
    names = [str(raw[key]).removeprefix("torch.") for key in ("out_dtype", "dtype") if raw.get(key)]
    for name in names:
        require(name in _DTYPES, "dtype", name, f"known are {', '.join(_DTYPES)}", "write dtype: bfloat16")
    return _DTYPES[names[0]] if names else None


def _known(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    for key in given:
        why = f"it is not supported; known are {', '.join(sorted(known))}"
        require(key in known, where, repr(key), why, "take it out, or run this recipe with mergekit")


def _model(value: Any) -> str:
    # {model: {path: …}} and revisions are forms of models that must be downloaded
    fine = isinstance(value, str) and "@" not in value and value.count("+") <= 1
    do = "download the model, and write its folder, or FOLDER+ADAPTER for a LoRA"
    require(fine, "model", value, "models are folders on this disk", do)
    return str(value)


def _settings(value: Any) -> Parameters:
    require(value is None or isinstance(value, dict), "parameters", value, "they are a mapping", "write NAME: VALUE")
    return dict(value or {})


def _input(entry: Any, *, whole: bool) -> Input:
    require(isinstance(entry, dict) and "model" in entry, "recipe", entry, "it names no model", "write - model: FOLDER")
    _known(f"recipe, {entry['model']!r}", entry, {"model", "parameters"} | (set() if whole else {"layer_range"}))
    layers = None
    if not whole:
        given = entry.get("layer_range")
        fine = isinstance(given, list) and len(given) == 2 and all(isinstance(at, int) for at in given)
        fine = fine and 0 <= given[0] < given[1]
        why = "a slice has a first layer and one after its last"
        require(fine, "layer_range", given, why, "write layer_range: [0, 16]")
        layers = (int(given[0]), int(given[1]))
    return Input(_model(entry["model"]), layers, _settings(entry.get("parameters")))


def _slice(entry: Any) -> OutputSlice:
    fine = isinstance(entry, dict) and isinstance(entry.get("sources"), list) and bool(entry["sources"])
    require(fine, "slices", entry, "a slice has sources", "write - sources: [{model: FOLDER, layer_range: [0, 16]}]")
    _known("slices", entry, {"sources", "parameters", "base_model"})
    inputs = tuple(_input(one, whole=False) for one in entry["sources"])
    lengths = {one.layers[1] - one.layers[0] for one in inputs if one.layers}
    require(
        len(lengths) == 1, "slices", f"{sorted(lengths)} layers", "models of a slice give as many", "mend the ranges"
    )
    base = _model(entry["base_model"]) if entry.get("base_model") else None
    return OutputSlice(inputs, _settings(entry.get("parameters")), base)


def value_at(setting: Any, name: str, t: float) -> Any:
    """The value of a setting for a tensor at depth ``t`` (0 to 1); None where no filter fits.

    A list of mappings is searched for the first whose filter is in the name; a list of numbers is a gradient, linear
    between its points; of other lists the point before ``t`` is taken.

    Example:
        >>> value_at([{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}], "layers.3.mlp.up", 0.25)
        0.25
    """
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if any(isinstance(one, dict) for one in setting):
        for one in setting:
            fine = isinstance(one, dict) and set(one) <= {"filter", "value"} and "value" in one
            require(
                fine, "parameters", one, "a condition has a value and may have a filter", "write value: and filter:"
            )
            if one.get("filter") in {None, "*"} or one["filter"] in name:
                return value_at(one["value"], name, t)
        return None
    if not setting:
        return None
    values = [_number(one) for one in setting]
    if not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values):
        return values[int(t * (len(values) - 1))]
    place = t * (len(values) - 1)
    low = int(place)
    high = min(len(values) - 1, low + 1)
    return (1 - (place - low)) * values[low] + (place - low) * values[high]


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as a word."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value

"""Config and tokenizer files of model folders: whether two folders hold the same function, and what a merge inherits.

Weights of equal names and shapes can be averaged, but they are one function only with their config and tokenizer:
another epsilon, another rotary base or the same tokens under other ids make it another one. So everything that decides
what a model computes must be equal; other differences are reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from sparing.blocks.names import unwrap
from sparing.errors import UserError, require
from sparing.valley.merging.compatible import first_difference
from sparing.valley.merging.model_configs import IGNORED, ModelConfig, compare_configs, config_of, flatten_config

CONFIG: Final = "config.json"

# Settings of a tokenizer that change the ids of a text
_TOKENIZER_FLAGS: Final = ("do_lower_case", "add_prefix_space", "add_bos_token", "add_eos_token")

_SENTENCEPIECE: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")

_FORMATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Names of classes that act in training only; those with submodules or weights are compared all the same
_DROPOUT_LIKE: Final = re.compile(r"(Dropout|DropPath|DropBlock|StochasticDepth)([123]d)?$")

# What ``extra_repr`` says of training and memory only
_TRAINING_REPR: Final = re.compile(
    r"(^|, )(inplace=(True|False)|\w*(dropout|layerdrop|drop_path|drop_prob|drop_rate)=[^,()]+)"
)

_WHY: Final = "the same weights compute another function with it"


def compare_folders(folders: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """Refuse model folders whose settings, image preparation or tokenizers make different functions of their weights.

    Configs are compared with their defaults filled in where transformers knows them. Returns the harmless differences,
    in sentences.
    """
    known = [(folder, label) for folder, label in zip(folders, labels, strict=True) if folder.is_dir()]
    files = [label for folder, label in zip(folders, labels, strict=True) if known and not folder.is_dir()]
    notes = [f"{label} is a file of weights: its settings and tokenizer cannot be compared" for label in files]
    checks = (_compare_settings, _compare_tokenizers, _compare_usage)
    for folder, label in known[1:]:
        try:
            for check in checks:
                notes += check(known[0][0], folder, (known[0][1], label))
        except UserError:
            raise
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            why = f"its settings or tokenizer, or those of {known[0][1]}, are broken ({str(error)[:80]})"
            raise UserError("model", got=folder, why=why, do="save the model again with save_pretrained") from None
    return list(dict.fromkeys(notes))


# What a recipe may change: the number of layers, and with a tokenizer of its own the vocabulary
_LAYERS: Final = re.compile(r"(^|\.)(num_hidden_layers|n_layers?|num_layers|layer_types|max_window_layers)$")
_TOKENS: Final = re.compile(r"(^|\.)(vocab_size|\w+_token_id)$")


def compare_for_recipe(folders: Sequence[Path], labels: Sequence[str], *, tokenizers: bool, layers: bool) -> list[str]:
    """Compare model folders as ``compare_folders`` does, without what the recipe itself changes.

    Without ``layers`` numbers of layers may differ, without ``tokenizers`` vocabularies.
    """
    if tokenizers and layers:
        return compare_folders(folders, labels)

    def kept(config: ModelConfig) -> ModelConfig:
        changed = [*([] if layers else [_LAYERS]), *([] if tokenizers else [_TOKENS])]
        values = {name: value for name, value in config.values.items() if not any(one.search(name) for one in changed)}
        return ModelConfig(values, config.readers)

    notes = []
    for folder, label in zip(folders[1:], labels[1:], strict=True):
        pair = (labels[0], label)
        notes += compare_configs(CONFIG, kept(_folder_config(folders[0])), kept(_folder_config(folder)), pair)
        if tokenizers:
            notes += [*_compare_tokenizers(folders[0], folder, pair), *_compare_usage(folders[0], folder, pair)]
    return list(dict.fromkeys(notes))


def require_same_function(models: Sequence[nn.Module | Mapping[str, Tensor]]) -> None:
    """Refuse live models that make different functions of the same weights; bare states are skipped.

    Modules at one path must share class and repr (sizes, epsilons, padding), apart from dropout. Non-persistent
    buffers, such as rotary frequencies, and transformers' configs must be equal too.
    """
    live = [(unwrap(one), f"model {at}") for at, one in enumerate(models, 1) if isinstance(one, nn.Module)]
    for other, label in live[1:]:
        first, labels = live[0][0], (live[0][1], label)
        if first is other:
            continue
        _require_same_modules(_module_reprs(first), _module_reprs(other), labels)
        configs = [getattr(one, "config", None) for one in (first, other)]
        if all(callable(getattr(config, "to_dict", None)) for config in configs):
            found = []
            for config, model in zip(configs, (first, other), strict=True):
                read = config_of(config)
                # A config that was never saved names no architectures
                found.append(ModelConfig({**read.values, "architectures": [type(model).__name__]}, read.readers))
            compare_configs("config", found[0], found[1], labels)


def _require_same_modules(mine: Mapping[str, Any], theirs: Mapping[str, Any], labels: tuple[str, str]) -> None:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x.shape == y.shape and bool((x == y.to(x.device)).all())
        return bool(x == y)

    if (name := first_difference(mine, theirs, same)) is not None:
        one, other = mine.get(name), theirs.get(name)
        tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        got = "other numbers" if tensors else f"{one!s:.60} in {labels[0]} and {other!s:.60} in {labels[1]}"
        do = "pass models of one architecture and setting"
        raise UserError(f"models at {name or 'the top'!r}", got=got, why=_WHY, do=do)


def _module_reprs(model: nn.Module) -> dict[str, Any]:
    """The class and repr of each module by path, and the non-persistent buffers."""
    found: dict[str, Any] = {
        path: f"{type(module).__name__}({_eval_repr(module)})" for path, module in model.named_modules()
        if not _is_dropout(module)
    }  # fmt: skip
    state = model.state_dict()
    return found | {f"{name} (buffer)": buffer for name, buffer in model.named_buffers() if name not in state}


def _is_dropout(module: nn.Module) -> bool:
    """Whether a module does nothing in evaluation mode."""
    named = _DROPOUT_LIKE.search(type(module).__name__) and not module._modules and not module.state_dict()
    return isinstance(module, (nn.Identity, _DropoutNd)) or bool(named)


def _eval_repr(module: nn.Module) -> str:
    """The ``extra_repr`` of a module without what matters in training only."""
    said = _TRAINING_REPR.sub("", module.extra_repr())
    if isinstance(module, _NormBase):  # momentum updates running statistics in training only
        said = re.sub(r"(^|, )momentum=[^,()]+", "", said)
    if type(module) is nn.Embedding:  # padding_idx only masks gradients: lookups use that row as any other
        said = re.sub(r"(^|, )padding_idx=\d+", "", said)
    return said.removeprefix(", ")


def dtype_notes(kinds: Sequence[set[str]], labels: Sequence[str]) -> list[str]:
    """Report dtypes that differ from the first model's, which the merge will have."""
    first = ", ".join(sorted(kinds[0]))
    return [
        f"{label} is in {', '.join(sorted(kind))}; the merge is in {first}, as {labels[0]}"
        for kind, label in zip(kinds[1:], labels[1:], strict=True) if kind != kinds[0]
    ]  # fmt: skip


def config_text(folder: Path, kinds: set[str]) -> str | None:
    """Return the text of a folder's config.json (None if missing) with the dtype that the written weights have.

    transformers loads in the dtype that the config names: left as it is, a merge could be rounded on loading.
    """
    if not (folder / CONFIG).is_file():
        return None
    config, changed = read_json(folder / CONFIG), False
    formats = [_FORMATS[kind] for kind in kinds]
    wanted = str(reduce(torch.promote_types, formats)).removeprefix("torch.") if formats else ""
    for part in _nested_dicts(config) if formats else ():
        for name in ("dtype", "torch_dtype"):
            if isinstance(part.get(name), str) and part[name].removeprefix("torch.") != wanted:
                part[name], changed = wanted, True
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n" if changed else (folder / CONFIG).read_text("utf-8")


def _nested_dicts(tree: Any) -> Iterator[dict[str, Any]]:
    """All dicts of a JSON document."""
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _nested_dicts(value)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty where there is no file."""
    try:
        found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        why = f"it cannot be read ({str(error)[:80]})"
        raise UserError("model", got=file, why=why, do="save the model again with save_pretrained") from None
    require(isinstance(found, dict), "model", file, "it is no JSON object", "save the model again with save_pretrained")
    return dict(found)


def _folder_config(folder: Path) -> ModelConfig:
    """The config with its defaults, where transformers knows the model; else as written."""
    plain = read_json(folder / CONFIG)
    if "model_type" not in plain:
        return ModelConfig(flatten_config(plain))
    try:
        from transformers import AutoConfig

        return config_of(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except Exception:  # noqa: BLE001 - transformers is missing or does not know it
        return ModelConfig(flatten_config(plain))


def _compare_settings(one: Path, other: Path, labels: tuple[str, str]) -> list[str]:
    """Compare configs and, where both have them, settings of image preparation."""
    bare = [label for folder, label in zip((one, other), labels, strict=True) if not (folder / CONFIG).is_file()]
    notes = [f"{bare[0]} has no {CONFIG} to compare"] if len(bare) == 1 else []
    if not bare:
        notes = compare_configs(CONFIG, _folder_config(one), _folder_config(other), labels)
    images = [folder / "preprocessor_config.json" for folder in (one, other)]
    if all(file.is_file() for file in images):
        found = [ModelConfig(flatten_config(read_json(file))) for file in images]
        notes += compare_configs(images[0].name, found[0], found[1], labels)
    return notes


def _compare_tokenizers(one: Path, other: Path, labels: tuple[str, str]) -> list[str]:
    """Compare vocabularies and how a text is split."""
    words = [vocabulary_of(folder) for folder in (one, other)]
    if not all(words):
        return [f"{labels[words.index({})]} has no tokenizer to compare"] if any(words) else []
    _require_same_ids(words[0], words[1], labels)
    cuts = [_tokenization(folder) for folder in (one, other)]
    for name in dict.fromkeys([*cuts[0], *cuts[1]]):
        same = name not in cuts[0] or name not in cuts[1] or cuts[0][name] == cuts[1][name]
        got = f"one in {labels[0]} and another in {labels[1]}"
        why = "the same text has other numbers with it"
        require(same, f"tokenizer, {name!r}", got, why, "merge models of one tokenizer")
    return [
        f"{len(alone)} tokens, such as {sorted(alone)[0]!r}, are in the tokenizer of {label} alone"
        for alone, label in zip((words[0].keys() - words[1], words[1].keys() - words[0]), labels, strict=True) if alone
    ]  # fmt: skip


def _require_same_ids(mine: Mapping[str, int], theirs: Mapping[str, int], labels: tuple[str, str]) -> None:
    """Refuse a token with two ids, and an id with two tokens."""
    why, do = "row i of the embeddings would be the mean of two words", "merge models of one tokenizer"
    for token, number in mine.items():
        got = f"{number} in {labels[0]} and {theirs.get(token)} in {labels[1]}"
        require(theirs.get(token, number) == number, f"tokenizer, number of {token!r}", got, why, do)
    names = {number: token for token, number in theirs.items()}
    for token, number in mine.items():
        got = f"{token!r} in {labels[0]} and {names.get(number)!r} in {labels[1]}"
        require(names.get(number, token) == token, f"tokenizer, token {number}", got, why, do)


def vocabulary_of(folder: Path) -> dict[str, int]:
    """Token -> id, from whichever file has it; empty where none does."""
    whole, settings = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    vocabulary = whole.get("model", {}).get("vocab") or read_json(folder / "vocab.json")
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score, in the order of their ids
        vocabulary = {pair[0]: at for at, pair in enumerate(vocabulary)}
    if not vocabulary and (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text("utf-8").splitlines()
        vocabulary = {line: at for at, line in enumerate(lines)}
    if not vocabulary:
        found = next((folder / name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
        vocabulary = {} if found is None else sentencepiece_pieces(found)
    added = {entry["content"]: entry["id"] for entry in whole.get("added_tokens", ())}
    added |= {entry["content"]: int(at) for at, entry in settings.get("added_tokens_decoder", {}).items()}
    return {**vocabulary, **read_json(folder / "added_tokens.json"), **added}


def sentencepiece_pieces(file: Path) -> dict[str, int]:
    """Piece -> id of a SentencePiece model: a protocol buffer with a field 1 for each, whose field 1 is its text."""
    data, pieces, at = file.read_bytes(), dict[str, int](), 0
    while at < len(data):
        field, value, at = _field(data, at)
        if field == 1 and isinstance(value, bytes):
            inner, text = 0, b""
            while inner < len(value):
                number, found, inner = _field(value, inner)
                text = found if number == 1 and isinstance(found, bytes) else text
            pieces.setdefault(text.decode("utf-8"), len(pieces))
    return pieces


def _field(data: bytes, at: int) -> tuple[int, bytes | int, int]:
    """Read a field of a protocol buffer: its number, its value, and where the next one begins."""
    key, at = _varint(data, at)
    kind = key & 7
    if kind == 0:
        value, at = _varint(data, at)
        return key >> 3, value, at
    length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
    return key >> 3, data[at : at + length], at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at


def _tokenization(folder: Path) -> dict[str, Any]:
    """What decides how a text is split, beside the vocabulary."""
    whole, settings = _normalized_tokenizer(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    found: dict[str, Any] = {name: settings[name] for name in _TOKENIZER_FLAGS if name in settings}
    found |= {name: whole[name] for name in ("normalizer", "pre_tokenizer") if name in whole}
    if merges := whole.get("model", {}).get("merges"):
        found["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "merges.txt"):
        if (folder / name).is_file():
            found[name] = (folder / name).read_bytes()
    return found


def _normalized_tokenizer(file: Path) -> dict[str, Any]:
    """A tokenizer.json as the installed tokenizers would write it: older versions spell the same differently."""
    plain = read_json(file)
    try:
        from tokenizers import Tokenizer

        found: dict[str, Any] = json.loads(Tokenizer.from_file(str(file)).to_str()) if plain else {}
    except Exception:  # noqa: BLE001 - not installed, or the file of another version
        return plain
    return found


def _compare_usage(one: Path, other: Path, labels: tuple[str, str]) -> list[str]:
    """Report differences in how a model is used: chat template, special tokens, generation."""
    notes = []
    if chat_template_of(one) != chat_template_of(other):
        notes.append(f"chat templates of {labels[0]} and {labels[1]} differ")
    settings = [read_json(folder / "tokenizer_config.json") for folder in (one, other)]
    different = [
        name
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if settings[0].get(name) != settings[1].get(name)
    ]
    if different:
        notes.append(f"special tokens of {labels[0]} and {labels[1]} differ: {', '.join(different)}")
    ways = [flatten_config(read_json(folder / "generation_config.json")) for folder in (one, other)]
    if different := [
        n for n in dict.fromkeys([*ways[0], *ways[1]]) if ways[0].get(n) != ways[1].get(n) and not IGNORED.search(n)
    ]:
        notes.append(f"{labels[0]} and {labels[1]} generate differently: {', '.join(different)}")
    return notes


def chat_template_of(folder: Path) -> object:
    """The chat template of a folder, from whichever file has it."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    separate = read_json(folder / "chat_template.json").get("chat_template")
    return separate or read_json(folder / "tokenizer_config.json").get("chat_template")

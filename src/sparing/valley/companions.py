"""What lies beside the weights of a model folder: whether two folders hold one function, and what a merge inherits.

Weights of equal names and shapes are averaged without a question, but they are one function only together with their
settings and tokenizer: another epsilon, another rotary base or the same words under other numbers make it another one.
So everything that says what a model computes must be equal; what does not is told.
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
from sparing.valley.settings import IGNORED, ModelConfig, compare_configs, config_of, flatten_config

CONFIG: Final = "config.json"

# settings of a tokenizer that change the numbers of a text
_TOKENIZER_FLAGS: Final = ("do_lower_case", "add_prefix_space", "add_bos_token", "add_eos_token")

_FORMATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# classes that do something in training alone, as they are called; ones with parts or weights are compared
_DROPOUT_LIKE: Final = re.compile(r"(Dropout|DropPath|DropBlock|StochasticDepth)([123]d)?$")

# what modules print of training and memory
_TRAINING_REPR: Final = re.compile(
    r"(^|, )(inplace=(True|False)|\w*(dropout|layerdrop|drop_path|drop_prob|drop_rate)=[^,()]+)"
)

_WHY: Final = "the same weights compute another function with it"


def compare_folders(folders: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """Refuse model folders whose settings, image preparation or tokenizers make different functions of their weights.

    Settings are compared with their defaults filled in, where transformers is there and knows them. Of two vocabularies
    every common token must have one number, and no number two tokens.
    """
    there = [(folder, label) for folder, label in zip(folders, labels, strict=True) if folder.is_dir()]
    alone = [label for folder, label in zip(folders, labels, strict=True) if there and not folder.is_dir()]
    notes = [f"{label} is a file of weights: its settings and tokenizer cannot be compared" for label in alone]
    for folder, label in there[1:]:
        pair = (there[0][0], folder, (there[0][1], label))
        try:
            notes += [
                told
                for compare in (_compare_configs, _compare_image_processors, _compare_tokenizers, _compare_usage)
                for told in compare(*pair)
            ]
        except UserError:
            raise
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            why = f"its settings or tokenizer, or those of {there[0][1]}, are broken ({str(error)[:80]})"
            raise UserError("model", got=folder, why=why, do="save the model again with save_pretrained") from None
    return list(dict.fromkeys(notes))


def require_same_function(models: Sequence[nn.Module | Mapping[str, Tensor]]) -> None:
    """Refuse live models that make different functions of the same weights; states among them say nothing.

    Modules of one path must be of one class and print alike (sizes, epsilons, kinds of padding), dropout apart; buffers
    that are in no state, such as rotary frequencies, must be equal; and so must what transformers' settings say.
    """
    live = [(unwrap(one), f"model {at}") for at, one in enumerate(models, 1) if isinstance(one, nn.Module)]
    for other, label in live[1:]:
        first, labels = live[0][0], (live[0][1], label)
        if first is other:
            continue
        _require_alike(_module_reprs(first), _module_reprs(other), labels)
        configs = [getattr(one, "config", None) for one in (first, other)]
        if all(callable(getattr(config, "to_dict", None)) for config in configs):
            mine, theirs = (_live_config(config, one) for config, one in zip(configs, (first, other), strict=True))
            compare_configs("config", mine, theirs, labels)


def _live_config(config: Any, model: nn.Module) -> ModelConfig:
    """Settings of a live model: what it is says its class, which a config that was never saved does not name."""
    found = config_of(config)
    return ModelConfig({**found.values, "architectures": [type(model).__name__]}, found.askers)


def _require_alike(mine: Mapping[str, Any], theirs: Mapping[str, Any], labels: tuple[str, str]) -> None:
    for name in dict.fromkeys([*mine, *theirs]):
        one, other = mine.get(name), theirs.get(name)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            same, got = one.shape == other.shape and bool((one == other.to(one.device)).all()), "other numbers"
        else:
            same, got = one == other, f"{one!s:.60} in {labels[0]} and {other!s:.60} in {labels[1]}"
        require(same, f"models at {name or 'the top'!r}", got, _WHY, "pass models of one architecture and setting")


def _module_reprs(model: nn.Module) -> dict[str, Any]:
    """What each module is, by path, and the buffers that no state holds."""
    found: dict[str, Any] = {
        path: f"{type(module).__name__}({_eval_repr(module)})" for path, module in model.named_modules()
        if not _identity_in_eval(module)
    }  # fmt: skip
    state = model.state_dict()
    return found | {f"{name} (buffer)": buffer for name, buffer in model.named_buffers() if name not in state}


def _identity_in_eval(module: nn.Module) -> bool:
    """Whether a module is nothing in evaluation: an identity, or one that drops something in training."""
    named = _DROPOUT_LIKE.search(type(module).__name__) and not module._modules and not module.state_dict()
    return isinstance(module, (nn.Identity, _DropoutNd)) or bool(named)


def _eval_repr(module: nn.Module) -> str:
    """What a module prints of itself, less what only training or memory asks for."""
    said = _TRAINING_REPR.sub("", module.extra_repr())
    if isinstance(module, _NormBase):  # statistics move by it in training alone
        said = re.sub(r"(^|, )momentum=[^,()]+", "", said)
    if type(module) is nn.Embedding:  # its row is looked up as any other: only gradients spare it
        said = re.sub(r"(^|, )padding_idx=\d+", "", said)
    return said.removeprefix(", ")


def dtype_notes(kinds: Sequence[set[str]], labels: Sequence[str]) -> list[str]:
    """Tell number formats that differ: the merge has that of the first model."""
    first = ", ".join(sorted(kinds[0]))
    return [
        f"{label} is in {', '.join(sorted(kind))}; the merge is in {first}, as {labels[0]}"
        for kind, label in zip(kinds[1:], labels[1:], strict=True) if kind != kinds[0]
    ]  # fmt: skip


def config_text(folder: Path, kinds: set[str]) -> str | None:
    """Return the text of a folder's config.json, made to load weights in the format in which they are written."""
    if not (folder / CONFIG).is_file():
        return None
    config, changed = _read_json(folder / CONFIG), False
    formats = [_FORMATS[kind] for kind in kinds]
    wanted = str(reduce(torch.promote_types, formats)).removeprefix("torch.") if formats else ""
    for part in _nested_dicts(config) if formats else ():
        for name in ("dtype", "torch_dtype"):
            if isinstance(part.get(name), str) and part[name].removeprefix("torch.") != wanted:
                part[name], changed = wanted, True
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n" if changed else (folder / CONFIG).read_text("utf-8")


def _nested_dicts(tree: Any) -> Iterator[dict[str, Any]]:
    """All mappings of a document."""
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _nested_dicts(value)


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file; an empty mapping where there is none."""
    try:
        found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        why = f"it cannot be read ({str(error)[:80]})"
        raise UserError("model", got=file, why=why, do="save the model again with save_pretrained") from None
    require(isinstance(found, dict), "model", file, "it is no JSON object", "save the model again with save_pretrained")
    return dict(found)


def _folder_config(folder: Path) -> ModelConfig:
    """Settings with their defaults, where transformers knows the model; else as they are written."""
    plain = _read_json(folder / CONFIG)
    if "model_type" not in plain:
        return ModelConfig(flatten_config(plain))
    try:
        from transformers import AutoConfig

        return config_of(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except Exception:  # noqa: BLE001 - not installed, or not known: what is written is compared
        return ModelConfig(flatten_config(plain))


def _compare_configs(one: Path, other: Path, labels: tuple[str, str]) -> list[str]:
    """Compare config.json."""
    if bare := [label for folder, label in zip((one, other), labels, strict=True) if not (folder / CONFIG).is_file()]:
        return [] if len(bare) > 1 else [f"{bare[0]} has no {CONFIG} to compare"]
    return compare_configs(CONFIG, _folder_config(one), _folder_config(other), labels)


def _compare_image_processors(one: Path, other: Path, labels: tuple[str, str]) -> list[str]:
    """Compare what is done to images before the model sees them."""
    file = "preprocessor_config.json"
    both = (one / file).is_file() and (other / file).is_file()
    found = [ModelConfig(flatten_config(_read_json(folder / file))) for folder in (one, other)]
    return compare_configs(file, found[0], found[1], labels) if both else []


def _compare_tokenizers(one: Path, other: Path, labels: tuple[str, str]) -> list[str]:
    """Compare vocabularies, and how a text is cut."""
    words = [_vocabulary(folder) for folder in (one, other)]
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
    """Refuse a token of two numbers, and a number of two tokens."""
    why, do = "row i of the embeddings would be the mean of two words", "merge models of one tokenizer"
    for token, number in mine.items():
        got = f"{number} in {labels[0]} and {theirs.get(token)} in {labels[1]}"
        require(theirs.get(token, number) == number, f"tokenizer, number of {token!r}", got, why, do)
    names = {number: token for token, number in theirs.items()}
    for token, number in mine.items():
        got = f"{token!r} in {labels[0]} and {names.get(number)!r} in {labels[1]}"
        require(names.get(number, token) == token, f"tokenizer, token {number}", got, why, do)


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token -> number, from whichever file says it; empty where none does."""
    whole, settings = _read_json(folder / "tokenizer.json"), _read_json(folder / "tokenizer_config.json")
    vocabulary = whole.get("model", {}).get("vocab") or _read_json(folder / "vocab.json")
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score, numbered as they stand
        vocabulary = {pair[0]: at for at, pair in enumerate(vocabulary)}
    if not vocabulary and (folder / "vocab.txt").is_file():
        lines = (folder / "vocab.txt").read_text("utf-8").splitlines()
        vocabulary = {line: at for at, line in enumerate(lines)}
    added = {entry["content"]: entry["id"] for entry in whole.get("added_tokens", ())}
    added |= {entry["content"]: int(at) for at, entry in settings.get("added_tokens_decoder", {}).items()}
    return {**vocabulary, **_read_json(folder / "added_tokens.json"), **added}


def _tokenization(folder: Path) -> dict[str, Any]:
    """What decides how a text is cut, beside the vocabulary, as far as the files say it."""
    whole, settings = _normalized_tokenizer(folder / "tokenizer.json"), _read_json(folder / "tokenizer_config.json")
    found: dict[str, Any] = {name: settings[name] for name in _TOKENIZER_FLAGS if name in settings}
    found |= {name: whole[name] for name in ("normalizer", "pre_tokenizer") if name in whole}
    if merges := whole.get("model", {}).get("merges"):
        found["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "merges.txt"):
        if (folder / name).is_file():
            found[name] = (folder / name).read_bytes()
    return found


def _normalized_tokenizer(file: Path) -> dict[str, Any]:
    """A tokenizer.json as the present version of tokenizers writes it, where that is there and reads it."""
    plain = _read_json(file)
    try:
        from tokenizers import Tokenizer

        found: dict[str, Any] = json.loads(Tokenizer.from_file(str(file)).to_str()) if plain else {}
    except Exception:  # noqa: BLE001 - not installed, or another version's file: what is written is compared
        return plain
    return found


def _compare_usage(one: Path, other: Path, labels: tuple[str, str]) -> list[str]:
    """Tell differences in how a finished model is used: chat template, special tokens, generation."""
    notes = []
    if _chat_template(one) != _chat_template(other):
        notes.append(f"chat templates of {labels[0]} and {labels[1]} differ")
    settings = [_read_json(folder / "tokenizer_config.json") for folder in (one, other)]
    odd = [
        name
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if settings[0].get(name) != settings[1].get(name)
    ]
    if odd:
        notes.append(f"special tokens of {labels[0]} and {labels[1]} differ: {', '.join(odd)}")
    ways = [flatten_config(_read_json(folder / "generation_config.json")) for folder in (one, other)]
    if odd := [
        n for n in dict.fromkeys([*ways[0], *ways[1]]) if ways[0].get(n) != ways[1].get(n) and not IGNORED.search(n)
    ]:
        notes.append(f"{labels[0]} and {labels[1]} generate differently: {', '.join(odd)}")
    return notes


def _chat_template(folder: Path) -> object:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    own = _read_json(folder / "chat_template.json").get("chat_template")
    return own or _read_json(folder / "tokenizer_config.json").get("chat_template")

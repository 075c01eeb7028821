"""Configs of two models: which differences change what equal weights compute, and which do not.

A setting is taken to change the function unless something shows that it does not: its name (training, files, runtime),
its config class, which does not declare it, or the model's code, which does not read it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sparing.errors import UserError

# Never compared: where files came from, how they are run, what the merge sets itself
IGNORED: Final = re.compile(
    r"(^|\.)(_?name_or_path|transformers_version|(torch_)?dtype|use_cache|output_(attentions|hidden_states)|return_dict|"
    r"use_return_dict|_?attn_implementation\w*|_commit_hash|gradient_checkpointing|label2id(\..*)?|model_max_length|"
    r"processor_class|feature_extractor_type|image_processor_type|_processor_class)$"
)

# Settings of training and marks of trainers; not ESM's ``token_dropout``, which scales embeddings in evaluation too
_TRAINING_ONLY: Final = re.compile(
    r"(^|\.)((?!token_dropout)\w*(dropout(_prob|_rate|_p)?|_pdrop|layerdrop|drop_path\w*)|initializer\w*|init_std|"
    r"task_specific_params(\..*)?|problem_type|finetuning_task|router_aux_loss_coef|label_smoothing\w*|"
    r"(unsloth|axolotl)_\w+|tokenizer_padding_side)$"
)

# Rotary embeddings whose frequencies do not depend on ``max_position_embeddings``
_PLAIN_ROPE: Final = {"default", "linear", "llama3"}

# Code that reads a setting and computes nothing with it: lookups treat the row of ``padding_idx`` as any other
_HARMLESS_READS: Final[Mapping[str, str]] = {
    "max_position_embeddings": r"self\.(max_seq_len_cached|original_max_seq_len) = config\.max_position_embeddings",
    "pad_token_id": (
        r"self\.padding_idx = config\.pad_token_id|module\.padding_idx|nn\.Embedding\([^()]*(\([^()]*\)[^()]*)*\)"
    ),
}

# Files of transformers that read settings of any model
_SHARED_CODE: Final = ("masking_utils.py", "modeling_rope_utils.py", "modeling_layers.py", "modeling_utils.py")

_WHY: Final = "the same weights compute another function with it"
_DO: Final = "merge models of one configuration, or mend the file that is wrong"


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The code that reads a config: its class and its model."""

    declared: frozenset[str]  # names that the class declares
    code: str  # source of the model, after that of the models it is a part of
    shared_code: str  # source that all models share


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Settings by dotted name, and the code that reads them."""

    values: Mapping[str, Any]  # nested settings have their path before them
    # By the prefix of the names that they read; empty for unknown configs
    readers: Mapping[str, ConfigReader] = field(default_factory=dict)


def config_of(config: Any) -> ModelConfig:
    """Read a config of transformers, or anything with ``to_dict``."""
    return ModelConfig(flatten_config(config.to_dict()), _config_readers(config))


def flatten_config(tree: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{start}{name}"
        found |= flatten_config(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return found


def _config_readers(config: Any, start: str = "", outer: str = "") -> dict[str, ConfigReader]:
    if not type(config).__module__.startswith("transformers.models."):
        return {}
    file = Path(inspect.getfile(type(config)))
    code = file.with_name(file.name.replace("configuration_", "modeling_"))
    try:
        read = outer + code.read_text("utf-8")
        general = "".join((file.parents[2] / name).read_text("utf-8") for name in _SHARED_CODE)
        found = {start: ConfigReader(frozenset(type(config)().to_dict()), read, general)}
    except Exception:  # noqa: BLE001 - no source, or no defaults: then nothing is known of what is read
        return {}
    for name in getattr(config, "sub_configs", ()):
        found |= _config_readers(getattr(config, name, None), f"{start}{name}.", read)
    return found


def compare_configs(file: str, mine: ModelConfig, theirs: ModelConfig, labels: tuple[str, str]) -> list[str]:
    """Refuse the first difference that changes the function; return the others, in sentences."""
    notes = []
    for name in dict.fromkeys([*mine.values, *theirs.values]):
        values = mine.values.get(name), theirs.values.get(name)
        if values[0] == values[1] or IGNORED.search(name):
            continue
        got = f"{values[0]!r:.60} in {labels[0]} and {values[1]!r:.60} in {labels[1]}"
        if not _is_harmless(name, mine, theirs):
            raise UserError(f"{file}, {name!r}", got=got, why=_WHY, do=_DO)
        notes.append(f"{file}, {name!r}: {got}; the function is the same")
    return notes


def _is_harmless(name: str, mine: ModelConfig, theirs: ModelConfig) -> bool:
    """Whether a setting that differs changes nothing that the model computes."""
    values = [one.values.get(name) for one in (mine, theirs)]
    unnamed = name.startswith("id2label.") and any(str(value).startswith("LABEL_") for value in values)
    if unnamed or _TRAINING_ONLY.search(name):
        return True
    alone = (name in mine.values) != (name in theirs.values)
    start = max((start for start in mine.readers if name.startswith(start)), key=len, default="")
    reader, setting = mine.readers.get(start), name.removeprefix(start).partition(".")[0]
    if setting == "auto_map":  # fine-tuning puts the repository of the code before its name: owner/name--file.Class
        return alone or len({str(value).rpartition("--")[2] for value in values}) == 1
    if setting.endswith("_token_id"):
        return None in values or _generation_only(setting, reader, mine)
    if setting == "max_position_embeddings":
        used = reader is not None and _reads(reader.code, setting)
        return not used and all(_has_plain_rope(one, start) for one in (mine, theirs))
    if setting == "max_window_layers":  # it makes layer_types, which are compared themselves
        return all(one.values.get(f"{start}layer_types") for one in (mine, theirs))
    known = reader is None or setting in reader.declared
    return alone and not known and reader is not None and not _reads(reader.code + reader.shared_code, setting)


def _reads(code: str, name: str) -> bool:
    """Whether code computes with a setting: as an attribute, or by its quoted name."""
    rest = re.sub(_HARMLESS_READS[name], "", code) if name in _HARMLESS_READS else code
    return bool(re.search(rf"config\.{name}\b|['\"]{name}['\"]", rest)) or (
        name == "pad_token_id" and "padding_idx" in rest
    )


def _generation_only(name: str, reader: ConfigReader | None, model: ModelConfig) -> bool:
    """Whether a token id is read by generation only, not by the model's forward pass."""
    kinds = " ".join(map(str, model.values.get("architectures") or ()))
    if name == "pad_token_id" and "ForSequenceClassification" in kinds:  # it pools the token before the first padding
        return False
    if reader is None:  # no code at hand: true of all causal language models we know
        return "ForCausalLM" in kinds and name in {"bos_token_id", "eos_token_id"}
    return not _reads(reader.code, name)


def _has_plain_rope(model: ModelConfig, start: str) -> bool:
    """Whether a part has rotary positions whose frequencies do not depend on the maximum length."""
    part = {name.removeprefix(start): value for name, value in model.values.items() if name.startswith(start)}
    kinds = [value for name, value in part.items() if re.search(r"(^|\.)(rope_type|rope_scaling\.type)$", name)]
    turns = any(name.endswith("rope_theta") and value is not None for name, value in part.items())
    return turns and all(kind in _PLAIN_ROPE for kind in kinds)

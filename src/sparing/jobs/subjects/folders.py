"""A finished model: in a folder, where it is, of which kind, loaded; or made by the user's own ``module:function``."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.lm.models import Head, config_of, load_model

PICKLED = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}  # endings of files that are not opened

Kind = Literal["language", "images"]

Encoder = Literal["masked", "pairs"]  # masked tokens are filled in; a text is answered by another

ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

# What can be scanned, in words.
FORMS = "a folder of save_pretrained, a .safetensors file with --entry, or module:function"


def kind_of(folder: Path) -> Kind:
    """Whether a folder holds a language model or an image classifier."""
    import transformers

    config = config_of(folder)
    named = " ".join(getattr(config, "architectures", None) or ())
    if "ForImageClassification" in named:
        return "images"
    if "ForCausalLM" in named or "LMHead" in named:
        return "language"
    # transformers would load an encoder as a decoder that sees the next token, and half of a model of two parts
    other = encoder_of(folder) is not None or re.search(r"For(Sequence|Token|PreTraining|Multiple|Question)", named)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not other:
        return "language"
    if type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return "images"
    why = f"a {type(config).__name__} is neither a causal language model nor an image classifier"
    raise UserError("checkpoint", got=folder, why=why, do="pass an entry point module:function that measures it")


def encoder_of(folder: Path) -> Encoder | None:
    """Whether a folder holds an encoder that fills in masked tokens, or an encoder with a decoder; else None."""
    import transformers

    config = config_of(folder)
    named = " ".join(getattr(config, "architectures", None) or ())
    if "ForMaskedLM" in named:
        return "masked"
    both = type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if both and "ForConditionalGeneration" in named:
        return "pairs"
    return None


def folder_at(path: Path) -> Path:
    """The folder of the model: the path itself, or ``model`` in the directory of one of our runs."""
    if path.suffix in PICKLED:
        do = "save it with safetensors.torch.save_file, and pass --entry"
        raise UserError("checkpoint", got=path, why="pickled files are not opened: they can run code", do=do)
    path = hub.folder_of(path)
    require(path.exists(), "checkpoint", path, "there is no such file or folder", f"pass {FORMS}")
    require(path.is_dir(), "checkpoint", path, "it is no folder of a model", f"pass {FORMS}")
    inner = path / "model"
    return inner if (inner / "config.json").is_file() and not (path / "config.json").is_file() else path


def open_folder(path: Path) -> tuple[nn.Module, Kind]:
    """Load the model of a folder in float32; returns it and its kind."""
    kind = kind_of(path)
    head: Head = "image classifier" if kind == "images" else "causal language model"
    return load_model(path, dtype=torch.float32, head=head), kind


def call_entry(spec: str, setting: str) -> Any:
    """Import ``module:function``, with the working directory first, and call it without arguments."""
    require(ENTRY.fullmatch(spec) is not None, setting, spec, "it is module:function", "pass such as my_nets:make")
    module, name = spec.split(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)()
    except Exception as error:
        # the user's code may raise anything; one line says what and where
        why = f"it raised {type(error).__name__} ({(str(error).splitlines() or [''])[0][:120]})"
        do = f'try: python -c "import {module}; {module}.{name}()"'
        raise UserError(setting, got=spec, why=why, do=do) from error
    finally:
        sys.path.remove(str(Path.cwd()))

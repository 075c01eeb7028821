"""What is scanned: a model of a folder, a file of weights or a Python entry point, never pickle, and its rows."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.lm.models import load_tokenizer, most_positions, vocabulary
from sparing.jobs.scan.settings import Settings
from sparing.jobs.subjects.folders import call_entry, folder_at, open_folder
from sparing.jobs.subjects.images import IMAGES, image_format_of, image_rows, prepared
from sparing.jobs.subjects.text import token_rows
from sparing.valley.scans.evaluators import Classification, NextToken

Evaluate = Callable[[nn.Module], Mapping[str, float]]

BATCH: Final = 256  # calibration images in a batch (count)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is scanned."""

    name: str
    model: nn.Module  # in evaluation mode
    evaluate: Evaluate  # model -> metrics by name; their direction follows from the name, or ``evaluate.better``
    calibrate: Iterable[Any] | None = None  # batches of inputs that batch-norm statistics are taken from
    metric: str = ""  # the one that the page draws; "" for error, else loss, else the first
    source: str = ""  # what it is measured on, in words


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a .safetensors file."""
    require(path.is_file(), "weights", path, "there is no such file", "pass a .safetensors file")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        why = f"it is torn, or no safetensors file ({str(error).splitlines()[0][:80]})"
        raise UserError("weights", got=path, why=why, do="save it again with safetensors.torch.save_file") from None


def fill_(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load weights into a model; the first name or shape that differs is named."""
    do = "pass weights of the model that --entry builds"
    state, twice = model.state_dict(), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # Of tied weights the file may hold one name only.
    needed = [name for name in state if name not in twice or name in named_parameters(model)]
    if lacks := next((name for name in needed if name not in weights), None):
        raise UserError("weights", got=path, why=f"the file lacks {lacks!r}", do=do)
    if extra := next((name for name in weights if name not in state), None):
        raise UserError("weights", got=path, why=f"the model lacks {extra!r}", do=do)
    for name, tensor in weights.items():
        if tensor.shape != state[name].shape:
            why = f"{name!r} is {tuple(tensor.shape)}, in the model {tuple(state[name].shape)}"
            raise UserError("weights", got=path, why=why, do=do)
    model.load_state_dict(weights, strict=False)


def open_entry(spec: str) -> Inputs:
    """Call an entry point, which returns (model, evaluate) or (model, evaluate, calibrate)."""
    found = call_entry(spec, "entry")
    parts = tuple(found) if isinstance(found, tuple | list) else ()
    right = len(parts) in {2, 3} and isinstance(parts[0], nn.Module) and callable(parts[1])
    got = f"{spec} returning {' and '.join(type(part).__name__ for part in parts) or type(found).__name__}"
    do = "return a torch.nn.Module, a function of it that gives metrics by name, and batches if it has batch norm"
    require(right, "entry", got, "it returns (model, evaluate) or (model, evaluate, calibrate)", do)
    return Inputs(spec, parts[0].eval(), parts[1], parts[2] if len(parts) == 3 else None)


def open_initial(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Weights before training, by canonical name, from a folder of the same architecture or a .safetensors file."""
    if path.suffix == ".safetensors":
        found: Mapping[str, Tensor] = read_weights(path)
    else:
        found = {name: tensor.detach() for name, tensor in named_parameters(open_folder(folder_at(path))[0]).items()}
    for name, parameter in named_parameters(model).items():
        there = name in found and found[name].shape == parameter.shape
        why = f"it lacks {name!r} of shape {tuple(parameter.shape)}"
        require(there, "initial", path, why, "pass the same architecture before training")
    return {name: found[name] for name in named_parameters(model)}


def open_other(path: Path, model: nn.Module) -> nn.Module:
    """Another model of the same architecture, from a folder or a .safetensors file."""
    if path.suffix != ".safetensors":
        return open_folder(folder_at(path))[0].eval()
    other = copy.deepcopy(model)
    fill_(other, read_weights(path), path)
    return other


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors: names, shapes, formats and every bit."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _title(settings: Settings, folder: Path) -> str:
    # a snapshot's folder is called by its commit
    return folder.name if hub.name_of(settings.model) is None else hub.title(settings.model)


def _of_images(settings: Settings, folder: Path, model: Any) -> Inputs:
    name = settings.data or "none"
    require(settings.data is not None, "data", name, "an image classifier needs images", f"pass one of {IMAGES}")
    train, test = image_rows(name, rows=settings.rows, calibration=settings.calibration)
    classes, most = int(model.config.num_labels), int(test[1].max()) + 1
    why = f"the model tells {classes} classes apart"
    require(classes >= most, "data", f"{name} with {most} classes", why, "pass the data it was trained for")
    image_format = image_format_of(folder, model.config)
    calibration = prepared(train[0], image_format)
    source = f"{len(test[0]):,} test images of {name}"
    source += "" if image_format.known else ", pixels from 0 to 1 (the folder names no mean and deviation)"
    evaluate = Classification(prepared(test[0], image_format), test[1])
    return Inputs(_title(settings, folder), model, evaluate, list(torch.split(calibration, BATCH)), "error", source)


def _of_text(settings: Settings, folder: Path, model: nn.Module) -> Inputs:
    name = settings.data or "none"
    do = "pass a .txt or .jsonl file, or alice"
    require(settings.data is not None, "data", name, "a language model needs text", do)
    limit = most_positions(model)
    fits = limit is None or settings.length <= limit
    require(fits, "length", settings.length, f"the model has {limit} positions", f"pass --length {limit} or less")
    tokens = token_rows(name, load_tokenizer(folder), rows=settings.rows, length=settings.length)
    known, highest = vocabulary(model), int(tokens.max())
    why = f"the model knows {known} tokens, the tokenizer gives token {highest}"
    require(highest < known, "model", folder, why, "use the tokenizer that belongs to the model")
    source = f"{len(tokens):,} rows of {settings.length} tokens of {Path(name).name}"
    return Inputs(_title(settings, folder), model, NextToken(tokens), None, "loss", source)


def gather(settings: Settings) -> Inputs:
    """Open everything that a scan reads; nothing is written."""
    path = Path(settings.model)
    if settings.entry is not None:
        weights = read_weights(path)
        inputs = open_entry(settings.entry)
        fill_(inputs.model, weights, path)
        return inputs
    # A path may contain a colon, so an existing one wins over an entry point.
    if ":" in settings.model and not path.exists():
        return open_entry(settings.model)
    folder = folder_at(path)
    model, kind = open_folder(folder)
    return (_of_images if kind == "images" else _of_text)(settings, folder, model.eval())

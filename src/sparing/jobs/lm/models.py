"""A model directory of the user: opened, checked and written, without pickle and without the network."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from sparing.errors import UserError
from sparing.jobs import hub
from sparing.jobs.disk import digest
from sparing.jobs.lm.documents import NAME, check_documents, loader_arguments, refused
from sparing.jobs.lm.names import Attention
from sparing.report.quiet import errors_alone, silently

INSTALL = "pip install 'sparing[lm]'"

Head = Literal["causal language model", "image classifier", "masked language model", "sequence-to-sequence model"]
# What a model is loaded as, and the class of transformers that does it.
CLASSES: dict[Head, str] = {
    "causal language model": "AutoModelForCausalLM", "image classifier": "AutoModelForImageClassification",
    "masked language model": "AutoModelForMaskedLM", "sequence-to-sequence model": "AutoModelForSeq2SeqLM",
}  # fmt: skip

# For every loader: no network, no foreign code, and no prompt about it at the terminal.
LOADER_OPTIONS: dict[str, bool] = {"local_files_only": True, "trust_remote_code": False}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        why = "language models need it"
        raise UserError("transformers", got="not installed", why=why, do=f"run {INSTALL}") from None
    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the loaders' bars and advice off the terminal; what matters is said in our own errors."""
    bars = _transformers().utils.logging.is_progress_bar_enabled()
    with silently():
        _ = _transformers().modeling_utils
    _transformers().utils.logging.disable_progress_bar()
    try:
        with errors_alone("transformers"):
            yield
    finally:
        if bars:
            _transformers().utils.logging.enable_progress_bar()


def _refuse(
    path: Path, why: str, do: str = "save the model again with save_pretrained", *, what: str = "model"
) -> NoReturn:
    raise UserError(what, got=path, why=why, do=do) from None


def _refuse_foreign(path: Path, error: Exception) -> None:
    """Refuse what only runs with code that lies beside it, in other words than the loader's advice to run it."""
    if NAME in str(error):
        raise refused() from None
    if "trust_remote_code" in str(error):
        _refuse(path, "it needs code of its own, and code of others is not run", "pass a model of transformers itself")


def _words(error: Exception) -> str:
    """The first line of another library's error, cut to what fits in ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"


def config_of(path: Path) -> Any:
    """Read and check ``config.json`` of a model directory."""
    do, path = "pass the directory that save_pretrained wrote", hub.folder_of(path, "config")
    if not path.is_dir():
        _refuse(path, "it is not a directory" if path.exists() else "there is no such directory", do)
    if not (path / "config.json").is_file():
        _refuse(path, "it has no config.json", do)
    # outside the ``try``: a missing extra is no fault of the file
    library = _transformers()
    try:
        plain = json.loads((path / "config.json").read_text(encoding="utf-8"))
        quantised = bool(plain.get("quantization_config"))
        config = library.AutoConfig.from_pretrained(path, **LOADER_OPTIONS)
    except Exception as error:  # noqa: BLE001 - as below: a field of a wrong type has errors of its own
        _refuse_foreign(path, error)
        _refuse(path, f"its config.json is broken ({_words(error)})")
    check_fields(path, config)
    if quantised:
        _refuse(path, "its parameters are quantised and cannot be trained", "pass the unquantised model")
    return config


# Fields that are counts above zero, where a configuration has them.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip


def check_fields(path: Path, config: Any, *, what: str = "model") -> None:
    """Reject what transformers accepts and nothing can be built from."""
    named = getattr(config, "architectures", None) or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        _refuse(path, "its config.json is broken (architectures is no list of names)", what=what)
    text = config.get_text_config()
    for name in SIZES:
        value = getattr(text, name, None)
        if not (value is None or (isinstance(value, int) and 0 < value < 2**31) or isinstance(value, list)):
            _refuse(path, f"its config.json is broken ({name} is {str(value)[:40]})", what=what)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    head: Head = "causal language model",
    attention: Attention = "auto",
) -> nn.Module:
    """Load a model from its directory, safetensors only, in evaluation mode."""
    config, path = config_of(path), hub.folder_of(path)
    if not any(path.glob("*.safetensors")):
        _refuse(path, "it has no *.safetensors weights, and pickled ones are not opened")
    auto = getattr(_transformers(), CLASSES[head])
    try:
        # Loading may draw random numbers; the caller's generator must not change.
        how: dict[str, Any] = LOADER_OPTIONS | loader_arguments(attention)
        with _quiet(), torch.random.fork_rng(devices=[]):
            model, report = auto.from_pretrained(
                path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **how
            )
    except Exception as error:  # noqa: BLE001 - the loader raises errors of a dozen libraries; the user needs one line
        _refuse_foreign(path, error)
        article = "an" if head[0] in "aeiou" else "a"
        _refuse(path, f"its weights cannot be loaded as {article} {head} ({_words(error)})")
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = sorted(str(name) for name in report[kind])
            _refuse(path, f"{kind.split('_')[0]} weights: {', '.join(names[:3])} ({len(names)} in all)")
    if attention == "documents":
        check_documents(model)
    model.to(device)
    if head == "causal language model":
        # it must read two tokens: only a forward pass shows that its weights fit its configuration and number format
        try:
            with torch.no_grad():
                model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=device))
        except Exception as error:  # noqa: BLE001 - as above
            number = str(next(model.parameters()).dtype).removeprefix("torch.")
            do = "load it in another number format, or save it again with save_pretrained"
            _refuse(path, f"it cannot be run in {number} ({_words(error)})", do)
    return model  # type: ignore[no-any-return]


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer beside a model."""
    why, do = "it has no usable tokenizer", "save it there with tokenizer.save_pretrained"
    path = hub.folder_of(path, "tokenizer")
    if not any(path.glob("tokenizer*")) and not any(path.glob("*vocab*")):
        _refuse(path, why, do)
    try:
        with _quiet():
            return _transformers().AutoTokenizer.from_pretrained(path, **LOADER_OPTIONS)
    except Exception as error:  # noqa: BLE001 - as above: one line for whatever the loader met
        _refuse_foreign(path, error)
        _refuse(path, f"{why} ({_words(error)})", do)


def most_positions(model: nn.Module) -> int | None:
    """Longest row (tokens) the model has positions for; None where the configuration names no limit."""
    config: Any = model.config
    limit = getattr(getattr(config, "get_text_config", lambda: config)(), "max_position_embeddings", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else None


def vocabulary(model: nn.Module) -> int:
    """Rows of the model's input embedding."""
    embedding: Callable[[], Any] = model.get_input_embeddings  # type: ignore[assignment]
    return int(embedding().weight.shape[0])


def hash_folder(path: Path) -> str:
    """SHA-256 of a model directory: the names of its files and every byte in them."""
    files = hub.files_of_model(path)
    # threads are enough: hashlib gives up the lock of the interpreter while it reads and hashes
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = list(pool.map(_hash_of, files))
    total = hashlib.sha256()
    for file, own in zip(files, hashes, strict=True):
        total.update(f"{file.name}:{own}\n".encode())
    return total.hexdigest()


# Hashes by file, so that a run reads each once. They are not kept on disk: a stored hash may be of older weights, and
# loading reads every byte anyway.
_hashes: dict[tuple[str, int, int, int, int], str] = {}


def _hash_of(file: Path) -> str:
    """SHA-256 of a file, from memory if it cannot have been written to since: every write changes its times."""
    found = file.stat()
    key = str(file.resolve()), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    if key not in _hashes:
        own = digest(file)
        if time.time_ns() - max(key[3:]) < _TICK:
            # a write that follows within a tick of the file system's clock would look the same
            return own
        _hashes[key] = own
    return _hashes[key]


_TICK = 2 * 10**9  # coarsest clock of a file system in use (nanoseconds)


def save_pretrained(model: Any, tokenizer: Any, draft: Path) -> None:
    """Write a model and its tokenizer into an existing directory so that transformers loads them."""
    with _quiet():
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

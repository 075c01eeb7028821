"""Models and data sets by the names that they have on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION.

What lies on the disk under that path comes first, then the hub's own cache, then, where it may be asked, the hub. A run
pins a name to its commit before it reads anything: from there on it is OWNER/NAME@COMMIT, in record and ``run.toml``
too, and a run that is resumed goes on with the commit that it began with. Only safetensors, settings, tokenizers and
files of rows are downloaded, and nothing of it is run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

from sparing.errors import UserError, require

Kind = Literal["model", "config", "tokenizer", "data"]

PATIENCE = 10.0
"""For the hub's first answer (seconds)."""

_TOKENIZERS = ("config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
               "*.jinja", "*.model")  # fmt: skip
ROWS = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".jsonl.gz", ".json.gz", ".csv.gz", ".txt.gz")
# What is downloaded of each kind: no pickle, no code; of models nothing in folders, which are for other programs.
FILES: dict[Kind, tuple[str, ...]] = {
    "model": ("*.json", "*.safetensors", "README.md", *_TOKENIZERS),
    "config": ("config.json",),
    "tokenizer": _TOKENIZERS,
    "data": ("README.md", *(f"*{ending}" for ending in ROWS)),
}
_LEFT_THERE = ("*/*", "consolidated*")  # the second are the same weights once more, for the code of their author

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<config>[\w.-]+))?(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ENDINGS = (*ROWS, ".safetensors", ".yml", ".yaml", ".toml", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".gguf",
            ".gz", ".zip", ".tar", ".git", ".md", ".py")  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnHub:
    """In the type of a setting: its value may be a name on the hub."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class Name:
    """A name on the hub, as it was written."""

    repo: str
    config: str = ""  # of a data set that has several
    revision: str = ""  # branch, tag or commit; empty: main

    def __str__(self) -> str:
        config, revision = f":{self.config}" * bool(self.config), f"@{self.revision}" * bool(self.revision)
        return f"{self.repo}{config}{revision}"


def name_of(value: Path | str) -> Name | None:
    """The name that a value is; None where it is a path: one that is there, or that a slip of the hand misses.

    Example:
        >>> name_of("HuggingFaceTB/SmolLM2-135M@main").repo, name_of("some_folder"), name_of("notes/new.jsonl")
        ('HuggingFaceTB/SmolLM2-135M', None, None)
    """
    text = str(value)
    found = _NAME.fullmatch(text)
    if found is None or "--" in found["repo"] or ".." in text or text.lower().endswith(_ENDINGS):
        return None
    # our own runs write these
    if found["repo"].partition("/")[2] in {"model", "adapter"}:
        return None
    # a folder of the owner's name says that a file in it was meant
    if Path(text).exists() or Path(text).parts[0] in {".", ".."} or Path(Path(text).parts[0]).exists():
        return None
    return Name(found["repo"], found["config"] or "", found["revision"] or "")


def title(value: Path | str) -> str:
    """What a model or a data set is called: without owner and commit, or without the folders above it."""
    name = name_of(value)
    return Path(value).name if name is None else name.repo.partition("/")[2]


def source(value: Path | str) -> str:
    """Where others find it: owner and name on the hub, or the last part of a path."""
    name = name_of(value)
    return Path(value).name if name is None else name.repo


def folder_of(path: Path, kind: Kind = "model") -> Path:
    """The folder of a model: a path as it is, and of a pinned name its snapshot in the cache; nothing is downloaded.

    Raises:
        UserError: If the cache does not have it.
    """
    name = name_of(path)
    if name is None:
        return path
    if (found := _cached(name, kind)) is None:
        _refuse_absent("model" if kind != "data" else "data", name, "nothing was downloaded")
    return found


def files_of_model(path: Path) -> list[Path]:
    """The files of a model's folder, sorted; of a snapshot those that are ours, for other programs add to it."""
    files = sorted(file for file in folder_of(path).iterdir() if file.is_file())
    ours = set(_wanted([file.name for file in files], "model"))
    return [file for file in files if file.name in ours or name_of(path) is None]


def names(settings: Any) -> Iterator[tuple[str, Kind, Path | str]]:
    """Setting, kind and value of every name on the hub that settings have."""
    owner: Any = type(settings)  # to mypy a dataclass with a method is not hashable as a class
    for field, kind in _fields(owner).items():
        value = getattr(settings, field)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and name_of(one) is not None:
                yield field, kind, one


@cache
def _fields(settings: Any) -> Mapping[str, Kind]:
    found = {}
    for field, hint in get_type_hints(settings, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, OnHub):
                found[field] = extra.kind
    return found


def pinned(settings: Any, before: Mapping[str, str]) -> Any:
    """Settings with every name at its commit, downloaded where it is not in the cache; others come back as they are.

    ``before`` are commits that names without a revision had when the run began.

    Raises:
        UserError: If a name is unknown, or cannot be had here.
    """
    changed: dict[str, Any] = {}
    owner: Any = type(settings)
    for field, kind in _fields(owner).items():
        value = getattr(settings, field)
        whole = value if isinstance(value, tuple) else (value,)
        now = tuple(_pinned(one, kind, field, settings.download, before) for one in whole)
        if now != whole:
            changed[field] = now if isinstance(value, tuple) else now[0]
    return dataclasses.replace(settings, **changed) if changed else settings


def commits(settings: Any) -> dict[str, str]:
    """The commit of every name that is pinned, by setting and name; of a name at several commits, all of them."""
    found: dict[str, str] = {}
    for field, _, value in names(settings):
        name = name_of(value)
        if name is not None and _COMMIT.fullmatch(name.revision):
            key = f"{field} {name.repo}"
            found[key] = f"{found[key]} {name.revision}" if key in found else name.revision
    return found


def _pinned(value: Any, kind: Kind, field: str, download: bool, before: Mapping[str, str]) -> Any:
    name = None if value is None else name_of(value)
    if name is None:
        return value
    # of a name that had several commits nobody can say which was meant; what is read has a hash, which is compared
    known = before.get(f"{field} {name.repo}", "")
    wanted = name if name.revision or not _COMMIT.fullmatch(known) else dataclasses.replace(name, revision=known)
    found = _cached(wanted, kind)
    if found is None or not _is_whole(found, kind):
        enough, why = found is not None and _is_whole(found, kind, least=True), _why_offline(download)
        if why is None:
            try:
                found = _downloaded(wanted, kind, field)
            except UserError:
                # of a model that never had a tokenizer everything may be here
                if not enough:
                    raise
        elif not enough:
            _refuse_absent(field, wanted, why, part=found is not None)
    assert found is not None
    return type(value)(str(dataclasses.replace(name, revision=found.name)))


def _why_offline(download: bool) -> str | None:
    from huggingface_hub import is_offline_mode

    if not download:
        return "--no-download is passed"
    return "HF_HUB_OFFLINE is set" if is_offline_mode() else None


def _cached(name: Name, kind: Kind) -> Path | None:
    """The snapshot that the cache has of a name, perhaps not all of it."""
    try:
        from huggingface_hub import snapshot_download, try_to_load_from_cache
    except ImportError:
        why, do = "names on the hub need it", "run pip install 'sparing[lm]', or pass a folder"
        raise UserError("huggingface_hub", got="not installed", why=why, do=do) from None
    revision = name.revision or None
    if kind == "data":
        try:
            return Path(snapshot_download(name.repo, repo_type="dataset", revision=revision, local_files_only=True))
        except (OSError, ValueError) as error:
            part = getattr(error, "snapshot_path", None)
            return None if part is None else Path(part)
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        found = try_to_load_from_cache(name.repo, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _is_whole(folder: Path, kind: Kind, *, least: bool = False) -> bool:
    """Whether a snapshot has all that its kind needs; ``least`` does without a tokenizer, which not every model has."""
    if kind == "data":
        return _has_all_rows(folder)
    if kind == "config":
        return (folder / "config.json").is_file()
    reads = any(next(folder.glob(f"{one}*"), None) for one in ("tokenizer", "vocab", "preprocessor_config"))
    if kind == "tokenizer":
        return reads
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError):
            return False
        weights = all((folder / part).is_file() for part in parts)
    else:
        weights = any(file.is_file() for file in folder.glob("*.safetensors"))
    return weights and (folder / "config.json").is_file() and (least or reads)


def _has_all_rows(folder: Path) -> bool:
    """Whether every file of rows that the hub lists is here; without a list nobody can tell, and rows would be lost."""
    try:
        from huggingface_hub import get_cached_repo_tree

        repo = folder.parent.parent.name.removeprefix("datasets--").replace("--", "/")
        listed = get_cached_repo_tree(repo, repo_type="dataset", revision=folder.name)
    except Exception:  # noqa: BLE001 - no list in the cache, or a library that keeps none
        return False
    return all((folder / file).is_file() for file in _wanted([file.path for file in listed], "data"))


def _wanted(files: Iterable[str], kind: Kind) -> list[str]:
    """Those files of a repository that are downloaded."""
    left = () if kind == "data" else _LEFT_THERE
    return [
        file
        for file in files
        if any(fnmatch(file, one) for one in FILES[kind]) and not any(fnmatch(file, one) for one in left)
    ]


def _refuse_absent(field: str, name: Name, why: str, *, part: bool = False) -> NoReturn:
    of_data = " --repo-type dataset" if field.endswith("data") else ""
    at = f" --revision {name.revision}" * bool(name.revision)
    why = f"the Hugging Face cache has {'only a part of it' if part else 'none of that name'}, and {why}"
    do = f"run hf download {name.repo}{of_data}{at} where there is a network, or pass a folder that is here"
    raise UserError(field, got=name, why=why, do=do)


def _downloaded(name: Name, kind: Kind, field: str) -> Path:
    """Download what is missing of a name; one question first, which the hub has ``PATIENCE`` to answer."""
    from huggingface_hub import HfApi, errors, snapshot_download

    of, revision = "dataset" if kind == "data" else "model", name.revision or None
    local = "or pass a folder that is here"
    try:
        info = HfApi().repo_info(name.repo, repo_type=of, revision=revision, timeout=PATIENCE, files_metadata=True)
        _check(name, kind, field, info)
        left = [] if kind == "data" else list(_LEFT_THERE)
        how: dict[str, Any] = {"allow_patterns": list(FILES[kind]), "ignore_patterns": left}
        # by its revision, not its commit: so the cache learns what main is, and is enough the next time
        return Path(snapshot_download(name.repo, repo_type=of, revision=revision, **how))
    except UserError:
        raise
    except errors.GatedRepoError:
        why, do = "its owner asks for consent first", f"give it on the hub's page and run hf auth login, {local}"
    except errors.RepositoryNotFoundError:
        why, do = f"the hub has no such {of}, or it is private", f"mend the name, run hf auth login, {local}"
    except errors.RevisionNotFoundError:
        why, do = "the hub has no such revision of it", "pass a branch, tag or commit behind @"
    except errors.HfHubHTTPError as error:
        why, do = f"the hub answered {getattr(error.response, 'status_code', 'with an error')}", f"try later, {local}"
    except Exception as error:  # noqa: BLE001 - the clients of two generations raise errors of their own
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:100]}"
        why = f"it is not in the Hugging Face cache, and the hub cannot be reached ({said})"
        do = f"run hf download {name.repo} where there is a network, {local}"
    raise UserError(field, got=name, why=why, do=do) from None


def _check(name: Name, kind: Kind, field: str, info: Any) -> None:
    """Refuse what cannot be used before it is downloaded, and say what is."""
    from sparing.report import format_number

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = _wanted(sizes, kind)
    pickled = kind == "model" and not any(file.endswith(".safetensors") for file in wanted)
    why = "it has no *.safetensors weights, and pickled ones are not opened"
    require(not pickled, field, name, why, "pass another revision, or a model that has them")
    rows = kind != "data" or any(file != "README.md" for file in wanted)
    why = f"none of its files ends in {', '.join(ROWS[:5])}"
    require(rows, field, name, why, "write its rows to a file, and pass that")
    size = format_number(sum(sizes[file] for file in wanted), "B")
    sys.stderr.write(f"note: downloading {len(wanted)} files of {name.repo} at {info.sha[:12]} ({size})\n")


def files_of_data(path: Path, *, held_out: bool = False) -> list[Path]:
    """Files with the training rows of a pinned data set, or, ``held_out``, with its rows for validation or test.

    ``datasets`` says which files these are; it reads the card for that and runs nothing.

    Raises:
        UserError: If its card names files elsewhere, or the part is not there.
    """
    name = name_of(path)
    assert name is not None
    folder = folder_of(path, "data")
    found = _splits(folder, name)
    known = ("validation", "test") if held_out else ("train",)
    split = next((one for one in known if one in found), None)
    what = "held_out_data" if held_out else "data"
    why, do = f"its parts are {', '.join(found)}", "pass the files that you mean"
    if split is None:
        raise UserError(what, got=name, why=f"it has no part named {' or '.join(known)}: {why}", do=do)
    # lexically: files of a snapshot are links to blobs beside it
    files = [Path(file) for file in found[split]]
    inside = all(file.is_relative_to(folder) and ".." not in file.parts for file in files)
    require(inside, what, name, "its card names files elsewhere", do)
    other = next((file for file in files if not file.name.lower().endswith(ROWS)), None)
    why = f"{other and other.name} ends in none of {', '.join(ROWS[:5])}"
    require(other is None, what, name, why, "write its rows to a file, and pass that")
    return files


def _splits(folder: Path, name: Name) -> Mapping[str, list[str]]:
    """Files of every part of a data set by the part's name."""
    import tempfile

    from huggingface_hub import DatasetCard

    try:
        import datasets
    except ImportError:
        do = "run pip install 'sparing[lm]'"
        raise UserError("datasets", got="not installed", why="data sets on the hub need it", do=do) from None
    do = "pass the files that you mean"
    card = folder / "README.md"
    try:
        told = DatasetCard.load(card, ignore_metadata_errors=True).data.to_dict() if card.is_file() else {}
        # before datasets sees the card: it would fetch them
        require("://" not in json.dumps(told.get("configs"), default=str), "data", name, "its card names files "
                "elsewhere", do)  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            made = datasets.load_dataset_builder(str(folder), name=name.config or None, cache_dir=place)
        return {str(split): list(files) for split, files in (made.config.data_files or {}).items()}
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - of a dozen kinds
        said = " ".join(str(error).split())[:160]
        advice = "pass OWNER/NAME:CONFIG" if "onfig" in said else do
        raise UserError("data", got=name, why=f"datasets cannot tell its parts ({said})", do=advice) from None

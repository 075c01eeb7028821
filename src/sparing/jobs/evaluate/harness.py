"""Tasks by lm-evaluation-harness, from task files on this disk: no code of a file is run and nothing is downloaded.

Templates of a file are rendered in Jinja's sandbox, and metrics are those that the harness itself has.

Source: Gao et al., lm-evaluation-harness, https://github.com/EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sparing.errors import RunError, UserError, require
from sparing.report.quiet import errors_alone, silently

INSTALL = "run pip install 'sparing[eval]'"

LOCAL = ("json", "csv", "parquet", "text")
"""What datasets reads from files by itself."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task file, read and checked."""

    name: str
    config: dict[str, Any]
    files: tuple[Path, ...]  # itself and its rows


def _library() -> Any:
    try:
        with silently():
            for part in ("models.huggingface", "tasks"):
                importlib.import_module(f"lm_eval.{part}")
    except ImportError as error:
        got = "not installed" if error.name == "lm_eval" else f"installed without {error.name}"
        raise UserError("lm_eval", got=got, why="tasks are measured by it", do=INSTALL) from None
    return importlib.import_module("lm_eval")


def read_task(path: Path) -> Task:
    """Read a task file; its rows must lie on this disk.

    Raises:
        UserError: If it names code, a data set elsewhere, or no task.
    """
    _library()
    import yaml  # type: ignore[import-untyped]

    do = "pass a task file whose rows lie in files: dataset_path: json, dataset_kwargs: {data_files: …}"
    try:
        # the safe loader: ``!function`` names Python code, and it refuses every tag
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("tasks", got=path, why=f"it cannot be read ({error.strerror})", do=do) from None
    except (yaml.constructor.ConstructorError, UnicodeDecodeError) as error:
        why = f"it names code, which is not run ({str(error).splitlines()[0][:80]})"
        raise UserError("tasks", got=path, why=why, do="write what the function does as a template") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError("tasks", got=path, why=f"it is no YAML ({str(error).splitlines()[0][:80]})", do=do) from None
    named = isinstance(found, dict) and isinstance(found.get("task"), str)
    require(named, "tasks", path, "it has no `task: NAME`", "pass the file of one task; a group names others")
    for key in ("include", "custom_dataset", "group", "class"):
        require(key not in found, "tasks", path, f"`{key}` of a task file is not read here", "write it out in the file")
    for one in found.get("metric_list") or []:
        name = one.get("metric") if isinstance(one, Mapping) else one
        own = isinstance(name, str) and _registered(name) and not (isinstance(one, Mapping) and one.get("hf_evaluate"))
        why = f"metric {name} is none of the harness's own, and code for it would be loaded"
        require(own, "tasks", path, why, "take one that the harness registers, such as acc or exact_match")
    known = found.get("dataset_path") in LOCAL
    require(known, "tasks", path, f"its dataset_path is {found.get('dataset_path')}: rows from elsewhere", do)
    return _with_files(path, found, do)


def _registered(metric: str) -> bool:
    """Whether the harness has a metric of this name itself."""
    importlib.import_module("lm_eval.api.metrics")
    return metric in importlib.import_module("lm_eval.api.registry").METRIC_REGISTRY


def _with_files(path: Path, found: dict[str, Any], do: str) -> Task:
    """The task with the paths of its rows, which may be given from its own folder, made whole."""
    kwargs = found.get("dataset_kwargs")
    given = kwargs.get("data_files") if isinstance(kwargs, Mapping) else None
    parts = given if isinstance(given, Mapping) else {"train": given}
    whole: dict[str, list[str]] = {}
    for split, names in parts.items():
        whole[str(split)] = []
        for name in names if isinstance(names, list) else [names]:
            place = path.parent / str(name)
            there = name is not None and "://" not in str(name) and place.is_file()
            require(there, "tasks", path, f"its rows {name} are no file", do)
            whole[str(split)].append(str(place.resolve()))
    config = {**found, "dataset_kwargs": {**dict(kwargs or {}), "data_files": whole}}
    files = (path, *(Path(name) for names in whole.values() for name in names))
    return Task(found["task"], config, files)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Have datasets keep its copies of the rows in a folder that is gone afterwards, and be offline."""
    import datasets

    config: Any = datasets.config
    before = config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as place, silently(), errors_alone("lm_eval"), errors_alone("datasets"):
        config.HF_DATASETS_CACHE = Path(place)
        try:
            # its tables and bars are not for a terminal that shows ours
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            config.HF_DATASETS_CACHE = before


@contextlib.contextmanager
def _sandboxed() -> Iterator[None]:
    """Have the harness render templates where they reach no files and no insides of Python: anybody may write them."""
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    utils = importlib.import_module("lm_eval.utils")
    # otherwise as the harness's own
    safe = ImmutableSandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    safe.filters["regex_replace"] = utils.regex_replace
    before = utils.apply_template
    utils.apply_template = lambda template, doc: safe.from_string(template).render(**doc)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.apply_template = before  # type: ignore[attr-defined]


def measure(
    model: nn.Module, tokenizer: Any, task: Task, *, batch: int, shots: int | None, items: int | None
) -> list[dict[str, Any]]:
    """The metrics of a task: name, value, and where a metric is the mean of its items, the number of each item.

    Raises:
        RunError: If the harness cannot carry the task out.
    """
    library = _library()
    known: dict[str, Any] = {"log_samples": True, "bootstrap_iters": 0, "random_seed": 0, "numpy_random_seed": 0,
                             "torch_random_seed": 0, "fewshot_random_seed": 0}  # fmt: skip
    try:
        with _apart(), _sandboxed():
            wrapped = library.models.huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
            manager = library.tasks.TaskManager(include_defaults=False)
            found = library.simple_evaluate(
                model=wrapped, tasks=[dict(task.config)], task_manager=manager, num_fewshot=shots, limit=items, **known
            )
    except Exception as error:  # the harness and its templates raise anything
        words = (str(error).strip().splitlines() or [""])[0][:160]
        raise RunError(
            f"task {task.name}: the harness cannot carry it out ({type(error).__name__}: {words})"
        ) from error
    return rows_of(found["results"][task.name], found["samples"][task.name])


def rows_of(results: Mapping[str, Any], samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics of the harness's own tables; ``items`` are empty where the value is no mean of one number an item.

    Example:
        >>> rows_of({"acc,none": 0.5, "acc_stderr,none": "N/A"}, [{"acc": 1.0, "doc_id": 0}, {"acc": 0.0, "doc_id": 1}])
        [{'metric': 'acc', 'value': 0.5, 'items': [1.0, 0.0]}]
    """
    rows = []
    for key, value in results.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        own = [one for one in samples if one.get("filter", filtered) == filtered and metric in one]
        own.sort(key=lambda one: one["doc_id"])
        numbers = [one[metric] for one in own]
        plain = bool(numbers) and all(isinstance(one, int | float) for one in numbers)
        items = [float(one) for one in numbers] if plain else []
        # a metric may be something else than the mean, such as a perplexity
        means = bool(items) and abs(sum(items) / len(items) - value) < 1e-9
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        rows.append({"metric": name, "value": float(value), "items": items if means else []})
    return rows

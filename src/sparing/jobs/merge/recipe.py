"""``sparing merge RECIPE.yml``: what a mergekit recipe says, with nothing predicted and nothing measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from sparing.errors import UserError
from sparing.jobs.disk import digest, write_folder
from sparing.jobs.folder import print_page_path
from sparing.jobs.run import Run
from sparing.report import Progress, Record
from sparing.report.declared import Chapter, Rows, RunPage
from sparing.valley.merging.files import checkpoint
from sparing.valley.recipes.apply import merge_recipe
from sparing.valley.recipes.recipe import read_recipe

MODEL: Final = "model"

WORDS: Final = """\
The recipe was carried out as it is written, by the rules of mergekit. Nothing was predicted, and nothing measured: \
`sparing evaluate` measures the result, and `sparing merge` with models instead of a recipe predicts and measures."""


def _answer(record: Record) -> str:
    models, method = record.table("inputs"), record.table("recipe")[0]["method"]
    base = ", one of them the base," if any(row["base"] for row in models) and len(models) > 1 else ""
    return f"{len(models)} {'model was' if len(models) == 1 else f'models{base} were'} merged by {method}."


PAGE: Final = RunPage(
    "A recipe carried out",
    _answer,
    Chapter(
        "What was done",
        WORDS,
        Rows("recipe", "The recipe"),
        Rows("inputs", "Its models"),
        Rows("differences", "What differs between them and changes no function"),
        Rows("written", "What was written"),
    ),
    caveats=["Whether such a merge is any good, no recipe says: measure it on held-out rows."],
)


def run_recipe(settings: Any, path: Path) -> Record:
    """Carry out a recipe into OUT/model."""
    recipe = read_recipe(path)
    folders = [Path(one) for name in recipe.models for one in name.split("+")]
    notes: list[str] = []
    with Run(settings, writes=(MODEL,), reads=[path, *folders]) as run:
        question = f"What does {path.name} make of {len(recipe.models)} models?"
        record = Record(question=question, settings=settings, seed=settings.seed, units={"size": "B"})
        run.resume(record, hashes={"recipe": digest(path)})
        run.claim()

        def fill(draft: Path) -> None:
            with Progress("write", total=_size(folders), unit="B") as bar:
                merge_recipe(path, draft, seed=settings.seed, on_tensor=lambda name, size: bar.advance(size),
                             note=notes.append)  # fmt: skip

        write_folder(settings.out / MODEL, fill)
        sys.stderr.writelines(f"note: {sentence}\n" for sentence in notes)
        tables: dict[str, list[dict[str, Any]]] = {
            "recipe": [{"method": recipe.method, "file": path.name, "sha256": digest(path)[:16]}],
            "inputs": [{"model": name, "base": name == recipe.base} for name in recipe.models],
            "differences": [{"what": sentence} for sentence in notes],
            "written": [
                {"file": f"{MODEL}/{one.name}", "size": one.stat().st_size}
                for one in sorted((settings.out / MODEL).iterdir())
            ],
        }
        for table, row in ((table, row) for table, rows in tables.items() for row in rows):
            record.add(table, **row)
        return run.finish(PAGE.write)


def _size(folders: list[Path]) -> int:
    """About how much is written (bytes): the weights of the first model."""
    try:
        return sum(entry.size for entry in checkpoint(folders[0]).values())
    except UserError:
        return 1


def show_recipe(record: Record) -> None:
    """Print what was read and written."""
    PAGE.print_tables(record)
    sys.stdout.write(f"model: {Path(record.settings['out']) / MODEL}\n")
    print_page_path(record)

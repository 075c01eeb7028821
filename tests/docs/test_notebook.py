"""The notebook is the script, cell by cell, and its cells run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import sparing.data
from sparing.jobs.pretrain import job as pretraining
from sparing.report import Page

PLACE = Path(__file__).parents[2] / "docs" / "tutorials" / "notebook.py"
_spec = importlib.util.spec_from_file_location("notebook", PLACE)
notebook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebook)


def test_the_notebook_is_the_script():
    """``python docs/tutorials/notebook.py`` writes it anew."""
    made = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook.cells_of(made) == notebook.cells(notebook.SCRIPT.read_text(encoding="utf-8"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    assert any(cell.get("outputs") for cell in made["cells"])


def test_text_and_code_become_cells_and_back():
    script = '"""Own."""\n\n# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nprint(1)\n\nprint(2)\n'
    assert notebook.cells(script) == [("markdown", "# Title\n\nWords."), ("code", "print(1)\n\nprint(2)")]
    assert notebook.ran(["x = 1\nprint(x)", "print(x + 1)"]) == ["1\n", "2\n"]
    assert notebook.cells_of(notebook.notebook_of(script, ["1\n2\n"])) == notebook.cells(script)


def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two steps on a page of text, without pages and prices, which have tests of their own."""
    whole = sparing.data.bundled_text
    monkeypatch.setattr(sparing.data, "bundled_text", lambda name: whole(name)[: 6000 if name == "alice" else 20000])
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(Page, "write", lambda page, path: path.write_text(page.answer))
    monkeypatch.setattr(pretraining, "note_predicted", lambda *arguments: None)
    code = [text for kind, text in notebook.cells(notebook.SCRIPT.read_text(encoding="utf-8")) if kind == "code"]
    said = notebook.ran(code)
    assert "lisa: held-out loss" in said[-2]
    assert said[-1].startswith("LISA less full: ")
    assert {path.parent.name for path in tmp_path.glob("*/record.jsonl")} == {"base", "lisa", "full", "compared"}

"""Make ``examples/first_steps.ipynb`` of its script: ``python docs/tutorials/notebook.py`` runs and writes it.

In the script ``# %%`` begins a cell of code and ``# %% [markdown]`` one of text, as editors know it. A notebook is JSON
(https://nbformat.readthedocs.io), so that nothing needs to be installed for this.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "first_steps.py", EXAMPLES / "first_steps.ipynb"
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def cells(script: str) -> list[tuple[str, str]]:
    """Kind (code or markdown) and text of every cell of a script; what stands before the first is the script's own."""
    _, *parts = CELL.split(script)
    found = []
    for marked, body in zip(parts[::2], parts[1::2], strict=True):
        text = body.strip("\n")
        lines = (re.sub(r"^# ?", "", line) for line in text.split("\n"))
        found.append(("markdown", "\n".join(lines)) if marked else ("code", text))
    return found


def cells_of(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """The same of a notebook."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def ran(code: list[str]) -> list[str]:
    """What each cell prints, run one after the other in one module."""
    module: dict[str, Any] = {"__name__": "__main__"}
    said = []
    for text in code:
        with contextlib.redirect_stdout(io.StringIO()) as heard:
            exec(compile(text, SCRIPT.name, "exec"), module)  # noqa: S102 - of the repository itself
        said.append(heard.getvalue())
    return said


def notebook_of(script: str, said: list[str]) -> dict[str, Any]:
    """The notebook, with these outputs."""
    outputs, made = iter(said), []
    for at, (kind, text) in enumerate(cells(script)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{at}", "metadata": {}, "source": _lines(text)}
        if kind == "code":
            heard = next(outputs)
            stream = {"name": "stdout", "output_type": "stream", "text": _lines(heard)}
            cell |= {"execution_count": None, "outputs": [stream] if heard else []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    meta = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": meta, "nbformat": 4, "nbformat_minor": 5}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Run the cells and write the notebook."""
    script = SCRIPT.read_text(encoding="utf-8")
    said = ran([text for kind, text in cells(script) if kind == "code"])
    NOTEBOOK.write_text(json.dumps(notebook_of(script, said), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

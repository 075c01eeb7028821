"""Write under each block of the tutorials what it prints; ``python docs/tutorials/refresh.py [NAME ...]``.

Their fences say ``py``: pages with ``python`` are run by ``test_blocks_run``, these by ``test_tutorials``, which also
reads what they print.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BLOCK = re.compile(r"```py\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
BORDER = "\x1e"
"""Printed after every block."""


def blocks(text: str) -> list[tuple[str, str]]:
    """Code and printed lines, block by block."""
    return BLOCK.findall(text)


def script(text: str) -> str:
    """The blocks of a page as one program that prints a border after each."""
    return "".join(f"{code}print({BORDER!r}, flush=True)\n" for code, _ in blocks(text))


def said(output: str) -> list[str]:
    """What each block printed."""
    return [part.strip("\n") for part in output.split(BORDER)[:-1]]


def main(names: list[str]) -> None:
    """Rewrite the pages of these names, or all."""
    for page in sorted(HERE.glob("*.md")):
        if names and page.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "page.py"
            program.write_text(script(page.read_text()))
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(program)]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        page.write_text(filled(page.read_text(), said(done.stdout)))


def filled(text: str, printed: list[str]) -> str:
    """A page with these lines under its blocks."""
    lines = iter(printed)
    return BLOCK.sub(lambda found: f"```py\n{found[1]}```\n\n```text\n{next(lines)}\n```\n", text)


if __name__ == "__main__":
    main(sys.argv[1:])

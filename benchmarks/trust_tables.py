"""Tables of ``docs/results/trust.md`` from the committed JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.marks import marked
from benchmarks.memory_tables import table

RESULTS = Path(__file__).parent / "results"
VERDICTS = ("refused", "equal", "silent", "crashed", "unclear")


def rows_of(part: str) -> list[dict[str, Any]]:
    """Rows of a part, none where it was not measured."""
    path = RESULTS / f"trust_{part}.json"
    return list(json.loads(path.read_text())["rows"].values()) if path.exists() else []


def kills() -> str:
    """Every way of every job: kills, and whether the bits are the same."""
    lines = []
    for row in rows_of("kills"):
        moments = [kill for kill in row["moments"] if kill["hit"]]
        saved = sum(kill["saved_meanwhile"] for kill in moments)
        left = sum(kill["left_over"] for kill in moments)
        same = "the same" if row["same"] else f"differ in {', '.join(row['differ'])}"
        name = f"{row['job']} `{row['way']}`"
        lines.append([name, row["kills"], saved, left, len(row["left_over"]), len(row["compared"]), same])
    head = ["", "kills", "after a new checkpoint", "drafts found after a kill", "drafts at the end"]
    return table([*head, "files and tables compared", "final bits"], lines)


def mutations() -> str:
    """Damaged checkpoints by source."""
    return _counted("source", "")


def damages() -> str:
    """Damaged checkpoints by kind of damage."""
    return _counted("damage", "kind of damage")


def _counted(key: str, title: str) -> str:
    rows, lines = rows_of("mutations"), []
    for name in dict.fromkeys(row[key] for row in rows):
        of = [row for row in rows if row[key] == name]
        lines.append(
            [name.replace("_", " "), sum(row["trials"] for row in of), *(sum(r[v] for r in of) for v in VERDICTS)]
        )
    lines.append(["all", sum(row["trials"] for row in rows), *(sum(row[v] for row in rows) for v in VERDICTS)])
    head = ["trials", "refused in a line", "the same state", "another state", "traceback", "unclear line"]
    return table([title, *head], lines)


def disks() -> str:
    """What a run says on a disk that is full or fixed."""
    lines = []
    for row in rows_of("disks"):
        disk = f"full at {row['bytes'] // 1024} KiB" if row["disk"] == "full" else row["disk"]
        whole = "–" if row["disk"] != "full" else str(len(row["broken"]) + len(row["left_over"]))
        kept = "–" if row["disk"] != "full" else str(row["checkpoints"])
        said = f"`{row['said'].replace('|', '/')}`"
        lines.append([f"{row['job']}, {disk}", row["status"], said, kept, whole, "yes" if row["same"] else "no"])
    head = ["", "exit status", "the line", "checkpoints that load", "torn or temporary files", "as if undisturbed"]
    return table(head, lines)


def fuzz() -> str:
    """Fuzzed runs by verb: how they ended, and what went wrong."""
    rows, lines = rows_of("fuzz"), []
    for verb in (*dict.fromkeys(row["verb"] for row in rows), "all"):
        of = [row for row in rows if verb in {row["verb"], "all"}]
        ends = [sum(row["status"].get(status, 0) for row in of) for status in ("0", "1", "2", "130")]
        wrong = [case["wrong"] for row in of for case in row["wrong"]]
        traces, foreign = (sum(one.startswith(word) for one in wrong) for word in ("traceback", "changed"))
        lines.append([verb, sum(row["cases"] for row in of), *ends, traces, foreign, len(wrong) - traces - foreign])
    ends = ["done (0)", "failed (1)", "refused (2)", "stopped (130)"]
    return table(["", "cases", *ends, "tracebacks", "files of others changed", "any other fault"], lines)


def idioms() -> str:
    """Idiom suites by room: cells, and how many end in which outcome."""
    rows = sorted(rows_of("idioms"), key=lambda row: row["room"])
    keys = ("idioms", "cells", "equal", "refused")
    lines = [[row["room"], *(row[key] for key in keys)] for row in rows]
    lines.append(["all", *(sum(row[key] for row in rows) for key in keys)])
    return table(["", "idioms", "cells", "equal to an independent answer", "refused in a line"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "trust-kills": kills, "trust-mutations": mutations, "trust-damages": damages, "trust-disks": disks,
    "trust-fuzz": fuzz, "trust-idioms": idioms,
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every table that it has marks for."""
    return marked(page, {name: make() for name, make in TABLES.items() if f"<!-- {name} -->" in page})


def main() -> None:
    """Write the page."""
    path = Path(__file__).parents[1] / "docs" / "results" / "trust.md"
    path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()

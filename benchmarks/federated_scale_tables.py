"""Tables of a million clients and of ε beside other accountants for ``docs/results/federated.md``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.memory_tables import table

RESULTS = Path(__file__).parent / "results"


def _rows(part: str) -> dict[str, dict[str, Any]]:
    path = RESULTS / f"federated_{part}.json"
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


def million() -> str:
    """Memory and files of a run over a million clients, by round."""
    found = []
    for row in _rows("million").values():
        shown = (0, 3, 9, 19)
        for at, done in enumerate(row["rounds"]):
            if at in shown:
                grown = row["states"][at] - (row["states"][at - 1] if at else 0)
                since = done - (row["rounds"][at - 1] if at else 0)
                cells = [f"{row['resident'][at] / 1e6:.1f}", f"{row['states'][at] / 1e6:.1f}"]
                found.append([done, *cells, f"{grown / since / 1e3:.0f}", f"{row['checkpoint'][at] / 1e3:.1f}"])
    head = ["rounds", "resident set, MB", "file of clients' states, MB", "added in a round, kB", "checkpoint, kB"]
    return table(head, found)


def accountants() -> str:
    """ε of ours and of three accountants of pfl-research."""
    found = []
    for row in _rows("accountants").values():
        named = [
            f"{row['multiplier']:g}",
            f"{row['drawn']:,} of {row['clients']:,}",
            row["rounds"],
            f"{row['delta']:g}",
        ]
        theirs = [row["theirs"].get(name) for name in ("PLD", "PRV", "RDP")]
        off = [100 * abs(row["ours"] / each - 1) for each in theirs[:2] if each]
        cells = ["–" if each is None else f"{each:.4g}" for each in theirs]
        found.append([*named, f"{row['ours']:.4g}", *cells, f"{max(off):.2f} %" if off else "–"])
    head = ["noise", "clients in a round", "rounds", "δ", "ours", "PLD", "PRV", "RDP", "farther of PLD and PRV"]
    return table(head, found)


TABLES = {"federated-million": million, "federated-accountants": accountants}

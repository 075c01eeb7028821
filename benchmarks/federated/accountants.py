"""ε of private runs beside the accountants of pfl-research, which runs in an environment of its own.

Its PLD and RDP accountants are dp-accounting's, as ours is, by another path; its PRV accountant (Gopi, Lee & Wutschitz
2021, arXiv:2106.02848) is independent of both.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from benchmarks.federated.store import Store
from sparing.federated.accounting import epsilon

CASES = tuple(
    (multiplier, clients, drawn, rounds, delta)
    for multiplier in (0.6, 1.0, 3.0)
    for clients, drawn, rounds, delta in (
        (100, 10, 50, 1e-3), (10_000, 100, 500, 1e-5), (1_000_000, 1000, 2000, 1e-7), (50, 50, 20, 1e-2),
    )
)  # fmt: skip
"""Noise multiplier, clients, drawn of them in a round (in expectation), rounds, δ."""

THEIRS = """
import json, sys
from pfl.privacy import privacy_accountant as them
multiplier, clients, drawn, rounds, delta = json.loads(sys.argv[1])
found = {}
for name in ("PLD", "PRV", "RDP"):
    try:
        made = getattr(them, name + "PrivacyAccountant")(
            num_compositions=rounds, sampling_probability=drawn / clients, mechanism="gaussian", delta=delta,
            noise_parameter=multiplier)
        found[name] = float(made.epsilon)
    except Exception as error:
        found[name + " why"] = f"{type(error).__name__}: {error}"[:200]
print(json.dumps(found))
"""


def run(share: int, of: int) -> None:
    """A row for each case."""
    store = Store("accountants")
    for case in CASES[share::of]:
        store.once(", ".join(f"{value:g}" for value in case), lambda case=case: measured(*case))


def measured(multiplier: float, clients: int, drawn: int, rounds: int, delta: float) -> dict[str, Any]:
    """Ours, and theirs by name."""
    ours = epsilon([multiplier] * rounds, clients=clients, drawn=drawn, sampling="poisson", delta=delta)
    case = json.dumps([multiplier, clients, drawn, rounds, delta])
    ran = subprocess.run(
        [os.environ["SPARING_PFL"], "-c", THEIRS, case], check=True, capture_output=True, text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    theirs = json.loads(ran.stdout.splitlines()[-1])
    about = {"multiplier": multiplier, "clients": clients, "drawn": drawn, "rounds": rounds, "delta": delta}
    return {**about, "ours": ours, "theirs": theirs}

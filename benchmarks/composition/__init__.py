"""Where two techniques meet, measured: layer sampling under a sharding plan, and importance learned by hypergradients.

Run ``python -m benchmarks.composition --only lisa_sharding`` on a machine that does nothing else, as root: its ranks
sit in network namespaces with links held to given rates. ``--only importance`` minds no company. A finished row is not
measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    name: lambda options, place=name: import_module(f"benchmarks.composition.{place}").run(options)
    for name in ("lisa_sharding", "importance")
}
"""Part -> what measures it."""

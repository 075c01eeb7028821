"""``python -m benchmarks.data_selection [--seeds N] [--only CASE]``: measure, row by row, what is not measured yet."""

from __future__ import annotations

import argparse

import torch

from benchmarks.data_selection import study, weigh
from benchmarks.data_selection.cases import CASES
from benchmarks.data_selection.study import Store, one_size, references, smoothness

SEEDS = 5


def run(seeds: int, only: str) -> None:
    """Measure what the file does not have yet, a whole seed of a case after the other."""
    kept = Store()
    study.about(kept)
    weigh.about(kept)
    for seed in range(seeds):
        for case in (case for name, case in CASES.items() if name.startswith(only)):
            smoothness(kept, case, seed)
            whole, alone = references(kept, case, seed)
            for count in case.kept:
                one_size(kept, case, seed, count, whole, alone)
            weigh.all_ways(kept, case, seed)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="cases whose name starts with this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run(given.seeds, given.only)


if __name__ == "__main__":
    main()

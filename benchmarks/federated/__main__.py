"""``python -m benchmarks.federated [--only PART …] [--part 0/2]``: measure, row by row, what is not measured yet."""

from __future__ import annotations

import argparse

import torch

from benchmarks.federated import PARTS, long


def _share(text: str) -> tuple[int, int]:
    """Read ``0/2``."""
    share, of = map(int, text.split("/"))
    if not 0 <= share < of:
        raise argparse.ArgumentTypeError(f"{text} is no share")
    return share, of


def main() -> None:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--part", type=_share, default=(0, 1), help="which share of the work, such as 0/2")
    torch.set_num_threads(1)
    parser.add_argument("--seeds", type=int, help="how many seeds the part long has; 3 by default")
    parser.add_argument("--alphas", type=float, nargs="+", default=long.ALPHAS, help="those of the part long")
    asked = parser.parse_args()
    if asked.seeds is not None:
        long.SEEDS = range(asked.seeds)
    long.ALPHAS = tuple(asked.alphas)
    for part in asked.only:
        PARTS[part](*asked.part)


if __name__ == "__main__":
    main()

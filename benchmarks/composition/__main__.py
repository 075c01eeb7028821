"""``python -m benchmarks.composition [--only PART …]``: measure, row by row, what is not measured yet."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.composition import PARTS
from benchmarks.network.arms import PLANS


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    say = parser.add_argument
    say("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    say("--out", type=Path, help="another file than that of the committed results; of one part only")
    group = parser.add_argument_group("lisa_sharding")
    say = group.add_argument
    say("--plans", nargs="+", choices=PLANS, default=PLANS, metavar="PLAN")
    say("--accumulate", nargs="+", type=int, default=(4, 1), help="micro-steps of a step")
    say("--rounds", type=int, default=5, help="rounds that count, each with a draw of its own")
    say("--steps", type=int, default=2, help="most steps of one arm in one round")
    say("--seconds", type=float, default=1.5, help="about how long one arm may take in one round")
    say("--probe", type=float, default=10.0, help="seconds for measuring the links as the library does")
    say("--links", choices=["shaped", "free"], default="shaped")
    say("--log", type=Path, help="file for what the ranks write to standard error")
    group = parser.add_argument_group("importance")
    say = group.add_argument
    say("--seeds", nargs="+", type=int, default=tuple(range(5)))
    return parser.parse_args()


def main() -> None:
    """Run the parts in order."""
    options = parsed()
    torch.set_num_threads(1)
    for part in options.only:
        PARTS[part](options)


if __name__ == "__main__":
    main()

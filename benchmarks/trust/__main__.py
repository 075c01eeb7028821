"""``python -m benchmarks.trust [--only PART …] [--job JOB …] [--part 0/2]``: try what was not tried yet."""

from __future__ import annotations

import argparse

import torch

from benchmarks.trust import JOBS, KILLED, PARTS


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
    parser.add_argument("--job", nargs="+", choices=KILLED)
    parser.add_argument("--part", type=_share, default=(0, 1), help="which share of the work, such as 0/2")
    torch.set_num_threads(1)
    asked = parser.parse_args()
    for part in asked.only:
        PARTS[part](asked.job or (KILLED if part == "kills" else JOBS), *asked.part)


if __name__ == "__main__":
    main()

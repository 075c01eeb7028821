"""``python -m benchmarks.valley [--only PART …] [--seeds 0 1]``: measure, row by row, what is not measured yet."""

from __future__ import annotations

import argparse

import torch

from benchmarks.valley import PARTS


def main() -> None:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    torch.set_num_threads(1)
    for part in parser.parse_args().only:
        PARTS[part]()


if __name__ == "__main__":
    main()

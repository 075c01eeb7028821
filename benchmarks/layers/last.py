"""The control of every sampler: the last blocks alone, always the same, beside the best of the search and its rivals.

Added when the search had put the last three blocks first and its test rows had been seen: the question is then how much
of that is embedding and head, and what is gained where everything below the blocks that train is frozen, so that the
backward pass ends there. Rates are chosen on development rows, as everywhere; test rows judge all arms from the same
weights.

``python -m benchmarks.layers.last`` goes on where it stopped; ``--list`` says what is left.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.layers import search
from benchmarks.layers.arms import ARMS, last
from benchmarks.layers.study import ENDS, LADDER_1, command

BESIDE = ("no training", "full", "LoRA, rank 8", "LoRA, rank 8, embedding and head whole")
LEAN = last(4, of=search.LAYERS, centre=-20, embed=False)
"""As few blocks as the search gave to draws with a frozen embedding."""
WINNER = next(arm for arm in search.CANDIDATES if arm.name == "search: last three blocks")
STUDY = replace(LADDER_1, arms=(*(arm for arm in ARMS if arm.name in BESIDE), WINNER, ENDS[1], LEAN))


def main() -> None:
    """Do what is missing, or say what it is."""
    command(__doc__, lambda rows: STUDY)


if __name__ == "__main__":
    main()

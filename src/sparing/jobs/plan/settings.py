"""What a person may ask of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparing.errors import require
from sparing.jobs.limits import at_least
from sparing.memory import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What fits in this memory: full fine-tuning, LISA, LoRA, with and without checkpointing; the pick, and why."""

    model: Path
    """Hugging Face directory, or a config.json; weights are neither needed nor read."""

    memory: str = "24GB"
    """Memory of the device ("24GB" is 24·10⁹ bytes, "24GiB" is 24·2³⁰)."""

    batch: int = 1
    """Sequences at once (count)."""

    length: int = 1024
    """Tokens a sequence (count)."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights, activations, gradients and moments."""

    active: tuple[int, ...] = (2, 4, 8)
    """Numbers of blocks that LISA trains at a time (counts); the paper's γ."""

    period: int = 20
    """Optimizer steps between LISA's draws (count); the paper's K."""

    ranks: tuple[int, ...] = (16, 128)
    """Ranks of LoRA on every linear layer of the blocks (counts)."""

    masters: bool = False
    """Whether LISA's trained parameters have 32-bit copies and moments, as a bfloat16 run at a small rate needs."""

    steps: int = 1000
    """Optimizer steps of the run (count), for the share of blocks that LISA reaches."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """Fused attention, or one that holds all scores."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Whose optimizer step: on CUDA it works on all parameters at once, with temporaries as large as they are."""

    ledger: bool = False
    """Run each candidate on fake tensors instead of by closed formula: any architecture, seconds to a minute each."""

    out: Path = Path("runs/plan")
    """Folder of record and page."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            UserError: If a count is below one, nothing is to be compared, or the memory has no unit.
        """
        parse_bytes(self.memory)
        at_least(1, self, "batch", "length", "period", "steps")
        for name in ("active", "ranks"):
            counts = getattr(self, name)
            require(min(counts, default=1) >= 1, name, counts, "these are counts", "pass 1 or more of each")

"""Names that settings give to attention, number formats and optimizers; read without loading torch."""

from typing import Literal

Attention = Literal["auto", "documents", "sdpa", "eager"]
Weights = Literal["nf4", "int8"]
OptimizerName = Literal[
    "adamw", "adamw-8bit", "paged-adamw-8bit", "adamw-4bit", "adafactor", "apollo", "apollo-mini", "galore",
    "offloaded-adamw",
]  # fmt: skip

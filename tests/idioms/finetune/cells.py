"""What people give to fine-tuning, and what is learnt of it."""

from __future__ import annotations

from idioms.table import Cell

PACKED = (
    "GPT-2", "GPT-Neo", "GPT-NeoX", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma 2", "Gemma 3", "Phi-3",
)  # fmt: skip
LEAKING = ("OPT", "BLOOM", "Falcon", "Mamba", "Jamba")

PACKING_CELLS = (
    *(Cell("several records in a row", name) for name in PACKED),
    *(Cell("several records in a row", name, "refused") for name in LEAKING),
)
"""The loss of a packed row is the sum of the losses of its records alone, or packing is refused."""

LABEL_CELLS = (
    Cell("padding", "pad token of its own"), Cell("padding", "pad token is the end token"),
    Cell("the end token", "tokenizer that adds none"), Cell("the end token", "text that has it already"),
    Cell("a tokenizer saved with truncation and padding switched on", "text"),
    Cell("prompt and response", "only the response is learnt"), Cell("a chat of two turns", "template"),
    Cell("a chat of two turns", "no template"),
)  # fmt: skip
"""Ids and labels are those written out by hand."""

REFUSED_CELLS = (
    Cell("start token spelled out", "text", "refused"),
    Cell("start token spelled out", "prompt and response", "refused"),
    Cell("a template that leaves the system message out", "chat", "refused"),
    Cell("a template that opens a turn otherwise than it writes it", "chat", "refused"),
    Cell("a role spelled Assistant", "chat", "refused"),
    Cell("an answer without words", "prompt and response", "refused"),
    Cell("held-out tokens beyond the vocabulary", "text", "refused"),
)
"""What would silently be learnt wrongly."""

CELLS = PACKING_CELLS + LABEL_CELLS + REFUSED_CELLS
"""All cells of the suite."""

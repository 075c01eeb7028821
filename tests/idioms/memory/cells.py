"""What people fine-tune and price, and what they get: the bytes that the allocator handed out, or a line."""

from __future__ import annotations

from idioms.memory.families import FAMILIES
from idioms.table import Cell

METHODS = ("full", "LISA", "LoRA")
ROWS = ("packed", "padded")

FINETUNE = tuple(
    Cell(f"fine-tune, {method}, rows {rows}", family) for family in FAMILIES for method in METHODS for rows in ROWS
)

STEPS = (
    *(Cell("a row of 7 tokens beside a tied vocabulary that dwarfs the model", form) for form in ("fused", "single",
        "SGD")),
    Cell("gradients of micro-batches add up beside a tied vocabulary", "OPT"),
    Cell("gradients of micro-batches add up", "Llama"), Cell("blocks compute their activations again", "GPT-2"),
    Cell("attention that holds all scores", "Gemma 3"), Cell("padding on the right", "Llama"),
    Cell("padding on the left", "gpt-oss"), Cell("a mask without padding", "Llama"),
    Cell("a mask of true and false", "OPT"), Cell("a mask for every pair of tokens", "Qwen3"),
    Cell("positions of packed rows", "Llama"), Cell("positions that hold one document each", "Llama"),
    Cell("a cache of keys and values", "Llama"), Cell("bfloat16 weights", "Qwen3-MoE"),
    Cell("bfloat16 weights with float32 masters", "Llama"),
    Cell("all blocks but one end frozen, embedding too", "Llama"),
    Cell("a model made by a function that closes over a real one", "Llama"),
    Cell("a model on the meta device", "Llama"), Cell("buffers that the step changes", "batch norm"),
    Cell("a sequence to another", "T5"), Cell("a sequence to another", "Whisper"), Cell("images", "ViT"),
)  # fmt: skip

OPTIMIZERS = (
    *(Cell("step of an optimizer of torch", name) for name in (
        "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )),
    Cell("step of an optimizer of torch", "Adafactor", "refused"),
)  # fmt: skip

REFUSED = (
    Cell("a loss that branches on its value", "any model", "refused"),
    Cell("experts one after the other, as many as the tokens ask for", "Mixtral", "refused"),
    Cell("a prediction that fails while a model is fine-tuned", "Mixtral", "refused"),
    Cell("a plan whose prediction fails", "Mixtral", "refused"),
    Cell("a plan with a rank above a layer", "Llama", "refused"),
    Cell("a plan with a rank above a layer, by ledger", "OPT", "refused"),
    Cell("a plan for an unknown architecture", "made up", "refused"),
    Cell("a plan for quantised weights", "Llama", "refused"),
)

PLANS = (
    *(Cell("a plan's price of full fine-tuning is the step that runs", family) for family in ("Llama", "Mistral",
        "Qwen3", "GPT-2", "Qwen3-MoE")),
    *(Cell("a plan's price of full fine-tuning, micro-batches adding up", family) for family in ("Llama", "Gemma 3")),
    Cell("a plan takes full where it fits, beside adapters of four times the model", "Llama"),
    *(Cell("a plan for what is no causal language model", family) for family in ("T5", "Whisper", "ViT")),
    Cell("a plan for weights in several files", "Llama"),
    Cell("a plan for a configuration that says tied in its text part alone", "Gemma 3"),
)  # fmt: skip

CELLS = (*FINETUNE, *STEPS, *OPTIMIZERS, *REFUSED, *PLANS)

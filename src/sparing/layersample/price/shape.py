"""A transformer as a handful of numbers: enough to count its parameters exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from sparing.errors import UserError

Norm = Literal["rms", "rms_float", "layer"]
"""How a norm is computed: root mean square in float32, the same with the weight applied in float32, or torch's layer
norm."""

# what a model type fixes and its configuration does not say
_FAMILIES: Final[Mapping[str, dict[str, Any]]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma": {"norm": "rms_float"},
    "gpt2": {"norm": "layer", "gated": False, "packed": True, "qkv_bias": True, "out_bias": True, "ffn_bias": True},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a decoder-only transformer: embedding, equal blocks of attention and feed-forward, norm, head.

    Example:
        >>> Shape(layers=32, width=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000).total
        6738415616
    """

    layers: int  # blocks (count), N
    width: int  # width of the residual stream (elements), d
    ffn: int  # inner width of the feed-forward part (elements), d_ff
    heads: int  # query heads (count)
    kv_heads: int  # key and value heads (count)
    head_dim: int  # width of a head (elements)
    vocab: int  # rows of the embedding (count), V
    tied: bool = False  # the head is the embedding
    gated: bool = True  # the feed-forward part has a gate: three matrices instead of two
    packed: bool = False  # queries, keys and values come from one matrix
    positions: int = 0  # rows of a learned position table (count); 0 for rotary positions
    qkv_bias: bool = False  # query, key and value projections have biases
    out_bias: bool = False  # the attention's output projection has a bias
    ffn_bias: bool = False  # the feed-forward matrices have biases
    norm: Norm = "rms"  # kind of norm; "layer" has a bias beside its weight
    qk_norm: bool = False  # queries and keys are normed per head

    # the activation function is made of separate operations, each of which keeps its operands (GPT-2's "gelu_new")
    split_activation: bool = False

    @property
    def queries(self) -> int:
        """Elements of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of all key heads of a token, d_kv; values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each linear map of one block, in order of use."""
        d, q, k = self.width, self.queries, self.keys
        inner = [(d, q + 2 * k)] if self.packed else [(d, q), (d, k), (d, k)]
        return (*inner, (q, d), *[(d, self.ffn)] * (1 + self.gated), (self.ffn, d))

    @property
    def entrance(self) -> tuple[tuple[int, int], ...]:
        """Those of the linear maps that read the normed input of the block: queries, keys and values."""
        return self.linears[: 1 if self.packed else 3]

    @property
    def block_matmul(self) -> int:
        """Weights of one block that multiply activations (count)."""
        return sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def block(self) -> int:
        """Parameters of one block (count), P_layer."""
        biases = self.qkv_bias * (self.queries + 2 * self.keys) + self.out_bias * self.width
        biases += self.ffn_bias * ((1 + self.gated) * self.ffn + self.width)
        return self.block_matmul + biases + 2 * self.tail + 2 * self.qk_norm * self.head_dim

    @property
    def embed(self) -> int:
        """Parameters of token and position embeddings (count)."""
        return (self.vocab + self.positions) * self.width

    @property
    def tail(self) -> int:
        """Parameters of the final norm (count)."""
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def head(self) -> int:
        """Parameters of the head that are its own (count): none if it is tied."""
        return 0 if self.tied else self.vocab * self.width

    @property
    def total(self) -> int:
        """All parameters (count), a tied one once."""
        return self.embed + self.layers * self.block + self.tail + self.head

    @classmethod
    def from_config(cls, config: object) -> Self:
        """Read the sizes from a Hugging Face configuration, by attribute names; nothing is built."""
        kind = str(getattr(config, "model_type", type(config).__name__))
        if kind not in _FAMILIES:
            raise UserError(
                "model type", got=kind, why=f"closed formulas are known for {', '.join(sorted(_FAMILIES))}",
                do="use sparing.memory.predict, which runs any model on fake tensors, or give a Shape",
            )  # fmt: skip
        return cls(**_sizes(config) | _details(config, kind) | _FAMILIES[kind])


def _sizes(config: Any) -> dict[str, int]:
    """Read the sizes every family has."""
    width, heads = config.hidden_size, config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    return {
        "layers": config.num_hidden_layers,
        "width": width,
        "ffn": inner,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or width // heads,
        "vocab": config.vocab_size,
    }


def _details(config: Any, kind: str) -> dict[str, Any]:
    """Read what configurations may switch on or off."""
    attention_bias = bool(getattr(config, "attention_bias", False))
    activation = str(getattr(config, "activation_function", None) or getattr(config, "hidden_act", ""))
    return {
        "tied": bool(config.tie_word_embeddings),
        "positions": config.max_position_embeddings if kind == "gpt2" else 0,
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "ffn_bias": bool(getattr(config, "mlp_bias", False)),
        "split_activation": activation == "gelu_new",
    }

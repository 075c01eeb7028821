"""The memory of a fine-tuning step as a formula, for models of the Llama family with scaled-dot-product attention."""

from __future__ import annotations


def parameters(shape: dict[str, int]) -> tuple[int, int]:
    """Return the parameters of a layer, 2d² + 2d·d_kv + 3d·d_ff + 2d, and those outside the layers, 2·V·d + d."""
    d, ff, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    kv = d // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return 2 * d * d + 2 * d * kv + 3 * d * ff + 2 * d, 2 * vocab * d + d


def kept_per_token(shape: dict[str, int]) -> tuple[int, int]:
    """Return the bytes a layer keeps per token: in any case, and in addition when it trains.

    In any case: two norms keep their input in float32 (8d) and a root each; attention keeps query, key, value, result
    (4d + 4d_kv) and a float32 sum per head; the gated unit keeps gate, silu(gate) and up (6d_ff). A trained layer
    also keeps the norms' output before and after their weight (8d) and the input of the down projection (2d_ff).
    """
    d, ff, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    kv = d // heads * shape["num_key_value_heads"]
    return 12 * d + 4 * kv + 4 * heads + 6 * ff + 8, 8 * d + 2 * ff


def peak_by_formula(shape: dict[str, int], active: tuple[int, ...], tokens: int, *, embedding: bool) -> int:
    """Return the peak of a step (bytes): bf16 weights, gradients and moments, AdamW one parameter at a time.

    It is at the end of the forward pass, while the loss is made in float32 (12V per token), or in the optimizer's step,
    which has two temporaries as large as the largest tensor. With a frozen embedding nothing is kept below the lowest
    active layer, whose input needs no gradient (4d less).
    """
    layer, outside = parameters(shape)
    always, more = kept_per_token(shape)
    layers, d, vocab = shape["num_hidden_layers"], shape["hidden_size"], shape["vocab_size"]
    weights = 2 * (layers * layer + outside)
    trained = len(active) * layer + outside - (0 if embedding else vocab * d)
    deep = layers if embedding else layers - active[0]
    kept = deep * always + len(active) * more + 8 * d - (0 if embedding else 4 * d)
    return weights + 4 * trained + max(tokens * (kept + 12 * vocab), 2 * trained + 4 * vocab * d)

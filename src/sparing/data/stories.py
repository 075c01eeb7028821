"""llama2.c checkpoints as Hugging Face model directories: the weights, and a fast tokenizer rebuilt from its own file.

A llama2.c checkpoint (version 0) is seven int32 — width, hidden, layers, heads, key-value heads, vocabulary, context —
and then float32 tensors in a fixed order. Its rotary embedding turns *neighbouring* pairs (0, 1), (2, 3), …; Hugging
Face's turns pairs half a head apart. The rows of the query and key weights are therefore reordered within each head;
scores are unchanged.

Source: the file format of karpathy/llama2.c (``export.py``, ``run.c``, MIT).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparing.data.quiet import quiet_bars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

# size of the checkpoint at the start of the package's data file (bytes); the tokenizer is the rest
STORIES15M_BYTES = 60_816_028

FIRST_BYTE = 3  # token id of the byte 0; ids 3 … 258 are the 256 bytes

SPACE = "▁"  # how the vocabulary spells a space (U+2581)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The header of a llama2.c checkpoint."""

    width: int  # residual stream (features)
    hidden: int  # feed-forward (features)
    layers: int  # blocks (count)
    heads: int  # query heads (count)
    kv_heads: int  # key and value heads (count)
    vocab: int  # tokens (count)
    context: int  # longest sequence (tokens)
    tied: bool  # whether the head is the embedding

    @property
    def head(self) -> int:
        """Features of one head."""
        return self.width // self.heads


def read_checkpoint(data: bytes) -> tuple[Shape, dict[str, Tensor]]:
    """Read a llama2.c checkpoint."""
    if len(data) < 28:
        raise ValueError("a llama2.c checkpoint starts with seven int32")
    width, hidden, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data)
    if min(width, hidden, layers, heads, kv_heads, context) < 1 or vocab == 0 or width % heads or heads % kv_heads:
        raise ValueError("the header is not that of a llama2.c checkpoint")
    # llama2.c marks a head of its own by a negative vocabulary size
    shape = Shape(
        width=width, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, vocab=abs(vocab), context=context,
        tied=vocab > 0,
    )  # fmt: skip
    sizes = dict(_tensors(shape))
    expected = 28 + 4 * sum(int(np.prod(size)) for size in sizes.values())
    if len(data) != expected:
        raise ValueError(f"the header asks for {expected} bytes, the file has {len(data)}")
    numbers, start, tensors = np.frombuffer(data, dtype="<f4", offset=28), 0, {}
    for name, size in sizes.items():
        stop = start + int(np.prod(size))
        tensors[name] = torch.from_numpy(numbers[start:stop].reshape(size).copy())
        start = stop
    return shape, tensors


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield llama2.c's tensors in the order of the file."""
    n, d, h, kv = shape.layers, shape.width, shape.hidden, shape.kv_heads * shape.head
    yield "embedding", (shape.vocab, d)
    yield from {"rms_att": (n, d), "wq": (n, d, d), "wk": (n, kv, d), "wv": (n, kv, d), "wo": (n, d, d)}.items()
    yield from {"rms_ffn": (n, d), "w1": (n, h, d), "w2": (n, d, h), "w3": (n, h, d), "rms_final": (d,)}.items()
    yield from {"freq_re": (shape.context, shape.head // 2), "freq_im": (shape.context, shape.head // 2)}.items()
    if not shape.tied:
        yield "head", (shape.vocab, d)


def to_half_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from neighbouring rotary pairs to pairs half a head apart.

    Row ``2i + j`` of each head becomes row ``j · size/2 + i`` (i < size/2, j in {0, 1}).

    Example:
        >>> to_half_pairs(torch.arange(4.0).reshape(4, 1), heads=1).flatten().tolist()
        [0.0, 2.0, 1.0, 3.0]
    """
    return weight.reshape(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def hugging_face_state(shape: Shape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and reorder llama2.c's tensors into the state dict of ``LlamaForCausalLM``."""
    state = {"model.embed_tokens.weight": tensors["embedding"], "model.norm.weight": tensors["rms_final"]}
    state["lm_head.weight"] = tensors["embedding" if shape.tied else "head"]
    names = {
        "rms_att": "input_layernorm", "rms_ffn": "post_attention_layernorm", "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj", "w1": "mlp.gate_proj",
        "w2": "mlp.down_proj", "w3": "mlp.up_proj",
    }  # fmt: skip
    heads = {"wq": shape.heads, "wk": shape.kv_heads}
    for ours, theirs in names.items():
        for layer, weight in enumerate(tensors[ours]):
            turned = to_half_pairs(weight, heads[ours]) if ours in heads else weight
            state[f"model.layers.{layer}.{theirs}.weight"] = turned
    return state


def build_model(shape: Shape, tensors: dict[str, Tensor]) -> Any:
    """Build the ``LlamaForCausalLM`` that a checkpoint describes, in float32."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    # run.c divides by √(mean of squares + 1e-5); the default of transformers is 1e-6
    config = LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        max_position_embeddings=shape.context, tie_word_embeddings=shape.tied, rms_norm_eps=1e-5, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    # construction draws weights; the caller's stream must not move
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    model.load_state_dict(hugging_face_state(shape, tensors))
    # a story ends where the next would begin, with ``<s>``, so generation stops at that as well as at ``</s>``
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 1], pad_token_id=0)
    return model.eval()


def read_vocabulary(data: bytes) -> list[tuple[str, float]]:
    """Read a llama2.c ``tokenizer.bin``: int32, then per token float32 score, int32 length, bytes."""
    # the first int32 is the length of the longest token, which nothing here needs
    pieces, offset = [], 4
    while offset < len(data):
        if offset + 8 > len(data):
            raise ValueError("the tokenizer file ends within a token")
        score, length = struct.unpack_from("<fi", data, offset)
        raw = data[offset + 8 : offset + 8 + length]
        if length < 0 or len(raw) != length:
            raise ValueError("the tokenizer file ends within a token")
        pieces.append((raw, score))
        offset += 8 + length
    if len(pieces) < FIRST_BYTE + 256:
        raise ValueError(f"a tokenizer file has 3 special tokens and 256 bytes, this one has {len(pieces)} tokens")
    # the first 259 names are fixed: the file spells <s> with line breaks and bytes as themselves
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    rest = [(raw.decode("utf-8").replace(" ", SPACE), score) for raw, score in pieces[len(fixed) :]]
    return [*((piece, 0.0) for piece in fixed), *rest]


def merges(vocabulary: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """List every way to join two pieces into a third, best score first.

    llama2.c joins, again and again, the neighbours whose union has the highest score; a byte pair encoder joins the
    neighbours whose merge comes first in its list. In this order the two agree.
    """
    pieces = vocabulary[FIRST_BYTE + 256 :]
    known = {piece for piece, _ in pieces}
    # stable: equal scores stay in order of id
    ranked = sorted(pieces, key=lambda item: -item[1])
    splits = ((piece[:cut], piece[cut:]) for piece, _ in ranked for cut in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in known and right in known]


def build_tokenizer(vocabulary: list[tuple[str, float]], *, context: int) -> Any:
    """Build the fast tokenizer of a llama2.c vocabulary: ``<s>``, one space, the text; unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    bpe = models.BPE(vocab=ids, merges=merges(vocabulary), unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    strip = decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    # the clean-up of transformers would drop the spaces before punctuation that the text has
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=context, clean_up_tokenization_spaces=False, **special
    )


def convert(checkpoint: bytes, vocabulary: bytes, out: Path) -> None:
    """Write a llama2.c checkpoint and its tokenizer as a Hugging Face model directory."""
    shape, tensors = read_checkpoint(checkpoint)
    with quiet_bars():
        build_model(shape, tensors).save_pretrained(out)
    build_tokenizer(read_vocabulary(vocabulary), context=shape.context).save_pretrained(out)


def build_stories15m(members: Path, out: Path) -> None:
    """Convert the data file of the package, in which the tokenizer follows the checkpoint."""
    data = (members / "llama2.data").read_bytes()
    convert(data[:STORIES15M_BYTES], data[STORIES15M_BYTES:], out)

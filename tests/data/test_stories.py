"""llama2.c files become Hugging Face models that compute the same numbers and tokenizers that cut the same way."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparing.data import bundled_text, load_text
from sparing.data.stories import (
    build_model,
    build_tokenizer,
    convert,
    read_checkpoint,
    read_vocabulary,
)

transformers = pytest.importorskip("transformers")

WIDTH, HIDDEN, LAYERS, CONTEXT = 24, 40, 2, 16
VOCABULARY = {
    " ": -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "t": -13.0, "h": -14.0, "e": -15.0, ".": -16.0, "é": -17.0,
    "ab": -3.0, "bc": -2.0, "abc": -4.0, " t": -1.0, "he": -5.0, " the": -6.0, "th": -7.0, "  ": -1e9, "aa": -8.0,
    "aaa": -8.5, " a": -1.5,
}  # fmt: skip
"""Pieces and scores, chosen so that the best join is often not the first one."""


def checkpoint(heads: int, kv_heads: int, *, tied: bool, vocab: int = 279) -> tuple[bytes, dict[str, Tensor]]:
    """A random llama2.c file, and what was written into it."""
    generator = torch.Generator().manual_seed(heads)
    size = WIDTH // heads
    kv = kv_heads * size
    shapes = {
        "embedding": (vocab, WIDTH), "rms_att": (LAYERS, WIDTH), "wq": (LAYERS, WIDTH, WIDTH),
        "wk": (LAYERS, kv, WIDTH), "wv": (LAYERS, kv, WIDTH), "wo": (LAYERS, WIDTH, WIDTH), "rms_ffn": (LAYERS, WIDTH),
        "w1": (LAYERS, HIDDEN, WIDTH), "w2": (LAYERS, WIDTH, HIDDEN), "w3": (LAYERS, HIDDEN, WIDTH),
        "rms_final": (WIDTH,), "freq_re": (CONTEXT, size // 2), "freq_im": (CONTEXT, size // 2),
    }  # fmt: skip
    if not tied:
        shapes["head"] = (vocab, WIDTH)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 + ("rms" in name) for name, shape in shapes.items()}
    header = struct.pack("<7i", WIDTH, HIDDEN, LAYERS, heads, kv_heads, vocab if tied else -vocab, CONTEXT)
    return header + b"".join(weight.numpy().tobytes() for weight in weights.values()), weights


def tokenizer_file(count: int | None = None) -> bytes:
    """A llama2.c tokenizer file: three special tokens, 256 bytes, then the pieces; or only its first tokens."""
    tokens = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0), *((bytes([byte]), 0.0) for byte in range(256))]
    tokens += [(piece.encode(), score) for piece, score in VOCABULARY.items()]
    packed = (struct.pack("<fi", score, len(raw)) + raw for raw, score in tokens[:count])
    return struct.pack("<i", 9) + b"".join(packed)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def turn(x: Tensor) -> Tensor:
    """Rotate neighbouring pairs of each head; x has shape (time, heads, size)."""
    size = x.shape[-1]
    out = torch.empty_like(x)
    for position in range(x.shape[0]):
        for i in range(0, size, 2):
            angle = position / 10000.0 ** (i / size)
            cos, sin = math.cos(angle), math.sin(angle)
            out[position, :, i] = x[position, :, i] * cos - x[position, :, i + 1] * sin
            out[position, :, i + 1] = x[position, :, i] * sin + x[position, :, i + 1] * cos
    return out


def llama2c(weights: dict[str, Tensor], ids: list[int], heads: int, kv_heads: int) -> Tensor:
    """llama2.c's forward pass written out plainly in float64; logits of shape (time, vocab)."""
    w = {name: weight.double() for name, weight in weights.items()}
    size, time = WIDTH // heads, len(ids)
    x = w["embedding"][ids]
    future = torch.full((time, time), -torch.inf, dtype=torch.float64).triu(1)
    for n in range(LAYERS):
        h = rms(x, w["rms_att"][n])
        q = turn((h @ w["wq"][n].T).reshape(time, heads, size))
        k = turn((h @ w["wk"][n].T).reshape(time, kv_heads, size)).repeat_interleave(heads // kv_heads, dim=1)
        v = (h @ w["wv"][n].T).reshape(time, kv_heads, size).repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(size) + future
        x = x + torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(time, WIDTH) @ w["wo"][n].T
        h = rms(x, w["rms_ffn"][n])
        gate = h @ w["w1"][n].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["w3"][n].T)) @ w["w2"][n].T
    return rms(x, w["rms_final"]) @ w.get("head", w["embedding"]).T


@pytest.mark.parametrize(("heads", "kv_heads", "tied"), [(1, 1, True), (3, 3, True), (6, 2, False), (2, 1, True)])
def test_logits_equal_an_independent_forward_pass(heads: int, kv_heads: int, tied: bool) -> None:
    data, weights = checkpoint(heads, kv_heads, tied=tied)
    ids = [1, 5, 260, 7, 7, 270, 3, 278, 0, 19]
    with torch.no_grad():
        got = build_model(*read_checkpoint(data)).double()(torch.tensor([ids])).logits[0]
    exact = llama2c(weights, ids, heads, kv_heads)
    # transformers keeps its rotary angles in float32 even in a float64 model: 9 radians to 1e-6; logits are of order 3
    torch.testing.assert_close(got, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: data + b"\0" * 4, lambda data: data[:28]])
def test_a_file_of_the_wrong_length_is_refused(change) -> None:
    data, _ = checkpoint(2, 1, tied=True)
    with pytest.raises(ValueError, match="the header asks for"):
        read_checkpoint(change(data))


@pytest.mark.parametrize("header", [b"", b"\0" * 28, struct.pack("<7i", 10, 8, 1, 3, 3, 9, 4), b"GGUF" + b"\x01" * 24])
def test_a_foreign_header_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match=r"llama2\.c|the header asks for"):
        read_checkpoint(header)


def join(vocabulary: list[tuple[str, float]], text: str) -> list[int]:
    """llama2.c's encoder: characters (or their bytes), then always the best-scoring join, leftmost first."""
    ids = {piece: index for index, (piece, _) in enumerate(vocabulary) if index >= 259}
    tokens = []
    for character in ("▁" + text.replace(" ", "▁")) if text else "":
        tokens += [ids[character]] if character in ids else [3 + byte for byte in character.encode()]
    while True:
        best, at, new = -1e10, None, None
        for i in range(len(tokens) - 1):
            piece = ids.get(vocabulary[tokens[i]][0] + vocabulary[tokens[i + 1]][0])
            if piece is not None and vocabulary[piece][1] > best:
                best, at, new = vocabulary[piece][1], i, piece
        if at is None:
            return [1, *tokens]
        tokens[at : at + 2] = [new]


def test_tokens_equal_llama2cs_on_random_texts() -> None:
    vocabulary = read_vocabulary(tokenizer_file())
    tokenizer = build_tokenizer(vocabulary, context=1000)
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("aaabbcthe  .é\n🙂日", k=draw.randrange(0, 25)))
        ids = tokenizer(text).input_ids
        assert ids == join(vocabulary, text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_tokenizer_file_that_is_cut_or_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="ends within a token"):
        read_vocabulary(tokenizer_file()[:-1])
    with pytest.raises(ValueError, match="ends within a token"):
        read_vocabulary(tokenizer_file() + b"\0" * 7)
    with pytest.raises(ValueError, match="3 special tokens and 256 bytes"):
        read_vocabulary(tokenizer_file(258))


def test_the_directory_loads_with_the_auto_classes_and_leaves_the_global_stream_alone(tmp_path: Path) -> None:
    data, _ = checkpoint(3, 3, tied=True)
    before = torch.get_rng_state()
    convert(data, tokenizer_file(), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == [2, 1]
    assert tokenizer.model_max_length == CONTEXT
    assert tokenizer("the abc").input_ids == join(read_vocabulary(tokenizer_file()), "the abc")
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * model.num_parameters() + 4000, (
        "the tied head is kept once"
    )


@pytest.fixture(scope="module")
def real(request):
    """stories15M as transformers loads it."""
    from sparing.data import fetch
    from sparing.errors import UserError

    try:
        path = fetch("stories15m", progress=False, hub=False)
    except UserError as error:
        pytest.skip(str(error))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path), path


@pytest.mark.asset
def test_the_real_model_tells_the_known_story(real) -> None:
    model, tokenizer, _ = real
    assert model.num_parameters() == 15_191_712
    ids = model.generate(torch.tensor([[1]]), max_new_tokens=60, do_sample=False)
    # the greedy continuation that llama2.c prints for this checkpoint
    assert tokenizer.decode(ids[0], skip_special_tokens=True).startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. "
        "One day, she saw a big, red ball in the sky. It was the sun! She thought it was so pretty."
    )


@pytest.mark.asset
def test_the_real_weights_are_the_published_ones(real) -> None:
    import hashlib

    model, _, _ = real
    state = model.state_dict()
    undo = lambda weight: weight.reshape(6, 2, 24, 288).transpose(1, 2).reshape(288, 288)  # noqa: E731
    rows = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj"}
    rows |= {"w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj"}
    order = ["input_layernorm", *list(rows.values())[:4], "post_attention_layernorm", *list(rows.values())[4:]]
    tensors = [state["model.embed_tokens.weight"]]
    for name in order:
        turned = name.endswith(("q_proj", "k_proj"))
        layers = [state[f"model.layers.{layer}.{name}.weight"] for layer in range(6)]
        tensors += [undo(weight) if turned else weight for weight in layers]
    tensors.append(state["model.norm.weight"])
    written = struct.pack("<7i", 288, 768, 6, 6, 6, 32000, 256) + b"".join(t.numpy().tobytes() for t in tensors)
    # of the published stories15M.bin, all but the two rotary tables at its end (2 x 256 x 24 float32)
    assert len(written) + 2 * 256 * 24 * 4 == 60_816_028
    assert hashlib.sha256(written).hexdigest() == "0f623baee74b4be1291c797b6f306668e06de118977bbf44d2b3bc2afa70ab3e"


@pytest.mark.asset
def test_real_tokens_equal_llama2cs_and_go_back_to_the_text(real, fetched) -> None:
    fetched("bryant-stories")
    _, tokenizer, path = real
    vocabulary = kept_vocabulary(path)
    texts = [line for line in load_text("bryant-stories").splitlines()[:400] if line]
    texts += ["", " ", "  two spaces", "tab\tand\nnewline", "日本語", "ünïcödé 🙂", "Once upon a time"]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert ids == join(vocabulary, text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def kept_vocabulary(path: Path) -> list[tuple[str, float]]:
    """The vocabulary with llama2.c's scores, which are minus the rank of a piece among those after the bytes."""
    import json

    ids = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    pieces = sorted(ids, key=ids.__getitem__)
    scores = [
        -1e9 if set(piece) == {"▁"} and len(piece) > 1 else float(259 - index) for index, piece in enumerate(pieces)
    ]
    return list(zip(pieces, scores, strict=True))


@pytest.mark.asset
def test_the_real_model_knows_its_stories_and_not_other_books(real) -> None:
    model, tokenizer, _ = real

    def loss(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256).input_ids
        with torch.no_grad():
            return model(ids, labels=ids).loss.item()

    story = (
        "Once upon a time, there was a little boy named Tim. Tim loved to play with his red ball in the park. "
        'One day, Tim lost his ball. He was very sad. His mom said, "Don\'t worry, Tim. We will find it."'
    )
    assert loss(story) < 1.0  # measured 0.63
    pages = [bundled_text()[start : start + 900] for start in range(0, 90_000, 9_000)]
    assert 5.0 < sum(map(loss, pages)) / len(pages) < 7.0  # measured 5.67: another kind of prose

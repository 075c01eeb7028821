"""Language models: a small GPT-2 on characters, and merges of stories15m fine-tuned on two books."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.valley.cases import SEEDS, folder, kept
from benchmarks.valley.scans import POINTS
from benchmarks.valley.store import Store
from sparing.data import fetch, load_text
from sparing.seeds import number, stream
from sparing.valley.directions.config import Noise, NoiseKind
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.method import Method
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.ties import Ties
from sparing.valley.scans.asymmetry import index
from sparing.valley.scans.evaluators import NextToken
from sparing.valley.scans.scan import scan

LENGTH, BATCH, RATE, TESTED = 64, 16, 3e-3, 64
"""Of the small model: characters of a row, rows of a step, AdamW's rate, rows that are evaluated."""
STEPS = {"gpt2-alice": 300, "gpt2-alice-long": 2400}
"""Steps of its training, by name."""
BOOKS = ("alice", "burgess-busterbrown")
WIDTH, FEW, TURNS, SLOW = 96, 4, 20, 3e-4
"""Of the fine-tuning: tokens of a row, rows of a step, steps, AdamW's rate at the start."""
CHOOSING, JUDGING = 6, 12
"""Rows of each book to choose a scale by, and to report."""
SMALL, LARGE = (0.3, 0.5, 0.7, 1.0), (0.5, 1.0, 1.5, 2.0)
METHODS: dict[str, tuple[Callable[[float], Method], tuple[float, ...]]] = {
    "uniform": (lambda _: Linear(), (1.0,)),
    "task arithmetic": (TaskArithmetic, SMALL),
    "DARE": (lambda scale: Dare(0.9, then=TaskArithmetic(scale), seed=0), SMALL),
    "TIES": (lambda scale: Ties(0.2, scale=scale), LARGE),
    "sign-aware": (lambda scale: SignAware(0.2, scale=scale), LARGE),
}
"""Method by name -> what makes it from a scale, and the scales to choose among on held-out rows."""


@functools.cache
def _characters() -> tuple[Tensor, int]:
    text = load_text("alice")
    alphabet = {letter: k for k, letter in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[letter] for letter in text]), len(alphabet)


def _learn_(model: nn.Module, rows: Tensor, seed: int, steps: int, batch: int, rate: float) -> None:
    """AdamW with a rate that falls in a line, on rows drawn with the seed."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    generator = stream(seed, "rows")
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        chosen = rows[torch.randint(0, len(rows), (batch,), generator=generator)]
        optimizer.zero_grad()
        model(input_ids=chosen, labels=chosen).loss.backward()
        optimizer.step()
    model.eval()


def small_model(name: str, seed: int) -> nn.Module:
    """A GPT-2 of two blocks of width 64 that has read Alice, but for its last tenth."""
    from transformers import GPT2Config, GPT2LMHeadModel

    text, letters = _characters()
    config = GPT2Config(
        vocab_size=letters, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number(seed, "initial"))
        model = GPT2LMHeadModel(config)
    rows = text[: len(text) * 9 // 10].unfold(0, LENGTH, 1)
    return kept(f"{name}-{seed}", model, lambda: _learn_(model, rows, seed, STEPS[name], BATCH, RATE))


def text() -> None:
    """Seven noises on the small GPT-2, raw and sign-consistent."""
    store = Store("text")
    letters, _ = _characters()
    held = letters[len(letters) * 9 // 10 :].unfold(0, LENGTH, LENGTH)[:TESTED]
    for name, seed in itertools.product(STEPS, SEEDS):
        model = small_model(name, seed)
        for kind in get_args(NoiseKind):
            for sign in ("raw", "consistent"):
                at = (name, model, NextToken(held, batch_size=TESTED), kind, sign, seed)
                store.once(f"{name} {seed} {kind} {sign}", lambda at=at: _scanned(*at))


def _scanned(name: str, model: nn.Module, measure: NextToken, kind: Any, sign: Any, seed: int) -> dict[str, Any]:
    curve = scan(model, measure, Noise(kind, sign=sign), points=POINTS, draws=1, seed=seed).curves[0]
    row: dict[str, Any] = {"case": name, "seed": seed, "direction": kind, "scr": float(curve.consistency[0])}
    for metric in ("error", "loss"):
        values = curve.values[metric][0]
        row[metric] = {"ai": index(curve.lambdas, values, curve.floor(metric)), "curve": list(values)}
    return row


@functools.cache
def _tokens(book: str) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetch("stories15m"))
    ids = tokenizer(load_text(book), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids)


def _parts(book: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to learn from, to choose by, to judge by: the first 80 % of a book, and rows of the next two tenths."""
    ids = _tokens(book)
    cut, second = len(ids) * 8 // 10, len(ids) * 9 // 10
    learn = ids[:cut].unfold(0, WIDTH, WIDTH // 2)
    choose, judge = ids[cut:second].unfold(0, WIDTH, WIDTH), ids[second:].unfold(0, WIDTH, WIDTH)
    return learn, choose[:CHOOSING], judge[:JUDGING]


def _stories() -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(fetch("stories15m")).eval()
    return model


def expert(book: str, seed: int) -> dict[str, Tensor]:
    """The state of stories15m after a short fine-tuning on a book."""
    name = f"stories15m-{book}-{seed}"
    model = _stories()
    path = folder() / f"{name}.safetensors"
    if path.exists():
        return load_file(path)
    kept(name, model, lambda: _learn_(model, _parts(book)[0], seed, TURNS, FEW, SLOW))
    return load_file(path)


def merges() -> None:
    """Two experts, merged in five ways; the scale of each way is chosen on held-out rows of both books."""
    store = Store("merges")
    for seed in SEEDS:
        for name in ("base", "members", *METHODS):
            store.once(f"{seed} {name}", lambda at=(seed, name): _row(*at))


def _row(seed: int, name: str) -> dict[str, Any]:
    model = _stories()
    base = {key: value.clone() for key, value in model.state_dict().items()}
    choose, judge = ([NextToken(_parts(book)[part]) for book in BOOKS] for part in (1, 2))
    if name == "base":
        return {"seed": seed, "name": name, "losses": _losses(model, base, judge)}
    states = [_whole(expert(book, seed), base) for book in BOOKS]
    if name == "members":
        own = [_losses(model, state, judge) for state in states]
        return {"seed": seed, "name": name, "losses": [own[0][0], own[1][1]], "crossed": [own[1][0], own[0][1]]}
    make, scales = METHODS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = {scale: merge(states, base=base, method=make(scale)) for scale in scales}
    tried = {scale: sum(_losses(model, state, choose)) for scale, state in merged.items()} if len(scales) > 1 else {}
    best = min(tried, key=lambda scale: tried[scale]) if tried else scales[0]
    return {"seed": seed, "name": name, "scale": best, "losses": _losses(model, merged[best], judge)}


def _whole(state: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: state[key] for key in base}


def _losses(model: nn.Module, state: dict[str, Tensor], measures: list[NextToken]) -> list[float]:
    """Loss on every book (nat per token)."""
    model.load_state_dict(state)
    return [measure(model)["loss"] for measure in measures]

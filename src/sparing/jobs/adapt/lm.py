"""A pretrained causal language model as pure functions of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.lm.losses import ends_with_head
from sparing.jobs.lm.models import vocabulary
from sparing.report import Progress
from sparing.seeds import stream

_OWN = "use the tokenizer that belongs to the model"

Theta = Mapping[str, Tensor]  # weights by name, tied ones once


class _Scored(nn.Module):
    """Logits at chosen positions only: a vocabulary is wide, and most positions of a question do not count."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden[rows, cols])  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel:
    """A model, its tokenizer and its weights θ₀; nothing here changes them."""

    scored: nn.Module  # gives logits at chosen positions
    theta: dict[str, Tensor]  # θ₀ by name, tied ones once, without gradients
    tokenizer: Any
    start: int  # id that every text begins with
    known: int  # ids that the model has (count)

    def logits(self, theta: Theta, ids: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Scores (n, V) of the token after each position: text ``rows`` (n,), ``cols`` (n,) of ``ids`` (B, L)."""
        # padding at the right end needs no mask: attention is causal, so nothing to the left of it can see it
        named = {f"model.{name}": value for name, value in theta.items()}
        scores: Tensor = functional_call(self.scored, named, (ids, rows, cols))
        return scores

    def nll(self, theta: Theta, ids: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Negative log-likelihood (n,), nat/token, of the token at ``cols + 1``."""
        scores = torch.log_softmax(self.logits(theta, ids, rows, cols), dim=-1)
        return -scores.gather(-1, ids[rows, cols + 1][:, None])[:, 0]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        # not verbose: a whole book is longer than any context, and is cut later
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        highest = max(ids, default=0)
        why = f"the model knows {self.known} tokens, the tokenizer gives token {highest}"
        require(highest < self.known, "model", type(self.tokenizer).__name__, why, _OWN)
        return ids


def as_functions(model: nn.Module, tokenizer: Any) -> LanguageModel:
    """A live Hugging Face model with a linear head (Llama, GPT-2) as functions of its weights, which are not copied."""
    model.eval()
    # the only attention with forward mode and second derivatives
    model.set_attn_implementation("eager")  # type: ignore[operator]
    scored = _Scored(model)
    _refuse_unlike(scored)
    theta = {name: value.detach() for name, value in named_parameters(model).items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    start, known = tokenizer.bos_token_id, vocabulary(model)
    start = tokenizer.eos_token_id if start is None else start
    why = f"the model knows {known} tokens, and texts would begin with token {start}"
    require(start is not None and start < known, "model", type(tokenizer).__name__, why, _OWN)
    return LanguageModel(scored, theta, tokenizer, int(start), known)


def _refuse_unlike(scored: _Scored) -> None:
    """Refuse a model that scales or caps its logits, or what its head gets: the scores here would be another's."""
    # not token 0, which often pads and then is zero everywhere
    model, ids = scored.model, torch.tensor([[1, 2]])
    same = ends_with_head(model)
    if same:
        with torch.no_grad():
            here = scored(ids, torch.tensor([0, 0]), torch.tensor([0, 1]))
            there = model(input_ids=ids, use_cache=False).logits[0]
        # rounding alone: one product of a matrix with two rows, on either side
        same = torch.allclose(here, there, rtol=1e-4, atol=1e-4 * float(there.abs().max()))
    why, do = "its logits are not what its head gives alone", "pass one that neither scales nor caps them, as Llama"
    require(same, "model", type(model).__name__, why, do)


def padded(texts: Sequence[Tensor]) -> Tensor:
    """Texts of (L_i,) side by side, (B, max L_i); zeros at the right end, at positions that no loss may choose."""
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=0)


def positions(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(rows, cols), each (Σ (L_i − 1),): every position that has a token after it; padding has none."""
    rows = torch.cat([torch.full((len(text) - 1,), row) for row, text in enumerate(texts)])
    return rows, torch.cat([torch.arange(len(text) - 1) for text in texts])


WARM = 10  # steps over which the rate rises


def tune_(
    lm: LanguageModel, texts: Sequence[Tensor], *, passes: int, lr: float, seed: int, batch: int = 8
) -> LanguageModel:
    """A few passes of AdamW over documents about which nothing is asked later; the rate rises, then falls to 0."""
    model: Any = lm.scored.model
    steps = passes * -(-len(texts) // batch)
    if not steps:
        return lm
    parameters = [parameter.requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    with Progress("tune the base model", total=steps) as bar:
        for step in range(steps):
            each, turn = divmod(step, steps // passes)
            order = torch.randperm(len(texts), generator=stream(seed, "tune", each)).tolist()
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / WARM) * (1 - step / steps)
            chosen = [texts[index] for index in order[turn * batch : (turn + 1) * batch]]
            loss = lm.nll(dict(model.named_parameters()), padded(chosen), *positions(chosen)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            bar.advance(loss=loss.item())
    # wrapped again, which freezes the parameters that the passes unfroze
    return as_functions(model, lm.tokenizer)

"""A pretrained causal language model as pure functions of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.lm.models import load_model, load_tokenizer, vocabulary

_OWN = "use the tokenizer that belongs to the model"

Theta = Mapping[str, Tensor]
"""Weights by name, tied ones once."""


class _Scored(nn.Module):
    """Logits at chosen positions only: a vocabulary is wide, and most positions of a question do not count."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        scores: Tensor = self.model.get_output_embeddings()(hidden[rows, cols])
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """A model, its tokenizer and its weights θ₀; nothing here changes them."""

    scored: nn.Module
    """The model behind a forward that gives logits at chosen positions."""

    theta: dict[str, Tensor]
    """θ₀: every weight by name, tied ones once, without gradients."""

    tokenizer: Any
    """Text to ids and back."""

    start: int
    """Id that every text begins with."""

    known: int
    """Ids that the model has (count)."""

    def logits(self, theta: Theta, ids: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Scores of the token that follows each chosen position.

        Padding at the right end needs no mask: attention is causal, so nothing to the left of it can see it.

        Args:
            theta: Weights.
            ids: Shape (B, L), int64.
            rows: Shape (n,), which text.
            cols: Shape (n,), which position.

        Returns:
            Shape (n, V).
        """
        named = {f"model.{name}": value for name, value in theta.items()}
        scores: Tensor = functional_call(self.scored, named, (ids, rows, cols))
        return scores

    def nll(self, theta: Theta, ids: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Negative log-likelihood of the token after each chosen position.

        Args:
            theta: Weights.
            ids: Shape (B, L), int64.
            rows: Shape (n,), which text.
            cols: Shape (n,), which position; the token judged is at ``cols + 1``.

        Returns:
            Shape (n,), nat/token.
        """
        scores = torch.log_softmax(self.logits(theta, ids, rows, cols), dim=-1)
        return -scores.gather(-1, ids[rows, cols + 1][:, None])[:, 0]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens.

        Args:
            text: Any.

        Returns:
            Its ids.

        Raises:
            UserError: If the model does not know one of them.
        """
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        highest = max(ids, default=0)
        why = f"the model knows {self.known} tokens, the tokenizer gives token {highest}"
        require(highest < self.known, "model", type(self.tokenizer).__name__, why, _OWN)
        return ids


def language(model: nn.Module, tokenizer: Any) -> Language:
    """A live model as functions of its weights.

    Args:
        model: Hugging Face causal model whose logits are a linear head on its last hidden state (Llama, GPT-2). It is
            set to evaluation mode and to eager attention, the only one with forward mode and second derivatives.
        tokenizer: Its tokenizer.

    Returns:
        The functions; the weights are detached, not copied.

    Raises:
        UserError: If the tokenizer names no first token that the model knows.
    """
    model.eval()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    theta = {name: value.detach() for name, value in named_parameters(model).items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    start, known = tokenizer.bos_token_id, vocabulary(model)
    start = tokenizer.eos_token_id if start is None else start
    why = f"the model knows {known} tokens, and texts would begin with token {start}"
    require(start is not None and start < known, "model", type(tokenizer).__name__, why, _OWN)
    return Language(_Scored(model), theta, tokenizer, int(start), known)


def open_language(path: Path) -> Language:
    """Load a model from its directory.

    Args:
        path: As ``save_pretrained`` writes it, tokenizer included.

    Returns:
        The functions, in float32 on the CPU.
    """
    return language(load_model(path, dtype=torch.float32), load_tokenizer(path))


def padded(texts: Sequence[Tensor]) -> Tensor:
    """Texts side by side.

    Args:
        texts: Ids, each of shape (L_i,).

    Returns:
        Shape (B, max L_i); zeros at the right end, at positions that no loss may choose.
    """
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=0)


def positions(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Every position that has a token after it; padding has none.

    Args:
        texts: Ids, each of shape (L_i,).

    Returns:
        (rows, cols), each of shape (Σ (L_i − 1),), text after text.
    """
    rows = torch.cat([torch.full((len(text) - 1,), row) for row, text in enumerate(texts)])
    return rows, torch.cat([torch.arange(len(text) - 1) for text in texts])

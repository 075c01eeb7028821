"""The three losses: of a document, of answers, of locality; all are means over real tokens only.

Padding never enters by construction: a loss names the positions that count. So every method has the same ratio of
answers to locality, and no token id stands for "ignored".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparing.jobs.adapt.lm import Language, Theta, padded, positions
from sparing.jobs.adapt.materials import Asked


def document_loss(lm: Language, theta: Theta, weights: Tensor, text: Tensor) -> Tensor:
    """Mean over t of w_t · NLL_t: the inner loss.

    Args:
        lm: The model.
        theta: Its weights θ.
        weights: Shape (L − 1,): of every token but the start token.
        text: Ids, shape (L,).

    Returns:
        Shape ().
    """
    cols = torch.arange(len(text) - 1)
    return (weights * lm.nll(theta, text[None], torch.zeros_like(cols), cols)).mean()


def answer_loss(lm: Language, theta: Theta, asked: Asked) -> Tensor:
    """Mean NLL over all answer tokens.

    Args:
        lm: The model.
        theta: Its weights.
        asked: Questions.

    Returns:
        Shape (), nat/token.
    """
    return lm.nll(theta, asked.ids, asked.rows, asked.cols).mean()


def log_probabilities(lm: Language, theta: Theta, texts: Sequence[Tensor]) -> Tensor:
    """What a model expects after every token.

    Args:
        lm: The model.
        theta: Its weights.
        texts: Ids, each of shape (L_i,).

    Returns:
        Shape (Σ (L_i − 1), V).
    """
    return torch.log_softmax(lm.logits(theta, padded(texts), *positions(texts)), dim=-1)


def divergence(lm: Language, theta: Theta, texts: Sequence[Tensor], before: Tensor) -> Tensor:
    """KL(p_θ₀ ‖ p_θ), mean over tokens: how much other text is disturbed.

    Args:
        lm: The model.
        theta: Its weights.
        texts: Other text.
        before: ``log_probabilities`` of the same texts under θ₀.

    Returns:
        Shape (), nat/token.
    """
    return (before.exp() * (before - log_probabilities(lm, theta, texts))).sum(dim=-1).mean()

"""The three losses: of a document, of answers, of locality; all are means over real tokens only.

Padding never enters by construction: a loss names the positions that count. So every method has the same ratio of
answers to locality, and no token id stands for "ignored".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparing.jobs.adapt.corpus import Questions
from sparing.jobs.adapt.lm import LanguageModel, Theta, padded, positions


def document_loss(lm: LanguageModel, theta: Theta, weights: Tensor, text: Tensor) -> Tensor:
    """Mean over t of w_t · NLL_t, the inner loss; ``weights`` (L − 1,) are of all but the start of ``text`` (L,)."""
    cols = torch.arange(len(text) - 1)
    return (weights * lm.nll(theta, text[None], torch.zeros_like(cols), cols)).mean()


def answer_loss(lm: LanguageModel, theta: Theta, questions: Questions) -> Tensor:
    """Mean NLL over all answer tokens (nat/token)."""
    return lm.nll(theta, questions.ids, questions.rows, questions.cols).mean()


def log_probabilities(lm: LanguageModel, theta: Theta, texts: Sequence[Tensor]) -> Tensor:
    """Shape (Σ (L_i − 1), V): what a model expects after every token of texts (L_i,)."""
    return torch.log_softmax(lm.logits(theta, padded(texts), *positions(texts)), dim=-1)


def divergence(lm: LanguageModel, theta: Theta, texts: Sequence[Tensor], before: Tensor) -> Tensor:
    """KL(p_θ₀ ‖ p_θ) on other text (nat/token), mean over tokens; ``before`` is ``log_probabilities`` under θ₀."""
    return (before.exp() * (before - log_probabilities(lm, theta, texts))).sum(dim=-1).mean()

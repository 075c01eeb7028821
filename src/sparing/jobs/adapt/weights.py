"""The token-weight network: what is learnt.

It reads features of the frozen pretrained model: at each token, the last hidden state that has just read it, the
token's embedding, and how surprised the model was by it. The hidden state is contextual already, so the network needs
no attention of its own; a body trained from nothing would need far more outer steps than a small machine can pay.
The features do not depend on θ, so ψ(φ), all weights of a run, is known before its first step.

Source: Hu et al. 2023 (arXiv:2305.15076), whose network is a DistilGPT-2 with such a head; Shen et al. 2024, App. F.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, softplus

from sparing.jobs.adapt.lm import LanguageModel, padded, positions
from sparing.seeds import stream

Phi = dict[str, Tensor]  # weights of the network by name

BETA = 3.0  # sharpness of the final softplus
START = math.log(2) / BETA  # every weight before anything is learnt: softplus at 0, ln 2 / 3


def features(lm: LanguageModel, texts: Sequence[Tensor], *, batch: int = 16) -> Tensor:
    """What the network reads of every token but the start tokens, (Σ (L_t − 1), 2d + 1).

    Hidden state and embedding, each with mean 0 and variance 1, and a tenth of the negative log-likelihood under θ₀.
    """
    return torch.cat([_features(lm, texts[at : at + batch]) for at in range(0, len(texts), batch)])


@torch.no_grad()
def _features(lm: LanguageModel, texts: Sequence[Tensor]) -> Tensor:
    ids, (rows, cols) = padded(texts), positions(texts)
    model = lm.scored.model
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[union-attr, operator]
    embedded = model.get_input_embeddings()(ids)  # type: ignore[union-attr, operator]
    # the state that has just read a token stands at cols + 1; how surprising the token was is known at cols
    at = (rows, cols + 1)
    wide = [layer_norm(part[at], part.shape[-1:]) for part in (hidden, embedded)]
    return torch.cat([*wide, lm.nll(lm.theta, ids, rows, cols)[:, None] / 10], dim=-1)


def init_weights(inputs: int, *, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Phi:
    """A network of two body and two head layers that gives every token the same weight: the last layer is zero."""
    sizes = {"body.0": (inputs, width), "body.1": (width, width), "head.0": (width, width // 2)}
    phi: Phi = {}
    for name, (before, after) in sizes.items():
        # drawn in float64 and rounded, so that every dtype starts from the same numbers
        drawn = torch.randn(after, before, generator=stream(seed, "weights", name), dtype=torch.float64)
        phi[f"{name}.weight"] = (drawn / math.sqrt(before)).to(dtype)
        phi[f"{name}.bias"] = torch.zeros(after, dtype=dtype)
    return phi | {"head.1.weight": torch.zeros(1, width // 2, dtype=dtype), "head.1.bias": torch.zeros(1, dtype=dtype)}


def weigh(phi: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Weights of tokens, (n,), positive, from their features (n, inputs).

    Example:
        >>> weigh(init_weights(3, width=4, seed=0), torch.ones(2, 3))
        tensor([0.2310, 0.2310])
    """
    for name in ("body.0", "body.1", "head.0"):
        inputs = gelu(linear(inputs, phi[f"{name}.weight"], phi[f"{name}.bias"]))
    return softplus(linear(inputs, phi["head.1.weight"], phi["head.1.bias"])[:, 0], beta=BETA)

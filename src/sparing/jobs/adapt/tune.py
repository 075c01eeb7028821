"""What comes before all methods: the pretrained model meets this kind of text, so that adapting is about its facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing.jobs.adapt.lm import LanguageModel, as_functions, padded, positions
from sparing.report import Progress
from sparing.seeds import stream

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
            loss = _loss(lm, [texts[index] for index in order[turn * batch : (turn + 1) * batch]])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            bar.advance(loss=loss.item())
    # wrapped again, which freezes the parameters that the passes unfroze
    return as_functions(model, lm.tokenizer)


def _loss(lm: LanguageModel, texts: Sequence[Tensor]) -> Tensor:
    """Mean NLL over all tokens of some documents."""
    ids, (rows, cols) = padded(texts), positions(texts)
    scores = torch.log_softmax(lm.scored(ids, rows, cols), dim=-1)
    return -scores.gather(-1, ids[rows, cols + 1][:, None]).mean()

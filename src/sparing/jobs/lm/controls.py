"""What a language model must pass before its loss says anything of its blocks: n-grams, and itself without a body.

A model whose loss is above that of a bigram has learnt no more than which token follows which, and so have its rivals
in the same table: what is compared then is how embedding and head are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sparing.blocks import find_blocks, submodule
from sparing.errors import UserError
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.packing import Packed
from sparing.report.declared import Rows

NAMES: Final = {"unigram": "unigram counts", "bigram": "bigram counts", "no body": "the model without its blocks"}
_COUNTS: Final = (
    "Cross-entropies of the same held-out tokens. Counts are of the training text, smoothed by Witten and Bell: the "
    "bigram backs off to the unigram, the unigram to equal chances. "
)
NOTE: Final = _COUNTS + (
    "Without its blocks a model is embedding, last norm "
    "and head, trained by as many steps; a model that is not below all of them tells nothing of its blocks."
)


def ngram_losses(train: Tensor, inputs: Tensor, targets: Tensor, *, vocabulary: int) -> dict[str, float]:
    """Cross-entropy (nat per token) of held-out tokens under unigram and bigram counts of the training text.

    The estimator is Witten and Bell's interpolation: with c a count, N the length of the text, V the vocabulary and
    T(h) the number of different tokens seen after h (of all tokens, where h is empty),

        p(w)     = (c(w) + T / V) / (N + T)
        p(w | v) = (c(v w) + T(v) p(w)) / (c(v) + T(v))

    It has no parameter to tune, and no token of the held-out text is counted, so it is an honest upper bound of what
    the last token tells about the next.

    Args:
        train: Tokens that were learnt, int64, shape (n,).
        inputs: Held-out tokens, int64, any shape.
        targets: The token after each, same shape; −100 where it is not judged.
        vocabulary: Different tokens that a model can tell (count).

    Source: Witten & Bell 1991, method C (doi:10.1109/18.87000).
    """
    return _losses(train, train[:-1], train[1:], inputs, targets, vocabulary)


def learnt_ngram_losses(train: Packed, held_out: Packed, *, vocabulary: int) -> dict[str, float]:
    """``ngram_losses`` of rows that hold documents, prompts and padding: counted is what is learnt, after what it is.

    Of a prompt with its answer only the answer counts, and nothing follows the end of a document.
    """
    targets = train.labels[:, 1:]
    learnt = targets != IGNORED
    before, after = train.ids[:, :-1][learnt], targets[learnt]
    return _losses(after, before, after, held_out.ids[:, :-1], held_out.labels[:, 1:], vocabulary)


def _losses(
    train: Tensor, leading: Tensor, following: Tensor, inputs: Tensor, targets: Tensor, vocabulary: int
) -> dict[str, float]:
    """Losses by counts of tokens, and of pairs of one and the next, both shape (n,)."""
    judged = targets != IGNORED
    before, after, train = inputs[judged], targets[judged], train.to(inputs.device)
    single = torch.bincount(train, minlength=vocabulary).double()
    kinds = (single > 0).sum().double()  # an integer over an integer would be rounded to float32
    unigram = (single + kinds / vocabulary) / (single.sum() + kinds)
    # pairs as one number: a table of all of them would have V² cells
    pairs, counts = torch.unique((leading * vocabulary + following).to(inputs.device), return_counts=True)
    leads = pairs // vocabulary
    followers = torch.bincount(leads, minlength=vocabulary).double()
    seen = torch.bincount(leads, weights=counts.double(), minlength=vocabulary)
    wanted = before * vocabulary + after
    at = torch.searchsorted(pairs, wanted).clamp(max=len(pairs) - 1)
    count = torch.where(pairs[at] == wanted, counts[at], 0).double()
    # a token that nothing follows in the training text tells nothing: the unigram alone
    new = followers[before].clamp(min=1)
    bigram = (count + new * unigram[after]) / (seen[before] + new)
    return {"unigram": -float(unigram[after].log().mean()), "bigram": -float(bigram.log().mean())}


def remove_body_(model: nn.Module) -> int:
    """Take all blocks out of a language model, and return how many there were.

    What is left computes what the whole one does with the last matrix of every residual branch frozen at zero: such
    branches add nothing, and no gradient passes them.

    Raises:
        UserError: If the blocks do not stand in a ``ModuleList``.
    """
    paths = [block.name for block in find_blocks(model) if block.role == "body"]
    lists = {path.rpartition(".")[0] for path in paths}
    found = [submodule(model, path) for path in sorted(lists)]
    for path, blocks in zip(sorted(lists), found, strict=True):
        if not isinstance(blocks, nn.ModuleList):
            got, why = f"{type(blocks).__name__} {path!r}", "its blocks cannot be left out"
            raise UserError("control", got=got, why=why, do="pass --no-control")
    for blocks in found:
        blocks._modules.clear()
    return len(paths)


def rows_of(controls: Mapping[str, float | None], loss: float | None) -> list[dict[str, Any]]:
    """Rows of the table "controls": what each reaches, and by how much the model is below it (nat).

    Example:
        >>> rows_of({"bigram": 2.5, "no body": None}, 2.0)[0]
        {'control': 'bigram', 'loss': 2.5, 'model_below': 0.5}
    """
    found = []
    for name, value in controls.items():
        below = value - loss if value is not None and loss is not None and math.isfinite(loss) else None
        found.append({"control": name, "loss": value, "model_below": below})
    return found


def failed(rows: Sequence[Mapping[str, Any]]) -> str:
    """What to say of a model that is not below its controls; nothing where it is.

    Example:
        >>> failed(rows_of({"unigram": 3.5, "bigram": 2.4}, 2.5))
        'Not passed: the model ends above bigram counts (2.400 nat/token), so its loss tells nothing of its blocks.'
        >>> failed(rows_of({"bigram": 2.4}, 2.3))
        ''
    """
    above = [row for row in rows if row["loss"] is not None and not (row["model_below"] or 0) > 0]
    if not above:
        return ""
    named = " and ".join(f"{NAMES[row['control']]} ({row['loss']:.3f} nat/token)" for row in above)
    return f"Not passed: the model ends above {named}, so its loss tells nothing of its blocks."


CONTROLS: Final = Rows("controls", "What the model must pass", note=NOTE, by="control", names=NAMES)

NGRAMS: Final = Rows(
    "controls", "What the model must pass", by="control", names=NAMES,
    note=_COUNTS + "A prompt, which is not learnt, is not counted either. A model that is not below both has shown no "
    "more than which token follows which.",
)  # fmt: skip
"""The controls of a run that starts from a trained model: n-grams of what it learns."""

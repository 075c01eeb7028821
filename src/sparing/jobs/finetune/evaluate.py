"""What a model has learnt: held-out loss, continuations of a prompt, movement of its blocks."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.blocks import find_blocks
from sparing.blocks import named_parameters as canonical
from sparing.jobs.finetune.labels import IGNORED
from sparing.jobs.finetune.packing import Packed


def takes_positions(model: nn.Module) -> bool:
    """Whether a model can be told where documents begin.

    Args:
        model: A causal language model, wrapped by peft or not.

    Returns:
        Whether its forward has ``position_ids``.
    """
    unwrapped: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return "position_ids" in inspect.signature(unwrapped.forward).parameters


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """The summed next-token loss of some rows.

    Args:
        model: A causal language model whose output has ``logits`` of shape (batch, length, vocabulary).
        ids: Token ids, int64, shape (batch, length).
        labels: The ids to learn, −100 elsewhere, int64, shape (batch, length); not shifted.
        positions: Place of each token in its document, int64, shape (batch, length); None: a row is a document.

    Returns:
        Sum over labels, in nats, shape (); float32 or the logits' finer format.
    """
    places = {} if positions is None or not takes_positions(model) else {"position_ids": positions}
    logits = model(input_ids=ids, use_cache=False, **places).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Labels are shifted rather than logits, so that the largest tensor of the step is not copied.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def loss_sum(model: nn.Module, data: Packed, rows: Tensor) -> Tensor:
    """``loss_of`` some rows of a table, moved to where the model is.

    Args:
        model: A causal language model.
        data: The table.
        rows: Which rows, int64, shape (batch,).

    Returns:
        Sum over labels, in nats, shape ().
    """
    device = next(model.parameters()).device
    places = None if data.positions is None else data.positions[rows].to(device)
    return loss_of(model, data.ids[rows].to(device), data.labels[rows].to(device), places)


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the modes of all modules come back.

    Args:
        model: Any module.

    Yields:
        Nothing.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def held_out_loss(model: nn.Module, data: Packed, *, batch: int = 1) -> tuple[float, int]:
    """Mean loss over the labels of all rows.

    Args:
        model: A causal language model.
        data: Rows that were not trained on.
        batch: Rows at once (count); the mean does not depend on it but for rounding.

    Returns:
        (loss in nats per label, labels).
    """
    with measuring(model):
        parts: Sequence[Tensor] = torch.split(torch.arange(data.rows), batch)
        total = math.fsum(loss_sum(model, data, rows).item() for rows in parts)
    return total / data.tokens, data.tokens


Measure = Callable[..., tuple[float, int]]
"""``held_out_loss``, or what does the same over several ranks."""


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss.

    Args:
        loss: In nats.

    Returns:
        e to the loss; infinity beyond what a float holds.
    """
    return math.exp(loss) if loss < 709 else math.inf


def continuations(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, special: bool = True
) -> list[str]:
    """Continue each prompt greedily, so that before and after differ by training alone.

    Args:
        model: A transformers or peft model.
        tokenizer: Its tokenizer.
        prompts: Texts, or renderings of chats.
        max_new_tokens: Length of each continuation (tokens), 0 for none; the prompt keeps only its end if both do not
            fit.
        special: Whether the tokenizer adds its special tokens; not for a rendered conversation, which has them.

    Returns:
        The new text of each; nothing at all if none is asked for.
    """
    if max_new_tokens == 0:
        return []
    from transformers import GenerationConfig

    end = tokenizer.eos_token_id
    pad = next((i for i in (tokenizer.pad_token_id, end) if i is not None), 0)
    plan = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end, pad_token_id=pad)
    room = max(1, (getattr(model.config, "max_position_embeddings", None) or 2**30) - max_new_tokens)
    found = []
    with measuring(model):
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special, verbose=False)["input_ids"]
            ids = ids[:, -room:].to(model.device)
            new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=plan)
            found.append(_added(tokenizer, new[0], ids.shape[1]))
    return found


def _added(tokenizer: Any, ids: Tensor, start: int) -> str:
    """The text that the tokens from ``start`` add; decoded alone, some tokenizers would drop its first space."""
    before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:start], ids))
    added: str = whole[len(before) :]
    return added if whole.startswith(before) else tokenizer.decode(ids[start:], skip_special_tokens=True)


def movement(model: nn.Module, original: nn.Module | Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """How far each block went, relative to its size.

    Args:
        model: The trained model.
        original: The same model before, or its parameters by canonical name.

    Returns:
        One row per block in order of use: ``block``, ``role``, ``index``, ``moved`` = ‖Δθ‖ / ‖θ‖ (2-norms in float64
        over all parameters of the block; θ before training).
    """
    before = original if isinstance(original, Mapping) else canonical(original)
    rows = []
    for block in find_blocks(model):
        moved = size = 0.0
        for name, parameter in block.params.items():
            was = before[name].detach().to(device=parameter.device, dtype=torch.float64)
            moved += (parameter.detach().double() - was).square().sum().item()
            size += was.square().sum().item()
        ratio = math.sqrt(moved / size) if size else math.nan
        rows.append({"block": block.name, "role": block.role, "index": block.index, "moved": ratio})
    return rows

"""Failures of torch's forward mode and second derivatives, turned into what a user can do about them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from sparing.errors import UserError

# Pattern of a complaint -> what mends it; the first that matches is told.
FIXES = (
    (
        r"autograd\.Function",
        "switch reentrant gradient checkpointing off; a Function of yours needs setup_context and jvp",
    ),
    (r"scaled_dot_product|flash_attention|efficient_attention", 'load the model with attn_implementation="eager"'),
    (r"mkldnn_rnn|_thnn_fused|lstm|gru|rnn", "run the model inside torch.backends.mkldnn.flags(enabled=False)"),
    (
        r"batch_norm|running_mean|vmap.*in-?place|in-?place.*vmap|\badd_\b|mutate a captured",
        "use GroupNorm, or BatchNorm with track_running_stats=False; a loss may not change a tensor in place",
    ),
    (r"\.item\(\)|data-dependent control flow", "keep the loss free of .item() and of branches on values"),
    (r"data pointer", "keep the loss in torch, without .numpy()"),
    (r"randomness", "pass dropout masks as part of the batch"),
    (
        r"not differentiable with respect to argument|itself has a forward gradient",
        'give the loss no weights or targets that depend on φ: take reduction="none" and weight its elements yourself',
    ),
)

FORWARD_MODE = re.compile(
    r"forward AD|forward-mode AD|jvp|in-?place|vmap|functorch|derivative for .* is not implemented|"
    r"data pointer of Tensor that doesn't have storage|ZeroTensors are immutable|itself has a forward gradient",
    re.IGNORECASE,
)

# What torch says where reverse mode lacks a derivative.
MISSING = re.compile(r"derivative for .* is not implemented|not differentiable with respect to argument")


def operation_name(complaint: str) -> str:
    """The name of the operation that a complaint of torch is about.

    Example:
        >>> operation("Trying to use forward AD with _cdist_forward that does not support it")
        '_cdist_forward'
    """
    for pattern in (
        r"The function (\S+)",
        r"forward AD with (\S+)",
        r"derivative for (\S+)",
        r"over (aten::\S+)",
        r"(aten::[\w.]+)",
    ):
        found = re.search(pattern, complaint)
        if found:
            return found.group(1).strip("'\",.")
    return "an operation"


def forward_mode_refusal(failure: BaseException) -> UserError | None:
    """The error to show for a failure inside forward mode."""
    complaint = str(failure)
    if isinstance(failure, UserError) or not FORWARD_MODE.search(complaint):
        return None
    return _refusal(
        "inner",
        complaint,
        "it cannot be differentiated forward",
        "a method that needs no forward mode, such as Checkpointed",
    )


@contextlib.contextmanager
def refuse_missing_derivatives(name: str) -> Iterator[None]:
    """Inside, an operation that reverse mode lacks a derivative of is refused in a line."""
    try:
        yield
    except RuntimeError as failure:  # NotImplementedError is one
        complaint = str(failure)
        if not MISSING.search(complaint):
            raise
        refusal = _refusal(name, complaint, "torch has no derivative of it", "ZerothOrder")
        raise refusal from failure


def _refusal(name: str, complaint: str, why: str, other: str) -> UserError:
    """An error that names operation, complaint, fix and another method."""
    fix = next((fix for pattern, fix in FIXES if re.search(pattern, complaint, re.IGNORECASE)), None)
    return UserError(
        name, got=operation_name(complaint), why=f"{why} ({complaint.splitlines()[0][:160]})",
        do=f"{fix or 'replace that operation'}, or use {other}",
    )  # fmt: skip

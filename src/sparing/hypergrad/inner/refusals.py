"""Errors of torch about missing derivatives, turned into what a user can do about them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from sparing.errors import UserError

# Pattern in torch's message -> the fix; the first match is shown.
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


def operation_name(message: str) -> str:
    """Name of the operation that an error message of torch is about.

    Example:
        >>> operation_name("Trying to use forward AD with _cdist_forward that does not support it")
        '_cdist_forward'
    """
    # the most specific wording first: an aten name alone may be that of a helper
    wordings = (
        r"The function (\S+)", r"forward AD with (\S+)", r"derivative for (\S+)", r"over (aten::\S+)",
        r"(aten::[\w.]+)",
    )  # fmt: skip
    matches = (re.search(wording, message) for wording in wordings)
    return next((match.group(1).strip("'\",.") for match in matches if match), "an operation")


def forward_mode_refusal(failure: BaseException, name: str = "inner") -> UserError | None:
    """The error to show for a failure inside forward mode, with the fix; None for another failure."""
    message = str(failure)
    if isinstance(failure, UserError) or not FORWARD_MODE.search(message):
        return None
    other = "a method that needs no forward mode, such as Checkpointed, in least squares GaussNewton(exact=False)"
    if name != "inner":  # residuals or a prior
        other = "hypergradient with its square in the outer loss, which needs no forward mode"
    return _refusal(name, message, "it cannot be differentiated forward", other)


@contextlib.contextmanager
def refuse_missing_derivatives(name: str) -> Iterator[None]:
    """Turn torch's error about an operation without a derivative into a UserError; others pass."""
    try:
        yield
    except RuntimeError as failure:  # a NotImplementedError is a RuntimeError
        message = str(failure)
        if not MISSING.search(message):
            raise
        raise _refusal(name, message, "torch has no derivative of it", "ZerothOrder") from failure


def _refusal(name: str, message: str, why: str, other: str) -> UserError:
    """An error that names the operation, torch's message, the fix and another method."""
    fix = next((fix for pattern, fix in FIXES if re.search(pattern, message, re.IGNORECASE)), None)
    return UserError(
        name, got=operation_name(message), why=f"{why} ({message.splitlines()[0][:160]})",
        do=f"{fix or 'replace that operation'}, or use {other}",
    )  # fmt: skip

"""Complaints of torch become one line with the operation and what mends it; other failures stay what they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from oracles.problems import example_weights
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.inner.refusals import forward_mode_refusal, operation_name

COMPLAINTS = {
    "Trying to use forward AD with _scaled_dot_product_flash_attention_for_cpu that does not support it because it has "
    "not been implemented yet.": ("_scaled_dot_product_flash_attention_for_cpu", 'attn_implementation="eager"'),
    "Trying to use forward AD with mkldnn_rnn_layer that does not support it": (
        "mkldnn_rnn_layer", "torch.backends.mkldnn.flags(enabled=False)",
    ),
    "vmap: aten::add_(self, *extra_args) is not possible because there exists a Tensor `other` in extra_args that has "
    "more elements than `self`; in-place running_mean": ("aten::add_", "GroupNorm"),
    "Trying to use forward AD with _cdist_forward that does not support it": ("_cdist_forward", "replace that"),
    "ZeroTensors are immutable. Please use the materialized zero tensor": ("an operation", "replace that"),
    "derivative for aten::grid_sampler_2d_backward is not implemented": ("aten::grid_sampler_2d_backward", "replace"),
}  # fmt: skip


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_a_complaint_is_told_with_operation_and_fix(complaint: str) -> None:
    name, fix = COMPLAINTS[complaint]
    refusal = forward_mode_refusal(RuntimeError(complaint))
    assert isinstance(refusal, UserError)
    assert operation_name(complaint).startswith(name)
    assert str(refusal).startswith(f"inner: got {name}")
    assert fix in str(refusal)
    assert "Checkpointed" in str(refusal)
    assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    "failure", [RuntimeError("CUDA out of memory"), ValueError("shapes"), UserError("a", got=1, why="jvp", do="d")]
)
def test_other_failures_are_not_ours_to_explain(failure: Exception) -> None:
    assert forward_mode_refusal(failure) is None


@pytest.mark.parametrize("method", [hg.Forward(), hg.Reverse(), hg.HessianFree()], ids=str)
def test_a_mistake_of_the_user_inside_the_loss_comes_through_as_it_is(method) -> None:
    def inner(theta, phi, batch):
        return (theta["hidden"] @ torch.ones(7, dtype=torch.float64)).sum()

    case = example_weights()
    with pytest.raises(RuntimeError, match="size mismatch"):
        hg.hypergradient(dataclasses.replace(case.problem, inner=inner), case.phi, method)


def test_an_operation_that_cannot_be_named_is_still_refused() -> None:
    assert operation_name("something about vmap") == "an operation"
    assert "got an operation" in str(forward_mode_refusal(RuntimeError("something about vmap")))

"""The ledger against bytes that can be counted by hand."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparing.memory import Bytes, Ledger

F64 = 8  # bytes of a float64
BATCH, D0, D1, D2 = 5, 7, 11, 3
WEIGHTS = D0 * D1 + D1 + D1 * D2 + D2

everywhere = pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "fake"])


def mlp() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(D0, D1, dtype=torch.float64), nn.ReLU(), nn.Linear(D1, D2, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def inputs(rows: int = BATCH) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * D0, dtype=torch.float64).reshape(rows, D0)


@everywhere
def test_every_byte_of_an_adamw_step_is_the_hand_count(mode):
    """Linear, ReLU, Linear, sum of squares; AdamW one parameter at a time; second step."""
    with mode():
        model, x = mlp(), inputs()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        with Ledger(model, optimizer, inputs=x) as ledger:
            for _ in range(2):
                ledger.reset_peak()
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
    profile = ledger.profile()
    weights, data = WEIGHTS * F64, BATCH * D0 * F64
    state = 2 * weights + 4 * 4  # two moments, and a float32 step for each of four tensors
    # kept for the backward pass: the input, ReLU's result, the output that is squared; then the loss and its gradient
    kept = data + BATCH * (D1 + D2) * F64 + 2 * F64
    assert profile.phases["forward"] == Bytes(params=weights, optimizer=state, activations=kept)
    after = Bytes(params=weights, grads=weights, optimizer=state, activations=data)
    assert profile.phases["backward"] == after
    assert profile.phases["step"] == after
    # the peak: while the largest tensor is updated, sqrt(v) and sqrt(v) / correction live beside everything else
    assert profile.total == after.total + 2 * D0 * D1 * F64
    assert profile.transient == 2 * D0 * D1 * F64


@everywhere
def test_the_peak_of_a_forward_pass_without_gradients_is_input_hidden_and_result(mode):
    with mode():
        model, x = mlp(), inputs()
        with Ledger(model, inputs=x) as ledger, torch.no_grad():
            model(x)
    # while ReLU writes its result its argument still lives; the output is smaller than either
    assert ledger.peak == Bytes(params=WEIGHTS * F64, activations=BATCH * (D0 + 2 * D1) * F64)
    assert ledger.now == Bytes(params=WEIGHTS * F64, activations=BATCH * D0 * F64)


@everywhere
def test_a_frozen_layer_keeps_nothing_for_its_own_gradient(mode):
    with mode():
        model, x = mlp(), inputs()
        model[2].requires_grad_(False)
        with Ledger(model, inputs=x) as ledger:
            model(x).square().sum().backward()
    profile = ledger.profile()
    assert profile.phases["backward"].grads == (D0 * D1 + D1) * F64
    with mode():
        model, x = mlp(), inputs()
        model[0].requires_grad_(False)
        with Ledger(model, inputs=x) as ledger:
            model(x).square().sum().backward()
    kept = BATCH * (D0 + D1 + D2) * F64 + 2 * F64  # the hidden layer is the last one's input
    assert ledger.profile().phases["forward"].activations == kept
    assert ledger.now.grads == (D1 * D2 + D2) * F64


@everywhere
def test_a_prefix_under_no_grad_leaves_only_its_result(mode):
    with mode():
        model, x = mlp(), inputs()
        model[0].requires_grad_(False)
        with Ledger(model, inputs=x) as ledger:
            with torch.no_grad():
                hidden = model[:2](x)
            model[2](hidden).square().sum().backward()
            del hidden
    assert ledger.profile().phases["forward"].activations == BATCH * (D0 + D1 + D2) * F64 + 2 * F64
    assert ledger.now == Bytes(
        params=WEIGHTS * F64, grads=(D1 * D2 + D2) * F64, activations=BATCH * D0 * F64
    )  # fmt: skip


@everywhere
def test_recomputed_activations_are_activations(mode):
    """With a wide layer checkpointed, forward keeps its input and result; backward makes its inside again."""
    wide = 50
    with mode():
        x = inputs()
        inside = nn.Sequential(
            nn.Linear(D0, wide, dtype=torch.float64), nn.ReLU(), nn.Linear(wide, 1, dtype=torch.float64)
        )
        with Ledger(inside, inputs=x) as ledger:
            out = checkpoint(inside, x, use_reentrant=False, preserve_rng_state=False)
            ledger.reset_peak()
            out.square().sum().backward()
    profile = ledger.profile()
    kept = BATCH * (D0 + 1) * F64 + 2 * F64  # beside input and result, the loss and its gradient
    assert profile.phases["forward"].activations == kept
    # the peak is at ReLU in the backward pass: its recomputed result, and the gradients of its result and argument
    assert profile.activations == kept + BATCH * wide * F64
    assert profile.transient == 2 * BATCH * wide * F64
    assert profile.grads == (wide + 1) * F64


@everywhere
def test_views_are_counted_once_and_the_dead_not_at_all(mode):
    with mode():
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        with Ledger(model) as ledger:
            rows = torch.zeros(10, 10, dtype=torch.float64)
            views = [rows.t(), rows[2:], rows.reshape(-1), rows.detach()]
            assert ledger.now.activations == 100 * F64
            del rows
            assert ledger.now.activations == 100 * F64, "a view keeps the whole storage alive"
            del views
            assert ledger.now.activations == 0
            assert ledger.peak.activations == 100 * F64


@everywhere
def test_tied_weights_are_counted_once(mode):
    with mode():
        model = nn.ModuleList([nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(2)])
        model[1].weight = model[0].weight
        with Ledger(model) as ledger:
            model[1](model[0](torch.ones(2, 6, dtype=torch.float64))).sum().backward()
    assert ledger.now.params == 36 * F64
    assert ledger.now.grads == 36 * F64


def test_buffers_count_with_parameters():
    model = nn.BatchNorm1d(4).double()
    with Ledger(model) as ledger:
        pass
    assert ledger.now == Bytes(params=4 * 4 * F64 + 8)  # weight, bias, mean, variance; the int64 number of batches


def test_two_gradients_of_one_tensor_are_summed_in_place():
    """The residual x enters twice; autograd adds the second gradient into the first, so two live, never three."""
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    with Ledger(model, inputs=x) as ledger:
        doubled = x * 2.0
        ledger.reset_peak()
        ((doubled * 3.0) + (doubled * 5.0)).sum().backward()
    # x, doubled, and in turn: two branches and their sum; in backward at most two gradients of 1000 elements
    assert ledger.peak.total == 8 + 5 * 1000 * F64


def test_two_gradients_are_summed_beside_each_other_where_the_first_is_a_view():
    """A table that is embedding and head: the head's gradient comes first, as the transpose of a product's result."""
    table = nn.Embedding(500, 4).double()
    with Ledger(table) as ledger:
        hidden = table(torch.tensor([1]))
        ledger.reset_peak()
        nn.functional.linear(hidden, table.weight).sum().backward()
    # the table, its two gradients and their sum; index and hidden row, and what the last operation holds of rows
    assert 0 <= ledger.peak.total - 4 * 500 * 4 * F64 <= 500


def test_optimizer_inside_backward_leaves_no_gradient_behind():
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with Ledger(model, *optimizers.values(), inputs=(x := inputs())) as ledger:
        for _ in range(2):
            model(x).square().sum().backward()
    assert ledger.now == Bytes(params=WEIGHTS * F64, optimizer=WEIGHTS * F64, activations=BATCH * D0 * F64)
    assert ledger.profile().phases["step"] == ledger.now


def test_flags_may_be_switched_while_watching_and_evicted_state_is_gone():
    model, x = mlp(), inputs()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model[2].requires_grad_(False)
    with Ledger(model, optimizer, inputs=x) as ledger:
        for trained, frozen in ((model[0], model[2]), (model[2], model[0])):
            trained.requires_grad_(True)
            frozen.requires_grad_(False)
            for parameter in frozen.parameters():
                optimizer.state.pop(parameter, None)
                parameter.grad = None
            model(x).square().sum().backward()
            optimizer.step()
            size = sum(parameter.numel() for parameter in trained.parameters()) * F64
            assert ledger.now.grads == size
            assert ledger.now.optimizer == 2 * size + 2 * 4


def test_watching_changes_no_number_and_leaves_nothing_behind():
    results = []
    for watch in (False, True):
        model, x = mlp(), inputs()
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Ledger(model, optimizer) if watch else nullcontext():
            model(x).square().sum().backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
        assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True, True]
        assert not optimizer._optimizer_step_pre_hooks
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched)


def test_the_ledger_stops_at_the_end_of_the_block_even_after_an_error():
    model = mlp()
    with pytest.raises(RuntimeError, match="stop"), Ledger(model) as ledger:  # noqa: PT012
        kept = torch.zeros(10)
        raise RuntimeError("stop")
    before = ledger.now
    del kept
    torch.zeros(1000)
    assert ledger.now == before == Bytes(params=WEIGHTS * F64, activations=40)


def test_only_the_device_that_was_asked_for_counts():
    with Ledger(mlp(), device="cuda") as ledger:
        inputs().square()
    assert ledger.peak == Bytes()


def test_sparse_gradients_count_as_indices_and_values():
    model = nn.Embedding(1000, 4, sparse=True).double()
    with Ledger(model) as ledger:
        model(torch.tensor([3, 5, 5])).sum().backward()
    # three rows of float64 and their int64 indices
    assert ledger.now.grads == 3 * 4 * F64 + 3 * 8


def test_a_storage_that_grows_is_followed():
    with Ledger(nn.Linear(1, 1, bias=False)) as ledger:
        out = torch.empty(0, dtype=torch.float64)
        torch.add(torch.ones(50, dtype=torch.float64), 1.0, out=out)
        assert ledger.now.activations == 50 * F64


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_gradients_that_stay_over_two_backward_passes_are_one_set(make):
    model, x = mlp(), inputs()
    optimizer = make(model.parameters())
    with Ledger(model, optimizer, inputs=x) as ledger:
        for _ in range(2):
            F.mse_loss(model(x), torch.zeros(BATCH, D2, dtype=torch.float64)).backward()
        optimizer.step()
    assert ledger.now.grads == WEIGHTS * F64


def test_quantized_weights_are_parameters_without_gradients():
    model = nn.Linear(3, 2, dtype=torch.float64)
    model.codes = nn.Parameter(torch.zeros(7, dtype=torch.uint8), requires_grad=False)
    with Ledger(model) as ledger:
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert ledger.now.params == 8 * F64 + 7
    assert ledger.now.grads == 8 * F64

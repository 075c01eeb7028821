"""The sparse layer against the masked dense one: numbers, gradients, state dicts, extremes of density."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.errors import UserError
from sparing.scaling.sparse import layers as sparse
from sparing.scaling.sparse.layers import SparseLinear
from sparing.scaling.sparse.pattern import move_values, pattern_of

ROUNDING = 1e-12  # float64, sums of at most 64 terms of order one: worst of 200 seeds 4e-15


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mask_of(out: int, into: int, density: float, seed: int = 1) -> Tensor:
    return torch.rand(out, into, generator=torch.Generator().manual_seed(seed)) < density


def one_a_row(out: int, into: int) -> Tensor:
    return F.one_hot(torch.arange(out) % into, into).bool()


def with_empty() -> Tensor:
    mask = mask_of(12, 9, 0.4)
    mask[3], mask[:, 5], mask[11], mask[:, 0] = False, False, False, False
    return mask


MASKS = {
    "bernoulli": mask_of(12, 9, 0.3),
    "one a row": one_a_row(12, 9),
    "full": torch.ones(12, 9, dtype=torch.bool),
    "empty rows and columns": with_empty(),
    "nothing": torch.zeros(12, 9, dtype=torch.bool),
    "one row": mask_of(1, 9, 0.5),
    "one column": mask_of(12, 1, 0.5),
}


def pair(mask: Tensor, *, transposed: bool = False, bias: bool = True, dtype=torch.float64):
    """The sparse layer, and the masked dense weight and bias it must equal."""
    weight = (draw(*mask.shape) * mask).to(dtype)
    stored = weight.t().contiguous() if transposed else weight
    b = nn.Parameter(draw(len(mask), seed=2, dtype=dtype)) if bias else None
    layer = SparseLinear(stored.clone(), mask.t() if transposed else mask, b, transposed=transposed)
    return layer, stored.clone().requires_grad_(), None if b is None else b.detach().clone().requires_grad_()


def gradients(outputs: Tensor, inputs: list[Tensor], seed: int = 5) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, draw(*outputs.shape, seed=seed, dtype=outputs.dtype))


@pytest.mark.parametrize("lead", [(7,), (2, 3), (), (0,), (2, 1, 4), (130,)])  # 130: more than are taken at a time
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_forward_and_gradients_are_those_of_the_masked_dense_layer(name, transposed, bias, lead):
    mask = MASKS[name]
    layer, weight, b = pair(mask, transposed=transposed, bias=bias)
    x = draw(*lead, mask.shape[1], seed=3).requires_grad_()
    dense = F.linear(x, weight.t() if transposed else weight, b)
    got = layer(x)
    torch.testing.assert_close(got, dense, rtol=ROUNDING, atol=ROUNDING)
    assert got.is_contiguous()

    ours = gradients(got, [x, *layer.parameters()])
    theirs = gradients(dense, [x, weight, *([b] if bias else [])])
    torch.testing.assert_close(ours[0], theirs[0], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(ours[1], layer.gather(theirs[1]), rtol=ROUNDING, atol=ROUNDING)
    assert ours[1].shape == (int(mask.sum()),)
    if bias:
        torch.testing.assert_close(ours[2], theirs[2], rtol=ROUNDING, atol=ROUNDING)


def test_gradients_are_finite_differences():
    layer, _, _ = pair(MASKS["empty rows and columns"])
    x = draw(4, 9, seed=3).requires_grad_()

    def call(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        return sparse._Csr.apply(x, values, bias, layer.pattern, None)

    assert torch.autograd.gradcheck(call, (x, layer.weight, layer.bias))


def test_a_diverged_weight_leaves_the_gradient_of_the_weights_finite():
    """Live values do not enter ∂L/∂values: 0 · inf of the sampled product's own addend must not."""
    layer, _, _ = pair(MASKS["bernoulli"], bias=False)
    with torch.no_grad():
        layer.weight[0] = torch.inf
    (grad,) = gradients(layer(draw(4, 9, seed=3)), [layer.weight])
    assert grad.isfinite().all()


def test_frozen_inputs_and_frozen_weights_are_skipped():
    layer, _, _ = pair(MASKS["bernoulli"])
    layer.weight.requires_grad_(False)
    x = draw(4, 9).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    assert not SparseLinear(frozen, torch.ones(2, 2).bool()).weight.requires_grad


@pytest.mark.parametrize("transposed", [False, True])
def test_scatter_and_gather_are_inverse_and_the_mask_is_that_given(transposed):
    mask = MASKS["bernoulli"]
    layer, weight, _ = pair(mask, transposed=transposed)
    assert torch.equal(layer.dense_weight(), weight)
    assert torch.equal(layer.gather(layer.dense_weight()), layer.weight)
    assert torch.equal(layer.weight_mask, mask.t() if transposed else mask)
    assert layer.dense_weight().is_contiguous()


@pytest.mark.parametrize("transposed", [False, True])
def test_dense_gradient_is_that_of_all_places(transposed, monkeypatch):
    monkeypatch.setattr(sparse, "_ROWS", 5)  # 12 rows in three products
    layer, weight, b = pair(MASKS["empty rows and columns"], transposed=transposed)
    assert layer.dense_gradient is None
    layer.keep_dense_gradient = True
    for seed in (3, 4):  # two micro-batches, one of them with a leading dimension more
        x = draw(2, 3, 9, seed=seed) if seed == 4 else draw(5, 9, seed=seed)
        layer(x).square().sum().backward()
        F.linear(x, weight.t() if transposed else weight, b).square().sum().backward()
    torch.testing.assert_close(layer.dense_gradient, weight.grad, rtol=ROUNDING, atol=ROUNDING)
    layer.clear_dense_gradient()
    assert layer.dense_gradient is None
    layer.keep_dense_gradient = False
    layer(draw(5, 9)).sum().backward()
    assert layer.dense_gradient is None


class MaskedLinear(nn.Linear):
    """The masked dense layer as it lies in a state dict."""

    def __init__(self, mask: Tensor):
        super().__init__(*reversed(mask.shape), dtype=torch.float64)
        self.register_buffer("weight_mask", mask)
        with torch.no_grad():
            self.weight.mul_(mask)


def test_state_dict_has_the_keys_and_values_of_the_masked_dense_layer():
    mask = MASKS["bernoulli"]
    dense = MaskedLinear(mask)
    layer = SparseLinear(dense.weight, mask, dense.bias)
    ours, theirs = layer.state_dict(), dense.state_dict()
    assert list(ours) == list(theirs) == ["weight", "bias", "weight_mask"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_state_dicts_load_both_ways():
    mask = MASKS["bernoulli"]
    first, second = nn.Sequential(MaskedLinear(mask)), nn.Sequential(MaskedLinear(mask))
    held = nn.Sequential(SparseLinear(first[0].weight, mask, nn.Parameter(draw(12))))
    weight = held[0].weight
    held.load_state_dict(second.state_dict())
    assert held[0].weight is weight  # the optimizer's parameter stays
    assert torch.equal(held[0].dense_weight(), second[0].weight)
    assert torch.equal(held[0].bias, second[0].bias)
    first.load_state_dict(held.state_dict())
    assert torch.equal(first[0].weight, second[0].weight)


def test_a_loaded_mask_replaces_the_pattern():
    one, other = MaskedLinear(MASKS["bernoulli"]), MaskedLinear(MASKS["one a row"])
    layer = SparseLinear(one.weight, MASKS["bernoulli"], one.bias)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.weight_mask, MASKS["one a row"])
    x = draw(4, 9)
    torch.testing.assert_close(layer(x), other(x), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("left_out", ["weight", "weight_mask", "bias"])
def test_missing_keys_are_missed(left_out):
    dense = MaskedLinear(MASKS["bernoulli"])
    layer = SparseLinear(dense.weight, dense.weight_mask, dense.bias)
    state = {name: value for name, value in dense.state_dict().items() if name != left_out}
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{left_out}"\.'):
        layer.load_state_dict(state)
    assert layer.load_state_dict(state, strict=False).missing_keys == [left_out]
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict(dense.state_dict() | {"gain": torch.ones(1)})


def test_a_checkpoint_of_other_shape_or_with_weights_off_the_mask_is_refused():
    dense = MaskedLinear(MASKS["bernoulli"])
    layer = SparseLinear(dense.weight, dense.weight_mask, dense.bias)
    state = dense.state_dict()
    with pytest.raises(RuntimeError, match="the sparse layer's is"):
        layer.load_state_dict(state | {"weight": torch.zeros(3, 3), "weight_mask": torch.zeros(3, 3).bool()})
    with pytest.raises(UserError, match="would lose them"):
        layer.load_state_dict(state | {"weight": torch.ones(12, 9)})


def test_copies_are_apart_but_share_the_pattern():
    layer, _, _ = pair(MASKS["bernoulli"])
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.abs().sum() > 0
    assert twin.pattern is layer.pattern
    x = draw(4, 9)
    torch.testing.assert_close(twin(x), twin.bias.expand(4, -1))


def test_layer_moves_between_float32_and_float64():
    layer, _, _ = pair(MASKS["bernoulli"])
    x = draw(4, 9)
    before = layer(x)
    assert layer.float()(x.float()).dtype == torch.float32
    torch.testing.assert_close(layer.double()(x), before, rtol=1e-6, atol=1e-6)  # weights went through float32


def test_autocast_runs_in_float32():
    layer, weight, b = pair(MASKS["bernoulli"], dtype=torch.float32)
    x = draw(4, 9, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x.bfloat16())
    got.sum().backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.linear(x.bfloat16().float(), weight, b), rtol=1e-5, atol=1e-5)


def test_half_precision_and_strange_inputs_are_refused_when_called():
    layer, _, _ = pair(MASKS["bernoulli"])
    with pytest.raises(UserError, match="fan-in is 9"):
        layer(draw(4, 8))
    with pytest.raises(UserError, match="float32 and float64"):
        layer.half()(draw(4, 9).half())


def test_what_cannot_run_is_refused_at_construction(monkeypatch):
    mask = MASKS["bernoulli"]
    with pytest.raises(UserError, match="float32 and float64"):
        SparseLinear(torch.zeros(12, 9, dtype=torch.float16), mask)
    with pytest.raises(UserError, match="it lies on meta"):
        SparseLinear(torch.zeros(12, 9, device="meta"), mask)
    with pytest.raises(UserError, match="would lose them"):
        SparseLinear(torch.ones(12, 9), mask)
    with pytest.raises(UserError, match="mask of the weight's shape"):
        SparseLinear(torch.zeros(9, 12), mask)
    with pytest.raises(UserError, match="matrix of bool"):
        pattern_of(torch.ones(3))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    with pytest.raises(UserError, match="no MKL"):
        SparseLinear(torch.zeros(12, 9, dtype=torch.float64), mask)


@pytest.mark.parametrize("density", [0.0, 0.2, 0.9, 1.0])
def test_values_are_carried_from_pattern_to_pattern(density):
    old, new = mask_of(17, 23, 0.3), mask_of(17, 23, density, seed=9)
    weight = draw(17, 23) * old
    values = weight[old]
    got = move_values(values, pattern_of(old), pattern_of(new))
    assert torch.equal(got, weight[new])  # zero where the old mask was: new places begin at zero
    assert torch.equal(
        move_values(weight[new & False], pattern_of(old & False), pattern_of(new)), torch.zeros(got.shape).double()
    )


def test_indices_are_four_bytes_and_the_transpose_is_the_transpose():
    mask = mask_of(40, 30, 0.3)
    pattern, other = pattern_of(mask), pattern_of(mask.t())
    live = int(mask.sum())
    assert pattern.nbytes == 4 * (3 * live + 41 + 31)
    assert torch.equal(pattern.crow_t, other.crow)
    assert torch.equal(pattern.col_t, other.col)
    assert torch.equal(mask.nonzero()[pattern.order], mask.t().nonzero().flip(1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own look
def test_layer_runs_between_compiled_parts():
    layer, _, _ = pair(MASKS["bernoulli"])
    model = nn.Sequential(layer, nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    x = draw(4, 9)
    assert torch.equal(compiled(x), model(x))


def test_float32_agrees_to_its_rounding():
    mask = mask_of(64, 256, 0.2)
    layer, weight, b = pair(mask, dtype=torch.float32)
    x = draw(32, 256, seed=3, dtype=torch.float32)
    exact = F.linear(x.double(), weight.double(), b.double())
    # about 51 products of order one a sum: 51 * 6e-8 leaves more than ten times what was seen
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), lambda y: y.sum()], ids=["square", "linear"])
def test_a_second_derivative_is_refused(loss, mkl):
    """A loss that is linear in the outputs sends a gradient that needs none; the weights still do."""
    layer, x = SparseLinear(torch.ones(2, 2), torch.ones(2, 2).bool()), torch.ones(1, 2, requires_grad=True)
    layer.mkl = mkl
    (grad,) = torch.autograd.grad(loss(layer(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_gradients_with_a_graph_are_those_without():
    layer, x = SparseLinear(torch.ones(4, 3), torch.ones(4, 3).bool()), torch.rand(5, 3, requires_grad=True)
    wanted = (x, layer.weight)
    plain = torch.autograd.grad(layer(x).square().sum(), wanted)
    assert all(map(torch.equal, plain, torch.autograd.grad(layer(x).square().sum(), wanted, create_graph=True)))

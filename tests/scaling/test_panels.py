"""The kernel of our own against float64: numbers, threads, refusals, and how it is built and cached."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from sparing.errors import UserError
from sparing.scaling.sparse import layers, panels
from sparing.scaling.sparse import pattern as pattern_module
from sparing.scaling.sparse.backends import convert_
from sparing.scaling.sparse.layers import SparseLinear
from sparing.scaling.sparse.pattern import Pattern, pattern_of

UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}  # roundoff of the result's type beyond that of the sums in float32
ORDER = ["DEFAULT", "AVX2", "AVX512"]
HERE = torch.backends.cpu.get_cpu_capability()
RUNS = ORDER[: ORDER.index(HERE) + 1] if HERE in ORDER else ["DEFAULT"]

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")


def draw(*shape: int, seed: int, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def within(got: Tensor, exact: Tensor, size: Tensor, terms: int, dtype=torch.float32) -> None:
    """Hold an error to its formula: terms · 2⁻²⁴ of what the terms add up to, whatever the order of the sum."""
    assert got.shape == exact.shape
    limit = (terms * 2.0**-24 + UNIT[dtype]) * size + 1e-30
    assert bool(((got.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("instructions", RUNS)
@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(0, 150), st.integers(1, 90), st.integers(1, 90)),
    density=st.sampled_from([0.0, 0.02, 0.2, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    biased=st.booleans(),
    strided=st.booleans(),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_products_are_those_of_float64(instructions, shape, density, dtype, biased, strided, blocks, seed):
    """Any shape, mask and stride; the same bits on one thread and on several, and where one gradient alone is asked."""
    kernel = panels.kernel(instructions)
    tokens, into, out = shape
    mask = torch.rand(out, into, generator=torch.Generator().manual_seed(seed)) < density
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pattern_module, "blocks_of", lambda *_: blocks)
        patch.setattr(panels, "_LEAST", 1)  # so that threads share work of any size
        pattern = pattern_of(mask)
        values, bias = draw(pattern.live, seed=seed + 1, dtype=dtype), draw(out, seed=seed + 2, dtype=dtype)
        x, grad = draw(tokens, into, seed=seed + 3, dtype=dtype), draw(tokens, out, seed=seed + 4, dtype=dtype)
        if strided:  # rows apart, and columns apart, which is copied
            x, grad = torch.cat([x, x], 1)[:, :into], torch.stack([grad, grad], -1)[..., 0]
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = kernel.forward(x, values, bias if biased else None, pattern)
            found.append((y, *kernel.backward(x, grad, values, pattern, of_x=True, of_values=True)))
        alone = [kernel.backward(x, grad, values, pattern, of_x=of, of_values=not of) for of in (True, False)]
    y, dx, dvalues = found[0]
    assert all(
        torch.equal(one, other) for other_found in found for one, other in zip(found[0], other_found, strict=True)
    )
    assert torch.equal(alone[0][0], dx)
    assert torch.equal(alone[1][1], dvalues)
    assert alone[0][1] is alone[1][0] is None
    assert {y.dtype, dx.dtype, dvalues.dtype} == {dtype}

    weight = torch.zeros(out, into, dtype=torch.float64)
    weight[mask] = values.double()
    x, grad, bias = x.double(), grad.double(), bias.double() * biased
    within(y, F.linear(x, weight, bias), F.linear(x.abs(), weight.abs(), bias.abs()), into + 2, dtype)
    within(dx, grad @ weight, grad.abs() @ weight.abs(), out + 1, dtype)
    within(dvalues, (grad.T @ x)[mask], (grad.abs().T @ x.abs())[mask], tokens + 1, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(7,), (2, 3), (), (0,), (1, 130)])
def test_layer_is_the_masked_dense_one(lead, dtype):
    mask = torch.rand(48, 40, generator=torch.Generator().manual_seed(1)) < 0.2
    mask[5], mask[:, 7] = False, False
    weight = (draw(48, 40, seed=0) * mask).to(dtype)
    layer = SparseLinear(weight.clone(), mask, nn.Parameter(draw(48, seed=2, dtype=dtype)))
    x = draw(*lead, 40, seed=3, dtype=dtype).requires_grad_()
    got = layer(x)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, layer.bias)]
    want = F.linear(*exact)
    grad = draw(*want.shape, seed=5, dtype=dtype)
    ours = torch.autograd.grad(got, [x, *layer.parameters()], grad)
    theirs = torch.autograd.grad(want, exact, grad.double())
    # at most 130 products of order one a sum, and one rounding to the type
    near = {"rtol": 1e-5 + UNIT[dtype], "atol": 1e-5 + 4 * UNIT[dtype]}
    torch.testing.assert_close(got.double(), want, **near)
    for mine, other in zip(ours, (theirs[0], layer.gather(theirs[1]), theirs[2]), strict=True):
        torch.testing.assert_close(mine.double(), other, **near)


@pytest.mark.parametrize("instructions", RUNS)
def test_bfloat16_is_rounded_as_torch_rounds_it(instructions):
    """One product an output, exact in float32: what is left is one rounding, ties and what is not finite included."""
    kernel, pattern = panels.kernel(instructions), pattern_of(torch.ones(1, 1, dtype=torch.bool))
    for factor in (1.0, 1.0078125, -3.03125, 2.0**-120, 2.0**120, torch.inf, torch.nan):
        value = torch.tensor([factor]).bfloat16()
        x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]  # all there are
        got = kernel.forward(x, value, None, pattern)
        want = (0.0 + x.float() * value.float()).bfloat16()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_gradients_that_are_expanded_or_turned_are_read_right():
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)) < 0.3
    layer = SparseLinear(draw(20, 30, seed=0) * mask, mask)
    x = draw(30, 9, seed=3).t().requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dense_weight().sum(0).expand(9, -1))


def test_infinite_weights_and_inputs_stay_where_they_belong():
    """Rows that fill up a panel are zeros, and must not turn an infinite weight into a NaN anywhere."""
    mask = torch.ones(3, 5, dtype=torch.bool)
    weight = draw(3, 5, seed=0)
    weight[1, 2] = torch.inf
    layer, x = SparseLinear(weight, mask), draw(7, 5, seed=1).requires_grad_()
    y = layer(x)
    assert y[:, [0, 2]].isfinite().all()
    assert y[:, 1].isinf().all()
    y[:, 0].sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_shapes_are_known_without_numbers():
    layer = SparseLinear(torch.ones(4, 2), torch.ones(4, 2).bool())
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(3, 2, requires_grad=True)
        y = layer(x)
        y.sum().backward()
    assert (y.shape, x.grad.shape, layer.weight.grad.shape) == ((3, 4), (3, 2), (8,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own look
def test_layer_runs_between_compiled_parts():
    layer = SparseLinear(draw(12, 9, seed=0), torch.ones(12, 9).bool())
    model, x = nn.Sequential(layer, nn.ReLU()), draw(4, 9, seed=1)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_inputs_of_another_type_are_refused():
    layer = SparseLinear(torch.ones(2, 2), torch.ones(2, 2).bool())
    with pytest.raises(UserError, match=r"weight is torch\.float32"):
        layer(torch.ones(1, 2, dtype=torch.bfloat16))


def test_a_pickled_pattern_forgets_addresses():
    layer = SparseLinear(draw(12, 9, seed=0), torch.ones(12, 9).bool())
    x = draw(4, 9, seed=1)
    y = layer(x)
    again = pickle.loads(pickle.dumps(layer))
    assert "addresses" in vars(layer.pattern)
    assert "addresses" not in vars(again.pattern)
    assert torch.equal(again(x), y)


@pytest.mark.parametrize("part", ["begin", "col", "crow_t", "col_t", "order"])
@pytest.mark.parametrize("wrong", ["beyond", "below", "short", "wide"])
def test_c_never_sees_indices_that_leave_the_matrix(part, wrong):
    sound = pattern_of(torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.5)
    bad = getattr(sound, part).clone()
    bad[len(bad) // 2] = {"beyond": 99, "below": -1}.get(wrong, bad[len(bad) // 2])
    bad = {"short": bad[:-1], "wide": bad.long()}.get(wrong, bad)
    with pytest.raises(UserError, match="memory that is not ours"):
        _ = dataclasses.replace(sound, **{part: bad}).addresses


def test_wrong_lengths_never_reach_c():
    pattern, kernel = pattern_of(torch.ones(4, 3, dtype=torch.bool)), panels.kernel()
    x, values, grad = torch.ones(2, 3), torch.ones(12), torch.ones(2, 4)
    for bad in (
        (x[:, :2], values, None),
        (x, values[:-1], None),
        (x, values, torch.ones(3)),
        (x.double(), values, None),
    ):
        with pytest.raises(UserError, match="the kernel reads"):
            kernel.forward(*bad, pattern)
    for bad in ((x, grad[:1], values), (x, grad[:, :3], values), (x, grad.bfloat16(), values), (x, grad, values[:-1])):
        with pytest.raises(UserError, match=r"the kernel reads|the input is"):
            kernel.backward(*bad, pattern, of_x=True, of_values=True)


ODD = {
    "meta": lambda x: x.to("meta"),
    "without memory": lambda x: torch._efficientzerotensor(x.shape),
    "wrapped": lambda x: TwoTensor(x, x),
}


@pytest.mark.parametrize("odd", ODD)
def test_tensors_without_memory_never_reach_c(odd):
    """C would read at address zero."""
    layer, x = SparseLinear(torch.ones(4, 3), torch.ones(4, 3).bool()), torch.ones(2, 3)
    with pytest.raises(UserError, match=r"CPU|memory of its own"):
        layer(ODD[odd](x))
    with pytest.raises(UserError, match=r"CPU|memory of its own"):
        panels.kernel().forward(x, torch.ones(12), ODD[odd](torch.ones(4)), layer.pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_another_shape_are_refused_and_not_read_beyond(dtype):
    layer, x = SparseLinear(torch.ones(4, 3, dtype=dtype), torch.ones(4, 3).bool()), torch.ones(2, 3, dtype=dtype)
    with pytest.raises(UserError, match="12 are live"):
        torch.func.functional_call(layer, {"weight": torch.zeros(3, dtype=dtype)}, (x,))


def test_numbers_that_torch_negates_where_they_are_read_are_negated():
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)) < 0.3
    layer, x = SparseLinear(draw(20, 30, seed=0) * mask, mask), draw(9, 30, seed=3)
    want = layer(x)
    assert torch.equal(layer(torch._neg_view(x)), -want)
    turned = {"weight": torch._neg_view(layer.weight.detach())}
    assert torch.equal(torch.func.functional_call(layer, turned, (x,)), -want)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4)])
@pytest.mark.parametrize("tokens", [0, 3])
def test_layers_without_inputs_or_outputs(shape, tokens):
    layer = SparseLinear(torch.zeros(shape), torch.zeros(shape).bool(), nn.Parameter(torch.ones(shape[0])))
    x = torch.zeros(tokens, shape[1], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, torch.ones(tokens, shape[0]))
    assert x.grad.shape == x.shape
    assert torch.equal(layer.bias.grad, torch.full((shape[0],), float(tokens)))


@pytest.mark.parametrize("asked", list(itertools.product([False, True], repeat=3)))
def test_each_gradient_alone(asked):
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)) < 0.3
    layer = SparseLinear(draw(20, 30, seed=0) * mask, mask, nn.Parameter(draw(20, seed=1)))
    x, found = draw(9, 30, seed=3), []
    for wanted in ((True, True, True), asked):
        inputs = (x.clone(), layer.weight, layer.bias)
        for tensor, wants in zip(inputs, wanted, strict=True):
            tensor.requires_grad_(wants).grad = None
        y = layer(inputs[0])
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.square().sum().backward()
        found.append([tensor.grad for tensor in inputs])
    for wants, got, full in zip(asked, found[1], found[0], strict=True):
        assert torch.equal(got, full) if wants else got is None


TRANSFORMS = {
    "vmap": lambda layer, x: torch.vmap(layer)(x),
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions_are_refused(name):
    """As torch refuses them; numbers that are wrong would be worse."""
    layer = SparseLinear(torch.ones(4, 3), torch.ones(4, 3).bool())
    with pytest.raises(RuntimeError, match="functorch transforms"):
        TRANSFORMS[name](layer, torch.ones(2, 3))


def test_nothing_is_recorded_under_inference_mode():
    layer, x = SparseLinear(torch.ones(4, 3), torch.ones(4, 3).bool()), torch.ones(2, 3)
    with torch.inference_mode():
        y = layer(x)
    assert y.is_inference()
    assert torch.equal(y, layer(x).detach())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own look
def test_an_unpickled_layer_may_be_the_first_of_its_process(monkeypatch):
    layer = SparseLinear(torch.ones(4, 3), torch.ones(4, 3).bool())
    kept = pickle.dumps(layer)
    monkeypatch.delattr(SparseLinear, "_apart")
    layers.prepare.cache_clear()
    again = pickle.loads(kept)
    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(again, backend="eager")(x), layer(x))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_threads(monkeypatch):
    monkeypatch.setattr(panels, "_LEAST", 1)
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)) < 0.3
    layer, x = SparseLinear(draw(20, 30, seed=0) * mask, mask), draw(300, 30, seed=3)
    torch.set_num_threads(2)
    want = layer(x)  # OpenMP has threads from here on
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os._exit(0 if torch.equal(layer(x), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_of_python_may_call_at_once():
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)) < 0.3
    layer, x = SparseLinear(draw(20, 30, seed=0) * mask, mask), draw(300, 30, seed=3)
    want = layer(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, want) for y in pool.map(layer, [x] * 32))


@pytest.fixture
def fresh(monkeypatch, tmp_path) -> Iterator[Path]:
    """An empty cache, and no kernel in memory before or after."""
    monkeypatch.setenv("SPARING_CACHE", str(tmp_path))
    panels.kernel.cache_clear()
    yield tmp_path
    panels.kernel.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "said"), [("no-such-compiler", "no C compiler no-such-compiler"), ("false", "exit")]
)
def test_without_a_compiler_mkl_takes_over_and_it_is_said_once(fresh, monkeypatch, compiler, said):
    monkeypatch.setenv("CC", compiler)
    mask = torch.rand(12, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    weight, x = draw(12, 9, seed=0) * mask, draw(4, 9, seed=1)
    with pytest.warns(RuntimeWarning, match=said) as warned:
        y = SparseLinear(weight, mask)(x)
    assert len(warned) == 1
    assert not list(fresh.rglob("*.so"))
    torch.testing.assert_close(y, F.linear(x, weight))
    assert "C compiler" in layers.unsupported(weight.bfloat16())
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    with pytest.raises(UserError, match="no MKL"):
        SparseLinear(weight, mask)


def test_convert_says_which_products_run():
    model = nn.Sequential(nn.Linear(8, 8))
    mask = torch.eye(8, dtype=torch.bool)
    with torch.no_grad():
        model[0].weight.mul_(mask)
    assert "our kernel" in convert_(model, {"0.weight": mask}, backend="csr")["0.weight"].why
    model.double()
    assert "MKL" in convert_(model, {"0.weight": mask})["0.weight"].why


@pytest.mark.parametrize("instructions", RUNS)
@pytest.mark.parametrize(("sanitizers", "trials"), [("address,undefined", 300), ("thread", 100)])
@pytest.mark.slow
def test_sanitizers_find_nothing(sanitizers, trials, instructions, tmp_path):
    """Random products in C, arrays of exactly their size, one to three threads, held to float64 there.

    Fewer under the thread sanitizer: seven times slower, and a race is one whatever the threads' order in a run.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    program, source = tmp_path / "fuzz", Path(__file__).with_name("panels_fuzz.c")
    flags = [*panels.instruction_flags(instructions), "-g", "-O1", "-std=gnu11", "-pthread", f"-fsanitize={sanitizers}"]
    command = [compiler, *flags, "-fno-sanitize-recover=all", f"-I{panels.SOURCE.parent}", source, "-o", program, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "san" in built.stderr:
        pytest.skip(f"the compiler's sanitizers are not installed: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, str(trials)], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on a kernel with so much address randomization")
    assert done.returncode == 0, done.stdout + done.stderr


def test_patterns_differ_only_in_their_blocks():
    mask = torch.rand(64, 512, generator=torch.Generator().manual_seed(0)) < 0.3
    pattern: Pattern = pattern_of(mask)
    assert pattern.blocks == 3
    assert torch.equal(pattern.crow, torch.cat([torch.zeros(1), mask.sum(1).cumsum(0)]).int())
    assert torch.equal(pattern.flat, mask.flatten().nonzero().squeeze(1))

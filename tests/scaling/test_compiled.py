"""Scaled models under ``torch.compile``: outputs and masked gradients as without."""

from __future__ import annotations

import copy

import pytest
import torch

from scaling import models
from sparing.scaling import convert_
from sparing.scaling.apply import apply_
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SuPar
from sparing.scaling.sparse import cuda

# the compiler's own look at what stands where a graph breaks
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _reset():
    """Frames that one test's breaks have marked would be skipped in the next."""
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_a_compiled_model_trains_like_an_eager_one(copied):
    """Tracing takes about five seconds; the copy is compiled without ever having run."""
    model = models.constant_mlp(32)
    rule = SuPar(input=2.0, output=3.0, form="shifted")
    apply_(model, plan(model, base=models.constant_mlp(16), density=0.25, rule=rule, init={"*": "constant"}))
    twin = copy.deepcopy(model) if copied else model
    compiled = torch.compile(twin, backend="aot_eager")
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    compiled(x).square().mean().backward()
    got = {name: p.grad.clone() for name, p in twin.named_parameters()}
    twin.zero_grad()
    model(x).square().mean().backward()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-7)  # float32, the same products
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-5, atol=1e-7)
    for name, mask in masks_of(compiled).items():
        assert not got[name][~mask].any()
        assert got[name][mask].any()


@pytest.mark.slow
@pytest.mark.parametrize("undo", ["step", "pass", "state"])
def test_an_edit_of_a_compiled_model_is_undone_by_a_step_an_eager_pass_or_a_state_dict(undo):
    model = models.constant_mlp(32)
    masks = apply_(model, plan(model, base=models.constant_mlp(16), density=0.25, init={"*": "constant"}))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    with torch.no_grad():
        model[2].weight.add_((~masks["2.weight"]).float())
    compiled(x).sum().backward()
    assert model[2].weight[~masks["2.weight"]].any()
    {"step": optimizer.step, "pass": lambda: model(x), "state": model.state_dict}[undo]()
    assert not model[2].weight[~masks["2.weight"]].any()
    torch.testing.assert_close(compiled(x), expected)


def converted() -> torch.nn.Module:
    model = models.constant_mlp(32)
    masks = apply_(model, plan(model, base=models.constant_mlp(16), density=0.25, init={"*": "constant"}))
    convert_(model, masks, backend="csr")
    return model


@pytest.mark.slow
def test_a_converted_model_trains_compiled_as_it_does_eager():
    """Three steps of AdamW in float32; sparse products run between compiled parts."""
    eager, inner = converted(), converted()
    compiled = torch.compile(inner, backend="aot_eager")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (eager, inner)]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(eager.named_parameters(), inner.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_whole_graph_of_a_converted_model_is_refused_with_the_reason():
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph"):
        torch.compile(converted(), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [cuda.TwoOfFourLinear, cuda.BlockLinear])
def test_layers_of_the_gpu_run_between_compiled_parts(kind, monkeypatch):
    """Kernels replaced by dense products, as in ``test_cuda``: what the compiler sees is the same."""
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight)
    monkeypatch.setattr(cuda, "_product", lambda matrix, x: x @ matrix.to_dense().t())
    cuda._exempt()
    layer = torch.nn.Linear(64, 64)
    layer.__class__ = kind
    layer.__dict__ |= {"_both": False, "_blocks": cuda.blocks_of(torch.ones(64, 64, dtype=torch.bool), 16)}
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), layer, torch.nn.ReLU())
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)

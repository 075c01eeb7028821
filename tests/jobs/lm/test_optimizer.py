"""What every optimizer holds and needs, by formula and by ledger; and what it does, against its library."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from refusals import refused
from sparing.jobs.lm.lowrank import _Subspace
from sparing.jobs.lm.one_by_one import after, load
from sparing.jobs.lm.optimizer import (
    Adafactor,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    Apollo,
    ApolloMini,
    GaLore,
    OffloadedAdamW,
    PagedAdamW8bit,
    check_optimizer,
    shared_of,
)
from sparing.memory import Ledger, measure

WAYS: dict[str, Any] = {
    "adamw": AdamW(),
    "8bit": AdamW8bit(device="cpu"),
    "paged": PagedAdamW8bit(device="cpu"),
    "4bit": AdamW4bit(device="cpu"),
    "adafactor": Adafactor(),
    "apollo": Apollo(rank=8, every=1),
    "mini": ApolloMini(),
    "galore": GaLore(rank=8, every=1),
    "offloaded": OffloadedAdamW(device="cpu"),
}
every_way = pytest.mark.parametrize("name", WAYS)
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

# a matrix and its transpose, an embedding, a Conv1D's, one of no whole blocks, a vector that is quantized, a short one,
# and a matrix of almost nothing
SHAPES = [(64, 128), (128, 64), (300, 64), (64, 192), (41, 100), (6400,), (33,), (4, 5)]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def walk_(optimizer: torch.optim.Optimizer, steps: int, *, noise: float = 1.0) -> None:
    """Steps along the same gradients for every optimizer over the same shapes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = (p.detach() + noise * torch.randn(p.shape, generator=generator)).to(p.dtype)
        optimizer.step()


@both_types
@every_way
def test_state_is_what_the_optimizer_holds_byte_by_byte(name: str, dtype: torch.dtype) -> None:
    way = WAYS[name]
    made = way.make([{"params": parameters(SHAPES, dtype), "weight_decay": 0.1}], lr=1e-3)
    walk_(made, 2)
    for p, held in made.state.items():
        shape, tensors = tuple(p.shape), [value for value in held.values() if isinstance(value, torch.Tensor)]
        assert sum(t.untyped_storage().nbytes() for t in tensors) == way.state(shape, dtype) + way.host(shape, dtype)
        assert all(isinstance(value, torch.Tensor | int) and type(value) is not object for value in held.values())
    assert sum(t.nbytes for t in shared_of(made)) == way.shared()


@both_types
@every_way
def test_a_step_needs_what_the_ledger_sees(name: str, dtype: torch.dtype) -> None:
    way = WAYS[name]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: object) -> None:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()

    for shapes in ([(64, 128)], [(128, 64), (6400,)], [(300, 64), (33,)], [(41, 100), (64, 192)]):
        make = lambda ps: way.make([{"params": ps, "weight_decay": 0.1}], lr=1e-3)  # noqa: E731
        found = measure(nn.ParameterList(parameters(shapes, dtype)), {}, make, step=step)
        held = sum(way.state(shape, dtype) + way.host(shape, dtype) for shape in shapes)
        assert found.phases["step"].optimizer == held
        needed = found.total - found.params - found.grads - held
        # APOLLO's limit of an update is a tensor or a number, by its values; APOLLO-Mini draws in every 200th step only
        spare = 2 * dtype.itemsize if name == "apollo" else 0.01 * needed if name == "mini" else 0
        assert needed <= way.step(shapes, dtype) <= needed + spare, shapes


def test_on_cuda_kernels_need_nothing_and_pages_lie_in_the_host() -> None:
    for way in (AdamW8bit(), PagedAdamW8bit()):
        assert way.step(SHAPES, torch.bfloat16) == 0
    n, paged = 400 * 400, PagedAdamW8bit()
    assert paged.host((400, 400), torch.float32) == 2 * n
    assert paged.state((400, 400), torch.float32) + 2 * n == AdamW8bit().state((400, 400), torch.float32)
    assert paged.host((64, 64), torch.float32) == 0
    offloaded = OffloadedAdamW()
    assert offloaded.state((400, 400), torch.bfloat16) == 0
    assert offloaded.host((400, 400), torch.bfloat16) == offloaded.step([(400, 400), (3,)], torch.bfloat16) == 4 * n + 4


def official(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The library's own optimizer, made as its documentation says; the first group is projected where any is."""
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if name in {"8bit", "paged"}:
        return load("bitsandbytes").optim.AdamW8bit(groups, **options)
    if name == "4bit":
        return load("torchao.optim").AdamW4bit(groups, **options)
    if name == "adafactor":
        return load("transformers.optimization").Adafactor(
            groups, scale_parameter=False, relative_step=False, **options
        )
    if name == "galore":
        own = {"rank": 8, "update_proj_gap": 1, "scale": 0.25, "proj_type": "std"}
        kind = partial(load("galore_torch").GaLoreAdamW, no_deprecation_warning=True)
    else:
        own = {"rank": 8, "update_proj_gap": 1, "scale": 1.0, "proj_type": "std"}
        own |= {"proj": "random", "scale_type": "channel"}
        if name == "mini":
            own |= {"rank": 1, "update_proj_gap": 200, "scale": 128.0, "scale_type": "tensor"}
        kind = load("apollo_torch").APOLLOAdamW
    return kind([groups[0] | own, groups[1]], eps=1e-8, **options)


@both_types
@pytest.mark.parametrize("name", ["8bit", "paged", "4bit", "adafactor", "apollo", "mini", "galore"])
def test_it_steps_to_the_bits_of_the_library_itself(name: str, dtype: torch.dtype) -> None:
    shapes = [(64, 128), (300, 64), (64, 64), (6400,), (33,)]
    ours, theirs = parameters(shapes, dtype), parameters(shapes, dtype)
    made = WAYS[name].make([{"params": ours, "weight_decay": 0.1}], lr=1e-2)
    other = official(name, [{"params": theirs[:3]}, {"params": theirs[3:]}])
    with torch.compiler.set_stance("force_eager"):
        for optimizer in (made, other):
            walk_(optimizer, 4)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_offloaded_steps_to_the_bits_of_adamw() -> None:
    ours, theirs = parameters(SHAPES, torch.bfloat16), parameters(SHAPES, torch.bfloat16)
    for way, chosen in ((OffloadedAdamW(), ours), (AdamW(), theirs)):
        walk_(way.make([{"params": chosen, "weight_decay": 0.1}], lr=1e-2), 3)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_offloaded_state_is_on_the_device_for_one_parameter_at_a_time() -> None:
    """On fake tensors of a CUDA device that need not be there."""
    with FakeTensorMode():
        shapes = [(64, 64), (300, 64), (5,)]
        model = nn.ParameterList([nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes])
        way = OffloadedAdamW()
        made = way.make([{"params": list(model)}], lr=1e-3)
        with Ledger(model, made, device="cuda") as ledger:
            for _ in range(2):
                for p in model:
                    p.grad = torch.empty_like(p)
                made.step()
        assert all(value.device.type == "cpu" for held in made.state.values() for value in held.values())
    peak = ledger.peak
    assert peak.total - peak.params - peak.grads == way.step(shapes, torch.float32)
    assert ledger.now.optimizer == ledger.now.transient == 0


def test_galore_of_full_rank_is_adamw_in_the_coordinates_of_the_first_gradient() -> None:
    """Each gradient times V, the right singular vectors of the first; AdamW steps W V, and V turns it back."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(12, 7, generator=generator, dtype=torch.float64) for _ in range(6))
    p = nn.Parameter(weight.clone())
    own = {"params": [p], "rank": 7, "update_proj_gap": 100, "scale": 1.0, "proj_type": "std"}
    made = after(_Subspace, "galore_torch", "GaLoreAdamW")([own], lr=0.1, eps=1e-30, no_deprecation_warning=True)
    turned = torch.linalg.svd(grads[0], full_matrices=False)[2].T
    q = nn.Parameter(weight @ turned)
    plain = torch.optim.AdamW([q], lr=0.1, eps=1e-30, weight_decay=0.0)
    for grad in grads:
        p.grad, q.grad = grad, grad @ turned
        made.step()
        plain.step()
    # the library decomposes in float32, and Adam divides by gradients of any size
    torch.testing.assert_close(p.detach(), q.detach() @ turned.T, rtol=0, atol=1e-4)
    assert not torch.allclose(p.detach(), weight, atol=0.1)


def test_adafactor_of_a_matrix_is_the_papers() -> None:
    """Algorithm 4 of the paper without momentum and relative steps, in float64."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = (torch.randn(12, 7, generator=generator, dtype=torch.float64) for _ in range(6))
    p = nn.Parameter(weight.clone())
    made = Adafactor().make([{"params": [p]}], lr=0.1)
    rows, columns = torch.zeros(12, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        p.grad = grad
        made.step()
        decay, square = 1 - step**-0.8, grad**2 + 1e-30
        rows = decay * rows + (1 - decay) * square.sum(1)
        columns = decay * columns + (1 - decay) * square.sum(0)
        update = grad / (rows[:, None] * columns / rows.sum()).sqrt()
        weight = weight - 0.1 * update / max(1.0, update.pow(2).mean().sqrt().item())
    torch.testing.assert_close(p.detach(), weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "bound"), [("8bit", 0.05), ("4bit", 0.25)])
def test_few_bits_move_weights_as_many_do(name: str, bound: float) -> None:
    """Distance from where 32-bit moments lead, over the way there, after 20 steps."""
    ends = []
    for way in (WAYS[name], AdamW()):
        chosen = parameters([(64, 128), (300, 64)], torch.float32)
        walk_(way.make([{"params": chosen, "weight_decay": 0.0}], lr=1e-2), 20)
        ends.append(torch.cat([p.detach().flatten() for p in chosen]))
    start = torch.cat([p.detach().flatten() for p in parameters([(64, 128), (300, 64)], torch.float32)])
    error = (ends[0] - ends[1]).norm() / (ends[1] - start).norm()
    # a code of so many bits is off by half its distance to the next, and Adam's division passes that on
    assert 0 < error < bound


def test_rates_stay_numbers_that_loops_may_set() -> None:
    p = parameters([(64, 64)], torch.float32)
    made = AdamW4bit(device="cpu").make([{"params": p, "lr": 0.5}], lr=1e-3)
    before = p[0].detach().clone()
    made.param_groups[0]["lr"] = 0.0
    walk_(made, 1)
    assert torch.equal(p[0], before)
    assert made.param_groups[0]["lr"] == 0.0


def test_rounding_by_chance_keeps_small_steps_on_average() -> None:
    """Steps of 1/1024 of the weight, below half a unit in the last place of bfloat16."""
    ends = {}
    for stochastic in (False, True):
        p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        made = AdamW4bit(device="cpu", stochastic=stochastic).make([{"params": [p]}], lr=2**-10)
        torch.manual_seed(0)
        for _ in range(8):
            p.grad = torch.ones_like(p)
            made.step()
        ends[stochastic] = p.detach().float().mean().item()
    assert ends[False] == 1.0
    assert math.isclose(1 - ends[True], 8 * 2**-10, rel_tol=0.1)


def test_nothing_to_project_is_refused() -> None:
    for way in (GaLore(), Apollo()):
        refused(
            "rank: got .*nothing would be projected", way.make, [{"params": parameters([(8, 64)], torch.float32)}], lr=1
        )


def test_codes_of_a_checkpoint_move_into_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no pages without CUDA: what the library would be asked for is."""
    p = parameters([(400, 400)], torch.float32)
    made = PagedAdamW8bit(device="cpu").make([{"params": p}], lr=1e-3)
    walk_(made, 1)
    asked, codes = [], made.state[p[0]]["state1"]

    def page(p: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        asked.append(torch.zeros_like(p, dtype=dtype))
        asked[-1].is_paged = True
        return asked[-1]

    made.is_paged = True
    monkeypatch.setattr(made, "get_state_buffer", page)
    monkeypatch.setattr(made, "prefetch_state", lambda p: None)
    for _ in range(2):
        made.open_(made.state[p[0]], p[0], {})
    assert len(asked) == 2
    assert made.state[p[0]]["state1"] is asked[0]
    assert torch.equal(asked[0], codes)


def test_a_missing_library_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    refused("torchao is not installed; run pip install 'sparing", check_optimizer, "adamw-4bit")
    check_optimizer("adamw")

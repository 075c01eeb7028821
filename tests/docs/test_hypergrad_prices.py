"""Studies of what pieces of a hypergradient cost: equal answers by every way, prices by hand, no files left."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import hypergrad_mixed as mixed
from benchmarks import hypergrad_offload as offload
from benchmarks import hypergrad_prices as prices
from benchmarks.hypergrad_tables import prices as table

from sparing import hypergrad as hg


def test_ways_to_pull_through_a_step_agree_with_the_hessian() -> None:
    """Against the dense Hessian of a small loss, in float64."""
    rng = torch.Generator().manual_seed(0)
    theta, phi, along = (torch.randn(n, generator=rng, dtype=torch.float64) for n in (4, 3, 4))
    mix = torch.randn(4, 3, generator=rng, dtype=torch.float64)

    def loss(theta, phi):
        return (theta["w"].sin() @ mix @ phi.exp()) + (theta["w"] ** 4).sum()

    flat = torch.autograd.functional.hessian(lambda both: loss({"w": both[:4]}, both[4:]), torch.cat([theta, phi]))
    for name, way in mixed.WAYS.items():
        found = way(loss, {"w": theta}, phi, {"w": along})
        if name == mixed.ALONE:
            both = torch.cat([theta, phi]).requires_grad_()
            (slope,) = torch.autograd.grad(loss({"w": both[:4]}, both[4:]), both)
            assert torch.equal(torch.cat(found), slope)
            continue
        assert torch.allclose(torch.cat(found), flat[:, :4] @ along, rtol=1e-12, atol=1e-12), name


def test_prices_by_hand() -> None:
    """Ten steps of a second each: what is above the plain run, in its steps."""
    taken = {prices.PLAIN: 10.0, "reverse": 30.0, "Hessian-free": 12.0, "Neumann": 27.0}
    taken |= {f"b={count}": 10.0 + 15.0 * count for count in prices.DIRECTIONS}
    found = prices.prices(taken)
    assert found == {"pull": 3.0, "product": 1.5} | {f"b={count}": 1.5 for count in prices.DIRECTIONS}
    lines = table({"rounds": {"net": [taken, taken]}}).splitlines()
    assert lines[3].startswith("| net | 3.00 [3.00, 3.00] | 1.50 [1.50, 1.50] |")
    assert lines[3].endswith("| 2 |")
    assert lines[4].startswith("| net: `choose` | 3.00 | 1.50 | 2.55 | 2.10 |")  # a pull of three steps, not two
    assert lines[2].startswith("| `predict` | 2 | 1 | 1.7 | 1.4 |")


@pytest.mark.parametrize("net", prices.NETS)
def test_the_arms_of_prices_are_of_one_run(net: str) -> None:
    """Every net has second derivatives, and all arms start from the same problem."""
    problem, phi = prices.NETS[net]()
    exact = hg.hypergradient(problem, phi, hg.Reverse(), seed=0)
    sampled = hg.hypergradient(problem, phi, hg.ForwardGradient(directions=1), seed=0)
    assert float(sampled.value) == pytest.approx(float(exact.value), rel=1e-5)  # float32
    assert problem.steps == prices.STEPS


def test_what_is_offloaded_is_measured_and_left_nowhere(tmp_path) -> None:
    found = {arm: offload.held(arm, 4, str(tmp_path)) for arm in offload.ARMS[:2]}
    assert found["Reverse"]["file"] == 0
    assert found["Reverse, to a file"]["file"] > 2**20  # θ alone takes 0.4 MB a step
    assert all(one["bytes"] > 0 for one in found.values())
    assert not list(tmp_path.iterdir())


def test_rounds_go_on_where_they_stopped(tmp_path, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(mixed, "NETS", {"perceptron": prices.perceptron})
    known = dict(mixed.WAYS)
    noted = {name: lambda *at, name=name: [calls.append(name), known[name](*at)][1] for name in known}
    monkeypatch.setattr(mixed, "WAYS", noted)
    out = tmp_path / "rows.json"
    mixed.fill(out, rounds=1)
    first = json.loads(out.read_text())["nets"]["perceptron"]
    calls.clear()
    mixed.fill(out, rounds=2)
    again = json.loads(out.read_text())["nets"]["perceptron"]
    assert again["rounds"][:1] == first["rounds"]
    assert len(again["rounds"]) == 2
    assert len(calls) == 2 * len(known)  # one that loads the kernels, one that is timed

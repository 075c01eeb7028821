"""Every method on quadratic clients, whose optimum and whose bias are known in closed form.

Client k minimises ½ Σ a_k (x − b_k)², ten clients, five dimensions, 20 gradient steps a round at rate 0.05, 600 rounds.
From g such a round ends at g + w_k (b_k − g) for FedAvg, w_k = 1 − (1 − η a_k)²⁰, so FedAvg converges to
Σ w_k b_k / Σ w_k, and not to the optimum Σ a_k b_k / Σ a_k.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparing.federated.fedsign import FedSign
from sparing.federated.methods.controls import Hinge, OwnSign
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.interface import Method, Sent, Update
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.server.optimizers import FedAvgM
from sparing.federated.server.robust import TrimmedMean
from sparing.federated.settings import Schedule, sample_clients
from sparing.seeds import stream

K, D, STEPS, LR, ROUNDS = 10, 5, 20, 0.05, 600
MU = 0.5
FAR = 1e6  # a temperature far above every weight: the force of FedSign is then c/4τ to 1e-11
PUSH = 0.4
EXACT = 1e-8


def clients(positive: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """a ~ U(0.2, 2) and b ~ 3 N(0, 1), or b > 1; shapes (K, D)."""
    generator = stream(7, "quadratic clients")
    a = 0.2 + 1.8 * torch.rand(K, D, generator=generator, dtype=torch.float64)
    b = 3 * torch.randn(K, D, generator=generator, dtype=torch.float64)
    return a, b.abs() + 1 if positive else b


def run(
    method: Method, share: float, a: torch.Tensor, b: torch.Tensor, *, momentum: float = 0.0, rounds: int = ROUNDS
) -> list[torch.Tensor]:
    """The global model after every round; the clients of a round train stacked."""
    schedule = Schedule(rounds=rounds, participation=share, lr=LR, momentum=momentum)
    method.check(schedule)
    count = len(a)
    params = {"x": torch.zeros(D, dtype=torch.float64)}
    states, server, extras, path = {}, method.server_state(params), {}, []
    first = method.client_state(params)
    for number in range(rounds):
        chosen = sample_clients(schedule, count, number, seed=0)
        kept = [states.get(k, first) for k in chosen]
        stacked = {key: {"x": torch.stack([state[key]["x"] for state in kept])} for key in first}
        sent = Sent(params, extras)
        term = method.begin(sent, stacked)
        rows = list(chosen)
        x, curvature, optimum = params["x"].repeat(len(rows), 1), a[rows], b[rows]
        speed = torch.zeros_like(x)
        for _ in range(STEPS):
            grad = curvature * (x - optimum)
            term.add_({"x": x}, {"x": grad}, LR)
            speed = momentum * speed + grad
            x = x - LR * speed
        updates = []
        for row, k in enumerate(chosen):
            states[k], out = method.finish(sent, {"x": x[row]}, kept[row], STEPS, LR)
            updates.append(Update(k, {"x": x[row]}, extras=out))
        params, server, extras = method.aggregate(params, updates, server, count)
        path.append(params["x"])
    return path


def share_of_way(a: torch.Tensor, mu: float = 0.0) -> torch.Tensor:
    """w_k: how much of the way from g to b_k a client goes in a round, with a spring of stiffness mu at g."""
    return (1 - (1 - LR * (a + mu)) ** STEPS) * a / (a + mu)


CORRECTING = [SCAFFOLD(), FedDyn(alpha=0.5)]
BIASED = [FedAvg(), FedPAN(), MOON(), FedProx(mu=MU)]


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("method", CORRECTING, ids=lambda method: method.name)
def test_drift_correcting_methods_reach_the_optimum(method: Method, share: float):
    a, b = clients()
    found = run(method, share, a, b)[-1]
    assert (found - (a * b).sum(0) / a.sum(0)).norm() < EXACT


def test_scaffold_reaches_the_optimum_with_momentum_that_it_knows():
    a, b = clients()
    found = run(SCAFFOLD(momentum=0.5), 1.0, a, b, momentum=0.5)[-1]
    assert (found - (a * b).sum(0) / a.sum(0)).norm() < EXACT


@pytest.mark.parametrize("method", [*BIASED, FedAvg(server=FedAvgM(lr=0.5, momentum=0.5))], ids=lambda m: m.name)
def test_the_others_converge_to_their_known_bias(method: Method):
    a, b = clients()
    found = run(method, 1.0, a, b, rounds=200)[-1]  # the slowest element keeps 0.82 of its way in a round
    w = share_of_way(a, MU if isinstance(method, FedProx) else 0.0)
    assert (found - (w * b).sum(0) / w.sum(0)).norm() < EXACT
    assert (found - (a * b).sum(0) / a.sum(0)).norm() > 0.05  # the bias is no rounding


@pytest.mark.parametrize("method", BIASED, ids=lambda method: method.name)
def test_partial_participation_follows_the_recursion(method: Method):
    """g ← mean over the drawn of g + w_k (b_k − g), in numpy."""
    a, b = clients()
    w = share_of_way(a, MU if isinstance(method, FedProx) else 0.0).numpy()
    schedule, g, found = Schedule(rounds=50, participation=0.3), np.zeros(D), run(method, 0.3, a, b, rounds=50)
    for number in range(50):
        rows = list(sample_clients(schedule, K, number, seed=0))
        assert len(rows) == 3
        g = np.mean([g + w[k] * (b.numpy()[k] - g) for k in rows], axis=0)
        np.testing.assert_allclose(found[number].numpy(), g, atol=1e-12)


@pytest.mark.parametrize("kind", [FedSign, OwnSign])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_push_moves_every_optimum_outwards(kind: type[FedSign], share: float):
    """Where all optima are positive, a force f moves that of a client to b_k + f/a_k, once g is positive; in the first
    round g is 0, which gives FedSign no force, and own-sign none in the first step."""
    a, b = clients(positive=True)
    found = run(kind(gamma=4 * PUSH * FAR, reduction="sum", temperature=FAR), share, a, b, rounds=200)
    w, moved = share_of_way(a), b + PUSH / a
    if share == 1:
        assert (found[-1] - (w * moved).sum(0) / w.sum(0)).norm() < EXACT
    schedule, g = Schedule(participation=share), found[0]
    assert (g > 0).all()
    for number in range(1, 20):
        rows = list(sample_clients(schedule, K, number, seed=0))
        g = (g + w[rows] * (moved[rows] - g)).mean(0)
        torch.testing.assert_close(found[number], g, rtol=1e-9, atol=1e-9)


def test_the_first_round_has_no_force_at_zero():
    a, b = clients(positive=True)
    pushed = run(FedSign(gamma=4 * PUSH * FAR, reduction="sum", temperature=FAR), 1.0, a, b, rounds=1)
    assert torch.equal(pushed[0], run(FedAvg(), 1.0, a, b, rounds=1)[0])


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_hinge_does_nothing_where_nothing_flips(share: float):
    a, b = clients(positive=True)
    found = run(Hinge(gamma=10.0, reduction="sum"), share, a, b, rounds=50)
    assert torch.equal(found[-1], run(FedAvg(), share, a, b, rounds=50)[-1])


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_hinge_against_a_slow_twin(share: float):
    """Element by element in plain Python: the force s c on a weight whose sign is not that of g."""
    a, b = clients()
    c, schedule, g = 0.7, Schedule(participation=share), [0.0] * D
    found = run(Hinge(gamma=c, reduction="sum"), share, a, b, rounds=10)
    flips = 0
    for number in range(10):
        ends = []
        for k in sample_clients(schedule, K, number, seed=0):
            x = list(g)
            for _ in range(STEPS):
                for j in range(D):
                    sign = (g[j] > 0) - (g[j] < 0)
                    flipped = sign * x[j] < 0
                    flips += flipped
                    x[j] -= LR * (float(a[k, j]) * (x[j] - float(b[k, j])) - (c * sign if flipped else 0.0))
            ends.append(x)
        g = [sum(column) / len(ends) for column in zip(*ends, strict=True)]
        np.testing.assert_allclose(found[number].numpy(), g, atol=1e-12)
    assert flips > 100  # the case is there


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(), FedSign(gamma=0.0), FedProx(mu=0.0)], ids=lambda m: m.name)
def test_one_client_is_plain_gradient_descent(method: Method):
    """With one client c and c_k are the same, so SCAFFOLD too; rounds are cuts in one run of 20 · 10 steps."""
    a, b = clients()
    x = torch.zeros(D, dtype=torch.float64)
    for _ in range(10 * STEPS):
        x = x - LR * a[0] * (x - b[0])
    found = run(method, 1.0, a[:1], b[:1], rounds=10)[-1]
    # The same sums in the same order; only SCAFFOLD adds c − c_k, which rounding leaves at about 1e-16.
    torch.testing.assert_close(found, x, rtol=0, atol=1e-13 if isinstance(method, SCAFFOLD) else 0)


ALL = [*BIASED, *CORRECTING, FedSign(gamma=0.1), OwnSign(gamma=0.1), Hinge(gamma=0.1), FedAvg(combine=TrimmedMean(0.2))]


@pytest.mark.parametrize("method", [*ALL, FedNova(momentum=0.9)], ids=lambda method: method.name)
def test_order_of_updates_changes_no_bit(method: Method):
    generator = stream(3, "order")
    params = {"x": torch.randn(D, generator=generator)}
    sent, updates = Sent(params), []
    for k in range(7):
        x = {"x": params["x"] + torch.randn(D, generator=generator)}
        _, extras = method.finish(sent, x, method.client_state(params), STEPS, LR)
        buffers = {"m": torch.randn(2, generator=generator)}
        updates.append(Update(k, x, weight=k + 1.0, extras=extras, buffers=buffers, steps=3 * k + 1))
    orders = [updates, updates[::-1], [updates[i] for i in (3, 1, 6, 0, 2, 5, 4)]]
    answers = [method.aggregate(params, order, method.server_state(params), K) for order in orders]
    held = [method.buffers({"m": torch.zeros(2)}, order)["m"] for order in orders]
    for (moved, state, extras), buffers in zip(answers, held, strict=True):
        assert torch.equal(moved["x"], answers[0][0]["x"])
        assert torch.equal(buffers, held[0])
        for key, vector in [*state.items(), *extras.items()]:
            assert torch.equal(vector["x"], {**answers[0][1], **answers[0][2]}[key]["x"])


@pytest.mark.parametrize("method", [m for m in ALL if m.stackable], ids=lambda method: method.name)
@pytest.mark.parametrize("reduction", ["tensor_mean", "mean", "sum"])
def test_stacked_clients_feel_what_each_would(method: Method, reduction: str):
    if hasattr(method, "reduction"):
        method = type(method)(gamma=0.1, reduction=reduction)
    generator = stream(4, "stacked")
    shapes = {"w": (3, 4), "b": (3,), "scalar": ()}

    def vector(*lead: int) -> dict[str, torch.Tensor]:
        return {name: torch.randn((*lead, *shape), generator=generator) for name, shape in shapes.items()}

    sent = Sent(vector(), {"control": vector()})
    states = [{key: vector() for key in method.client_state(sent.params)} for _ in range(5)]
    stacked = {key: {n: torch.stack([state[key][n] for state in states]) for n in shapes} for key in states[0]}
    params, grads = vector(5), vector(5)
    together = {name: grad.clone() for name, grad in grads.items()}
    method.begin(sent, stacked).add_(params, together, LR)
    for k in range(5):
        alone = {name: grad[k].clone() for name, grad in grads.items()}
        method.begin(sent, states[k]).add_({name: value[k] for name, value in params.items()}, alone, LR)
        for name in shapes:
            # Vectorised and single-element sigmoids may differ in the last bit.
            torch.testing.assert_close(together[name][k], alone[name], rtol=1e-6, atol=1e-7)

"""Private updates by hand, noise against its variance, one process against Flower, ε against other accountants."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import norm as gauss

from federated.worlds import equal, make_clients, normed, perceptron
from refusals import refused
from sparing.federated import SCAFFOLD, FedAvg, FedDyn, FedSign, Private, Schedule, simulate
from sparing.federated.accounting import epsilon
from sparing.federated.methods.interface import Update
from sparing.federated.server.faults import Guard, Sabotage
from sparing.federated.server.optimizers import FedAdam
from sparing.federated.server.robust import Median

CLIENTS = make_clients()
SCHEDULE = Schedule(rounds=4, participation=0.5, local_epochs=1, batch_size=4, lr=0.5)
ZERO = {"x": torch.zeros(2, dtype=torch.float64)}


def private(method=None, **settings):
    given = {"noise": 0.7, "clip": 0.3, "per_round": 2} | settings
    return Private(FedAvg() if method is None else method, **given)


def step(method, *values, state=None):
    sent = [Update(k, {"x": torch.tensor(value, dtype=torch.float64)}) for k, value in enumerate(values)]
    return method.aggregate(ZERO, sent, state or method.server_state(ZERO), 10)[:2]


def test_clipped_sum_over_a_fixed_number_by_hand():
    """(3, 4) becomes (0.6, 0.8), (0.3, 0) stays; the divisor is 4, whoever answered."""
    method = private(noise=0.0, clip=1.0, per_round=4)
    found, state = step(method, [3.0, 4.0], [0.3, 0.0])
    assert found["x"].tolist() == pytest.approx([0.9 / 4, 0.8 / 4])
    assert step(method, state=state)[0]["x"].tolist() == [0.0, 0.0]  # nobody answered


def test_adaptive_norm_by_hand():
    """One of two updates is short, where four were expected: b = 1/2 + (1 − 2/2)/4, C ← 2 exp(−0.2 (0.5 − 0.9))."""
    method = private(noise=0.0, clip=2.0, per_round=4, quantile=0.9)
    state = step(method, [3.0, 4.0], [0.3, 0.0])[1]
    assert float(state["private"]["clip"]) == pytest.approx(2 * math.exp(-0.2 * (0.5 - 0.9)))


def test_adaptive_norm_finds_the_quantile():
    """Of updates of lengths 1/40 to 1, the twelfth shortest, in spite of the noise of its count (2 of 40)."""
    method = private(noise=0.4, clip=9.0, per_round=40, quantile=0.3, seed=3)
    state, seen = None, []
    for _ in range(100):
        _, state = step(method, *[[at / 40, 0.0] for at in range(1, 41)], state=state)
        seen.append(float(state["private"]["clip"]))
    assert np.mean(seen[50:]) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("settings", [{}, {"per_round": 50, "quantile": 0.5}, {"at_clients": True}])
def test_the_noise_has_its_variance(settings):
    """Of 200,000 elements: the variance of one is known to √(2/n) = 0.3 %, 1.3 % are four deviations."""
    size = 200_000
    base = {"x": torch.zeros(size, dtype=torch.float64)}
    method = private(noise=0.8, clip=0.5, **settings)
    n = method.per_round
    sent = [method.send(base, base, 0, client) for client in range(n)]
    found = method.aggregate(base, [Update(k, x) for k, x in enumerate(sent)], method.server_state(base), 9)[0]["x"]
    z = 0.8 if "quantile" not in settings else (0.8**-2 - (n / 10) ** -2) ** -0.5
    assert float(found.var()) == pytest.approx((z * 0.5 / n) ** 2, rel=0.013)
    assert abs(float(found.mean())) < 5 * z * 0.5 / n / size**0.5


def test_noise_differs_between_rounds_and_seeds():
    method = private(per_round=3)
    first, state = step(method, [0.0, 0.0])
    assert not torch.equal(first["x"], step(method, [0.0, 0.0], state=state)[0]["x"])
    assert not torch.equal(first["x"], step(replace(method, seed=1), [0.0, 0.0])[0]["x"])
    assert torch.equal(first["x"], step(method, [0.0, 0.0])[0]["x"])


SEED = 1
METHODS = [
    private(FedSign(gamma=0.1), quantile=0.5, noise=0.1),
    private(FedDyn(alpha=0.1), at_clients=True),
    private(FedAvg(server=FedAdam(lr=0.1))),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_engines_and_flower_have_the_same_bits(method, tmp_path):
    """Poisson sampling of four clients: of these six rounds some have nobody; noise of clients takes equal draws."""
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    sampling = "fixed" if method.at_clients else "poisson"
    schedule, method = replace(SCHEDULE, rounds=6, sampling=sampling), replace(method, seed=SEED)
    run = simulate(perceptron, CLIENTS, method, schedule, engine="loop")
    assert method.at_clients or {0} < {row["answered"] for row in run.record}
    other = flower.run_in_process(perceptron, CLIENTS, method, schedule)
    assert equal(run.params, other.params)
    stacked = simulate(perceptron, CLIENTS, method, schedule, engine="batched")
    assert max(float((run.params[name] - value).abs().max()) for name, value in stacked.params.items()) < 1e-12
    at = tmp_path / "run.safetensors"
    simulate(perceptron, CLIENTS, method, replace(schedule, rounds=3), engine="loop", checkpoint=at)
    again = simulate(perceptron, CLIENTS, method, schedule, engine="loop", checkpoint=at, resume=True)
    assert equal(run.params, again.params)


def test_what_clients_learned_of_their_own_batch_norm_is_clipped_too():
    """Without noise and with a tiny norm a release moves by that norm, whatever clients have kept of earlier rounds."""
    from federated import worlds

    method = Private(FedAvg(), noise=0.0, clip=1e-3, per_round=4, at_clients=True)
    schedule = replace(SCHEDULE, rounds=1, participation=1.0, weights="uniform", batch_norm="local", lr=0.5)
    before, params = None, None
    for rounds in range(1, 5):
        run = simulate(
            worlds.normed, worlds.make_clients()[:4], method, replace(schedule, rounds=rounds), engine="loop"
        )
        params = torch.cat([value.flatten() for value in run.params.values()])
        if before is not None:
            # the mean of four updates of at most the norm each; float64 rounding beyond
            assert float((params - before).norm()) <= 1e-3 * (1 + 1e-6)
        before = params


def test_a_failing_client_is_an_update_of_zero():
    """Its place in the divisor stays, and no outlier rule looks at others' data."""
    method = private(noise=0.0, clip=9.0, per_round=4)
    schedule = replace(SCHEDULE, rounds=1, participation=1.0)
    hit = Sabotage(kind="crash", share=0.5, seed=1)
    left = [client for client in range(4) if not hit.is_hostile(client)]
    assert 0 < len(left) < 4
    run = simulate(perceptron, CLIENTS, method, schedule, tamper=hit)
    fair = simulate(perceptron, CLIENTS, FedAvg(), schedule, tamper=hit)
    start = simulate(perceptron, CLIENTS, private(noise=0.0, clip=1e-12, per_round=4), schedule)
    for name, value in run.params.items():
        whole = start.params[name] + (fair.params[name] - start.params[name]) * len(left) / 4
        assert torch.allclose(value, whole, rtol=1e-9)


def test_what_would_have_a_wrong_epsilon_is_refused():
    # n clients add n parts of the noise, so its size would tell their number, which Poisson sampling hides
    refused("Private.method: got FedDyn", private, FedDyn(alpha=0.1, weights="size"))
    counted = private(at_clients=True)
    refused('Private.at_clients: got with sampling="poisson"', counted.check, replace(SCHEDULE, sampling="poisson"))
    refused("combine=Mean()", private, FedAvg(combine=Median()))
    refused("quantile=None", private, quantile=0.5, at_clients=True)
    refused("draw more clients", private, quantile=0.5, noise=0.2)
    refused("pass per_round=2", simulate, perceptron, CLIENTS, private(per_round=3), SCHEDULE)
    refused("beside the model", simulate, perceptron, CLIENTS, private(SCAFFOLD()), replace(SCHEDULE, momentum=0.0))
    refused("have no noise", simulate, normed, CLIENTS, private(), SCHEDULE)
    refused("pass guard=None", simulate, perceptron, CLIENTS, private(), SCHEDULE, guard=Guard())
    refused('weights="uniform"', simulate, perceptron, CLIENTS, private(), replace(SCHEDULE, weights="size"))
    refused("blocks=None", simulate, perceptron, CLIENTS, private(), replace(SCHEDULE, blocks=0))


def gaussian_delta(eps, mu):
    """δ of a Gaussian mechanism whose sensitivity is μ standard deviations (Balle & Wang 2018, Theorem 8)."""
    return gauss.cdf(mu / 2 - eps / mu) - math.exp(eps) * gauss.cdf(-mu / 2 - eps / mu)


def solve(delta_of, delta):
    """Return ε at which a falling δ(ε) is delta."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def poisson_epsilon(z, share, rounds, delta):
    """By Fourier transform of the privacy loss on a grid of our own, both directions."""
    step, half = 5e-4, 1 << 17
    x = np.arange(-40 * z, 40 * z + 1, 1e-3)
    absent, mixed = gauss.pdf(x, 0, z), (1 - share) * gauss.pdf(x, 0, z) + share * gauss.pdf(x, 1, z)
    # The ratio in closed form: where densities underflow, their quotient would be noise.
    ratio = np.log1p(share * np.expm1((2 * x - 1) / (2 * z * z)))
    worst = 0.0
    for weight, loss in ((mixed, ratio), (absent, -ratio)):
        mass = np.zeros(2 * half)
        np.add.at(mass, np.clip(np.round(loss / step).astype(int), -half, half - 1) + half, weight * 1e-3)
        spectrum = np.fft.rfft(np.fft.ifftshift(mass)) ** rounds
        total, at = np.fft.fftshift(np.fft.irfft(spectrum, 2 * half)), np.arange(-half, half) * step

        def delta_of(eps, total=total, at=at):
            above = at > eps
            return float((total[above] * -np.expm1(eps - at[above])).sum())

        worst = max(worst, solve(delta_of, delta))
    return worst


def replacing_epsilon(z, share, rounds, delta):
    """Theorem 27 of arXiv:1808.00087 with its differences in 100 digits, whole orders to 64."""
    mpmath.mp.dps = 100
    moment = [mpmath.exp(mpmath.mpf(x) * (x - 1) / (2 * z * z)) for x in range(66)]  # E of the ratio's power

    def difference(order):
        return abs(sum((-1) ** (order - i) * mpmath.binomial(order, i) * moment[i] for i in range(order + 1)))

    best = math.inf
    found = {order: difference(order) for order in range(2, 66, 2)}
    for order in range(2, 65):
        total = mpmath.mpf(1)
        for j in range(2, order + 1):
            term = mpmath.mpf(2) * moment[j]
            if j == 2:
                term = min(4 * (moment[2] - 1), 2 * moment[2])
            else:
                term = min(4 * mpmath.sqrt(found[2 * (j // 2)] * found[2 * ((j + 1) // 2)]), term)
            total += mpmath.mpf(share) ** j * mpmath.binomial(order, j) * term
        rdp = float(mpmath.log(total)) / (order - 1) * rounds
        best = min(best, rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return best


def test_epsilon_is_that_of_other_accountants():
    pytest.importorskip("dp_accounting", reason="dp-accounting, of sparing[privacy]")
    # Everybody in every round: T Gaussians are one of sensitivity √T/z; in place of another twice that.
    for sampling, factor in (("poisson", 1), ("fixed", 2)):
        exact = solve(lambda eps, mu=factor * 10 / 8.0: gaussian_delta(eps, mu), 1e-5)
        found = epsilon([8.0] * 100, clients=50, drawn=50, sampling=sampling, delta=1e-5)
        assert found == pytest.approx(exact, rel=0.01)
    poisson = epsilon([1.1] * 200, clients=1000, drawn=20, sampling="poisson", delta=1e-4)
    assert poisson == pytest.approx(poisson_epsilon(1.1, 0.02, 200, 1e-4), rel=0.01)
    fixed = epsilon([4.0] * 200, clients=1000, drawn=20, sampling="fixed", delta=1e-4)
    assert fixed == pytest.approx(replacing_epsilon(2.0, 0.02, 200, 1e-4), rel=0.01)
    assert epsilon([0.0, 1.0], clients=9, drawn=2, sampling="poisson", delta=1e-3) == math.inf


def test_epsilon_of_a_run_before_and_after():
    pytest.importorskip("dp_accounting", reason="dp-accounting, of sparing[privacy]")
    method, schedule = private(noise=2.0, per_round=10), Schedule(rounds=20, participation=0.1)
    before = method.epsilon(schedule, 100)
    assert method.epsilon(schedule, 100, answered=[10] * 5 + [3] * 15) == before  # the server's noise is whole
    shared = replace(method, at_clients=True)
    assert shared.epsilon(schedule, 100) == before
    assert shared.epsilon(schedule, 100, answered=[9] * 20) > before

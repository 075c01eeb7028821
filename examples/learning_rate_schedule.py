"""Learn ten learning rates of a run of 500 steps: ten tangents make the hypergradient exact, in memory free of T.

Reverse mode would hold 500 graphs. One value of the schedule serves 50 steps.
"""

import torch

from sparing import hypergrad as hg

STEPS, KNOTS = 500, 10
generator = torch.Generator().manual_seed(0)
x = torch.randn(64, 8, generator=generator)
y = torch.tanh(x @ torch.randn(8, 1, generator=generator))
noisy = y + 0.5 * torch.randn(64, 1, generator=generator)  # what the run is trained on


def loss(theta, inputs, targets):
    return (torch.tanh(inputs @ theta["in"]) @ theta["out"] - targets).square().mean()


problem = hg.Bilevel(
    inner=lambda theta, phi, batch: loss(theta, x[batch], noisy[batch]),
    outer=lambda theta, phi: loss(theta, x, y),
    init={"in": torch.randn(8, 4, generator=generator) / 3, "out": torch.randn(4, 1, generator=generator) / 2},
    optimizer=hg.SGD(lr=lambda step, phi: phi[step * KNOTS // STEPS].exp(), momentum=0.9),
    steps=STEPS,
    batches=lambda step, generator: torch.randint(64, (16,), generator=generator),
)
for name, method in (("Forward", hg.Forward()), ("Reverse", hg.Reverse())):
    print(f"{name}: {hg.predict(problem, torch.zeros(KNOTS), method).bytes / 2**20:.2f} MiB predicted")

phi = torch.full((KNOTS,), -3.0)
adam = torch.optim.Adam([phi], lr=0.2)
for step in range(2):
    result = hg.hypergradient(problem, phi, hg.Forward(), seed=0)
    print(f"outer step {step}: loss {float(result.value):.4f} on clean targets, in {result.report.seconds:.1f} s")
    phi.grad = result.grad
    adam.step()
print("learnt rates, early to late:", [f"{float(rate):.4f}" for rate in phi.exp()])

"""MAML in a few lines: φ is the initialisation itself, each outer step another task; any method will do."""

import torch

from sparing import hypergrad as hg

x = torch.linspace(-2, 2, 20)[:, None]


def net(theta, inputs):
    return torch.tanh(torch.tanh(inputs @ theta["a"] + theta["b"]) @ theta["c"]) @ theta["d"]


def problem(task):
    shift = torch.rand(1, generator=torch.Generator().manual_seed(task)) * 3
    target = torch.sin(x + shift)
    return hg.Bilevel(
        inner=lambda theta, phi, batch: (net(theta, x[::2]) - target[::2]).square().mean(),
        outer=lambda theta, phi: (net(theta, x[1::2]) - target[1::2]).square().mean(),
        init=lambda phi: phi,
        optimizer=hg.SGD(lr=0.1),
        steps=5,
    )


generator = torch.Generator().manual_seed(0)
shapes = {"a": (1, 16), "b": (16,), "c": (16, 16), "d": (16, 1)}
phi = {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}
adam = torch.optim.Adam(phi.values(), lr=0.01)
cheap_first = hg.phases((hg.Truncated(steps=1), 30), (hg.Checkpointed(), None))
for step in range(60):
    result = hg.hypergradient(problem(step), phi, cheap_first(step), seed=step)
    for name, slope in result.grad.items():
        phi[name].grad = slope
    adam.step()
    if step % 15 == 0:
        print(f"task {step:2d}  {result.report.method:16} loss after five steps {float(result.value):.3f}")

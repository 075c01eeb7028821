"""Find wrong labels: a weight per example, learnt through 50 steps of training, by (FG)²U, exact replay, truncation.

Real digits (8×8, from scikit-learn where it is installed, else typeset noise), half of the labels wrong.
"""

import torch
from torch.nn import functional as F

from sparing import hypergrad as hg


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:  # ten prototypes and noise: the same task without the package
        generator = torch.Generator().manual_seed(0)
        kinds = torch.arange(1200) % 10
        return torch.randn(10, 64, generator=generator)[kinds] + torch.randn(1200, 64, generator=generator), kinds
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)


images, labels = digits()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
images, labels = images[order], labels[order]
train, clean = slice(0, 500), slice(500, 800)
wrong = torch.rand(500, generator=torch.Generator().manual_seed(2)) < 0.5
given = torch.where(wrong, (labels[train] + 1 + torch.arange(500) % 9) % 10, labels[train])


def inner(theta, phi, batch):
    losses = F.cross_entropy(images[train] @ theta["w"] + theta["b"], given, reduction="none")
    return (torch.sigmoid(phi) * losses).mean()


def outer(theta, phi):
    return F.cross_entropy(images[clean] @ theta["w"] + theta["b"], labels[clean])


problem = hg.Bilevel(
    inner=inner,
    outer=outer,
    init={"w": torch.zeros(64, 10), "b": torch.zeros(10)},
    optimizer=hg.SGD(lr=0.5, momentum=0.9),
    steps=50,
)
print(hg.choose(problem, torch.zeros(500), memory="100MB").why)

for method in (hg.Checkpointed(), hg.ForwardGradient(directions=32), hg.Truncated(steps=5)):
    phi = torch.zeros(500)
    adam = torch.optim.Adam([phi], lr=0.3)
    for step in range(10):
        result = hg.hypergradient(problem, phi, method, seed=step)
        phi.grad = result.grad
        adam.step()
    found = phi < phi.median()  # half of the labels are wrong: take the half with the least weight
    share = float((found & wrong).sum()) / float(wrong.sum())
    cosine = f"; expected cosine {result.report.cosine:.2f}" if result.report.cosine else ""
    print(f"{method!s:18} clean loss {float(result.value):.3f}, wrong labels found {share:.0%}{cosine}")

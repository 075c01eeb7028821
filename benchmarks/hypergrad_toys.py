"""The three two-level problems that the hypergradient benchmarks share, each on real data and small enough for a CPU.

Condensation is hard (a truncated or implicit hypergradient points elsewhere), reweighting under weight decay is
contractive (a short truncation nearly suffices), and token weights have a bottleneck: many parameters, few weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing import hypergrad as hg
from sparing.data import bundled_text, load_images
from sparing.seeds import stream

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A problem and where φ starts."""

    name: str
    """Label of the rows."""
    problem: hg.Bilevel
    """What is differentiated."""
    phi: Weights
    """φ₀."""

    @property
    def size(self) -> int:
        """Numbers in φ, N."""
        return sum(leaf.numel() for leaf in self.phi.values())


@dataclass(frozen=True, kw_only=True)
class Reweighting:
    """Weights per example on MNIST, half of whose labels are wrong: also the problem of the cost benchmark."""

    images: Tensor
    """Training images, shape (examples, pixels)."""
    labels: Tensor
    """Their labels, half of them replaced at random, shape (examples,)."""
    held_images: Tensor
    """Clean images, shape (held, pixels)."""
    held_labels: Tensor
    """Their labels, shape (held,)."""
    theta: Weights
    """θ₀, of a net ``images -> hidden -> 10`` by the names of ``nn.Sequential``."""
    steps: int
    """Unroll depth (count), T."""
    lr: float = 0.05
    """Inner learning rate η."""
    momentum: float = 0.9
    """Inner momentum μ."""
    decay: float = 0.0
    """Inner weight decay λ."""

    def net(self) -> nn.Sequential:
        """The net as a module, at θ₀; for peers that want one."""
        hidden, pixels = self.theta["0.weight"].shape
        net = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        net.load_state_dict(self.theta)
        return net

    def inner_loss(self, logits: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of the cross-entropies."""
        return (weights * F.cross_entropy(logits, self.labels, reduction="none")).mean()

    def outer_loss(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy on the clean images."""
        return F.cross_entropy(logits, self.held_labels)

    def weights(self) -> Tensor:
        """φ₀: ones, shape (examples,)."""
        return torch.ones(len(self.labels), dtype=self.images.dtype)

    def toy(self) -> Toy:
        """The same for the library."""
        problem = hg.Bilevel(
            inner=lambda theta, phi, batch: self.inner_loss(perceptron(theta, self.images), phi["weights"]),
            outer=lambda theta, phi: self.outer_loss(perceptron(theta, self.held_images)),
            init=self.theta,
            optimizer=hg.SGD(lr=self.lr, momentum=self.momentum, weight_decay=self.decay),
            steps=self.steps,
        )
        return Toy(name="example weights", problem=problem, phi={"weights": self.weights()})


def perceptron(theta: Weights, x: Tensor) -> Tensor:
    """Logits of the two-layer net."""
    hidden = F.relu(F.linear(x, theta["0.weight"], theta["0.bias"]))
    return F.linear(hidden, theta["2.weight"], theta["2.bias"])


def digits(count: int, seed: int, label: str, *, side: int = 28, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Some MNIST training images as rows in [0, 1], and their labels."""
    images, labels = load_images("mnist")
    kept = (labels < classes).nonzero()[:, 0]
    chosen = kept[torch.randperm(len(kept), generator=stream(seed, label))[:count]]
    pixels = images[chosen].float().div(255)[:, None]
    if side != 28:
        pixels = F.adaptive_avg_pool2d(pixels, side)
    return pixels.flatten(1), labels[chosen]


def linear(out: int, into: int, generator: torch.Generator) -> Tensor:
    """Weights as torch draws them: uniform within 1/√into."""
    return (torch.rand(out, into, generator=generator) * 2 - 1) / math.sqrt(into)


def two_layers(pixels: int, hidden: int, out: int, seed: int) -> Weights:
    """θ₀ of the two-layer net."""
    generator = stream(seed, "theta")
    return {
        "0.weight": linear(hidden, pixels, generator), "0.bias": torch.zeros(hidden),
        "2.weight": linear(out, hidden, generator), "2.bias": torch.zeros(out),
    }  # fmt: skip


def reweighting(
    *, steps: int, seed: int = 0, examples: int = 1024, hidden: int = 128, side: int = 28, decay: float = 0.0
) -> Reweighting:
    """Example weights on MNIST with half of the labels wrong."""
    images, labels = digits(2 * examples, seed, "reweighting", side=side)
    noisy = labels[:examples].clone()
    generator = stream(seed, "noise")
    wrong = torch.rand(examples, generator=generator) < 0.5
    noisy[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    return Reweighting(
        images=images[:examples], labels=noisy, held_images=images[examples:], held_labels=labels[examples:],
        theta=two_layers(side * side, hidden, 10, seed), steps=steps, decay=decay,
    )  # fmt: skip


def condensation(seed: int) -> Toy:
    """One 8 × 8 image for each of five digits, N = 320; a fresh net learns from them for 30 steps."""
    side, classes, held = 8, 5, 500
    images, labels = digits(held, seed, "condensation", side=side, classes=classes)
    own = torch.arange(classes)
    theta = two_layers(side * side, 64, classes, seed)
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: F.cross_entropy(perceptron(theta, phi["images"]), own),
        outer=lambda theta, phi: F.cross_entropy(perceptron(theta, images), labels),
        init=theta,
        optimizer=hg.SGD(lr=0.1, momentum=0.9),
        steps=30,
    )
    start = torch.rand(classes, side * side, generator=stream(seed, "images"))
    return Toy(name="condensation", problem=problem, phi={"images": start})


def contractive(seed: int) -> Toy:
    """Weights of 256 examples; weight decay makes every step forget, so the last steps matter most."""
    toy = reweighting(steps=40, seed=seed, examples=256, hidden=32, side=8, decay=0.1)
    return replace(replace(toy, momentum=0.5, lr=0.2).toy(), name="example weights")


LETTERS = " abcdefghijklmnopqrstuvwxyz.,;'-"


def letters(first: int, count: int) -> Tensor:
    """A stretch of Alice in Wonderland as 32 letters, shape (count,)."""
    kept = [LETTERS.index(c) for c in bundled_text("alice").lower() if c in LETTERS]
    return torch.tensor(kept[first : first + count])


def letter_model(theta: Weights, contexts: Tensor) -> Tensor:
    """Logits of the next letter from the four before it: embedding, hidden layer, output."""
    vectors = F.embedding(contexts, theta["embed"]).flatten(1)
    hidden = torch.tanh(F.linear(vectors, theta["hidden"], theta["bias"]))
    return F.linear(hidden, theta["out"])


def windows(first: int, count: int) -> tuple[Tensor, Tensor]:
    """``count`` contexts of four letters and the letter after each."""
    text = letters(first, count + 4)
    return text.unfold(0, 4, 1)[:count], text[4:]


def letter_theta(seed: int) -> Weights:
    """θ₀ of the letter model, trained for 200 steps on another part of the book."""
    generator = stream(seed, "letters")
    theta = {
        "embed": torch.randn(32, 8, generator=generator) / 2, "hidden": linear(32, 32, generator),
        "bias": torch.zeros(32), "out": linear(32, 32, generator),
    }  # fmt: skip
    contexts, targets = windows(20_000, 2000)
    for leaf in theta.values():
        leaf.requires_grad_()
    optimizer = torch.optim.Adam(theta.values(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(letter_model(theta, contexts), targets).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in theta.items()}


def token_weights(seed: int, *, documents: int = 24, tokens: int = 8, hidden: int = 1200) -> Toy:
    """A net of N = 40,801 parameters gives each of 192 tokens its weight; one document a step, as CaMeLS does.

    The weights reach the letter model only through those 192 numbers ψ. CaMeLS itself has N/n of eight thousand.
    """
    theta = letter_theta(seed)
    stretches = [windows(1000 * seed + 200 * number, tokens) for number in range(documents)]
    contexts = torch.cat([context for context, _ in stretches])
    features = F.embedding(contexts, theta["embed"]).flatten(1)  # (documents * tokens, 32), fixed
    held = windows(1000 * seed + 200 * documents, 200)
    generator = stream(seed, "weight net")
    phi = {
        "0.weight": linear(hidden, features.shape[1], generator), "0.bias": torch.zeros(hidden),
        "2.weight": linear(1, hidden, generator), "2.bias": torch.zeros(1),
    }  # fmt: skip

    def through(phi: Weights) -> Tensor:
        return F.softplus(perceptron(phi, features)).view(documents, tokens)

    def inner(theta: Weights, psi: Tensor, step: int) -> Tensor:
        losses = F.cross_entropy(letter_model(theta, stretches[step][0]), stretches[step][1], reduction="none")
        return (psi[step] * losses).mean()

    problem = hg.Bilevel(
        inner=inner, outer=lambda theta, phi: F.cross_entropy(letter_model(theta, held[0]), held[1]),
        init=theta, optimizer=hg.SGD(lr=0.1), steps=documents, batches=list(range(documents)), through=through,
    )  # fmt: skip
    return Toy(name="token weights", problem=problem, phi=phi)


TOYS: dict[str, Callable[[int], Toy]] = {
    "condensation": condensation, "example weights": contractive, "token weights": token_weights,
}  # fmt: skip

"""What is measured in every round: accuracy, the gap between mean and members, signs, norms, directions.

Signs follow ``sparing.vectors.sign_agreement``: an exact zero votes for nobody.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sparing.blocks import named_parameters
from sparing.blocks.modes import evaluating
from sparing.errors import require
from sparing.federated.methods.interface import State, Vector
from sparing.federated.placement import device_of
from sparing.vectors import norm, sign_agreement

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""A model on held-out data -> numbers by name."""

_CHUNK = 1 << 20  # elements at a time: sums of that many ±1 are exact in float32
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True, eq=False)
class Accuracy:
    """Accuracy and mean loss of a classifier in evaluation mode; batches move to the model's device.

    Example:
        >>> model = nn.Linear(1, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[-1.0], [1.0]]))
        >>> Accuracy(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0]))(model)["accuracy"]
        0.5
    """

    inputs: Tensor  # held-out, shape (n, ...)
    targets: Tensor  # classes, shape (n,)
    batch: int = 1024  # rows at a time

    def __post_init__(self) -> None:
        tensors = isinstance(self.inputs, Tensor) and isinstance(self.targets, Tensor)
        got = f"{type(self.inputs).__name__} and {type(self.targets).__name__}"
        require(tensors, "Accuracy", got, "rows are tensors", "pass torch.tensor(inputs), torch.tensor(targets)")

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``accuracy`` (share of rows) and ``loss`` (mean cross-entropy, nats) of logits in evaluation mode."""
        right, losses = self.rows(model)
        return {"accuracy": int(right.sum()) / len(right), "loss": float(losses.sum()) / len(right)}

    def rows(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return, on the CPU, whether each row is right, shape (n,), bool, and its cross-entropy (nats), float64."""
        right, losses, device = [], [], device_of(model)
        with torch.no_grad(), evaluating(model):
            for start in range(0, len(self.targets), self.batch):
                targets = self.targets[start : start + self.batch].to(device)
                logits = model(self.inputs[start : start + self.batch].to(device))
                right.append(logits.argmax(-1) == targets)
                losses.append(F.cross_entropy(logits.double(), targets, reduction="none"))
        return torch.cat(right).cpu(), torch.cat(losses).cpu()


def param_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each trainable parameter: norm (weight or bias), bias, conv, linear, embedding or other."""
    kinds: dict[str, str] = {}
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    for name, parameter in named_parameters(model).items():
        if not parameter.requires_grad:
            continue
        module = owners[id(parameter)]
        known = (("conv", _ConvNd), ("linear", nn.Linear), ("embedding", nn.Embedding))
        kind = next((word for word, kind in known if isinstance(module, kind)), "other")
        kinds[name] = "norm" if isinstance(module, _NORMS) else "bias" if name.endswith("bias") else kind
    return kinds


def pair_agreement(vectors: Sequence[Vector]) -> float:
    """Return the mean sign agreement (SSR) over all pairs of clients, in [0, 1]; NaN if no pair votes."""
    if len(vectors) < 2:
        return float("nan")
    size = len(vectors)
    agree, votes = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for name in _names(vectors):
        who = [at for at, vector in enumerate(vectors) if name in vector]
        signs = torch.stack([vectors[at][name].detach().flatten().sign() for at in who]).float()
        both = torch.meshgrid(torch.tensor(who), torch.tensor(who), indexing="ij")
        for start in range(0, signs.shape[1], _CHUNK):
            piece = signs[:, start : start + _CHUNK]
            voting = (piece.abs() @ piece.abs().T).double()
            votes[both] += voting.cpu()
            agree[both] += (((piece @ piece.T).double() + voting) / 2).cpu()
    above = torch.triu_indices(size, size, 1)
    rates = (agree / votes)[above[0], above[1]]
    return float(rates[~rates.isnan()].mean())


def flips(before: Vector, after: Vector, kinds: Mapping[str, str]) -> dict[str, float]:
    """Return, by kind of tensor, the share of elements that changed sign among those that are zero in neither."""
    turned, voted = Counter[str](), Counter[str]()
    for name, value in after.items():
        product = before[name].sign() * value.sign()
        turned[kinds[name]] += int((product < 0).sum())
        voted[kinds[name]] += int((product != 0).sum())
    return {kind: turned[kind] / count for kind, count in voted.items() if count}


def rms(vector: Vector, kinds: Mapping[str, str]) -> dict[str, float]:
    """Return the root mean square of the elements of each kind of tensor."""
    squares: dict[str, float] = defaultdict(float)
    counts = Counter[str]()
    for name, value in vector.items():
        squares[kinds[name]] += float(value.double().square().sum())
        counts[kinds[name]] += value.numel()
    return {kind: (squares[kind] / count) ** 0.5 for kind, count in counts.items() if count}


def update_cosine(before: Vector, vectors: Sequence[Vector]) -> float:
    """Return the mean cosine between the updates of all pairs of clients; NaN for one client or an update of zero."""
    if len(vectors) < 2:
        return float("nan")
    # The Gram matrix takes one pass over the tensors instead of one for each pair.
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for name in _names(vectors):
        base = before[name].double()
        rows = torch.stack([(v[name].double() - base if name in v else torch.zeros_like(base)) for v in vectors])
        gram += (rows.flatten(1) @ rows.flatten(1).T).cpu()
    lengths = gram.diagonal().sqrt()
    above = torch.triu_indices(len(vectors), len(vectors), 1)
    return float((gram / (lengths[:, None] * lengths[None, :]))[above[0], above[1]].mean())


def bytes_of(*parts: Vector | State) -> int:
    """Return the size of what travels (bytes): all tensors of vectors and of states."""
    total = 0
    for part in parts:
        for value in part.values():
            total += bytes_of(value) if isinstance(value, dict) else value.numel() * value.element_size()
    return total


def round_row(before: Vector, after: Vector, clients: Sequence[Vector], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Measure what one round did to the weights: the columns of ``Run.record`` about them."""
    # Nobody is in some rounds of Poisson sampling.
    if not clients:
        return {"norm": float(norm(after)), **{f"rms_{kind}": value for kind, value in rms(after, kinds).items()}}
    row: dict[str, Any] = {}
    sent = [{name: before[name] for name in client} for client in clients]
    row["ssr_global"] = _mean([float(sign_agreement(a, b)) for a, b in zip(sent, clients, strict=True)])
    row["ssr_pairs"] = pair_agreement(clients)
    turned = [flips(before, client, kinds) for client in clients]
    for kind in dict.fromkeys(kinds.values()):
        row[f"flips_{kind}"] = _mean([one[kind] for one in turned if kind in one])
    row["norm"] = float(norm(after))
    row |= {f"rms_{kind}": value for kind, value in rms(after, kinds).items()}
    row["update_cosine"] = update_cosine(before, clients)
    gaps = [{name: value - a[name] for name, value in client.items()} for a, client in zip(sent, clients, strict=True)]
    row["update_norm"] = _mean([float(norm(gap)) for gap in gaps])
    return row


def evaluation_columns(whole: Mapping[str, float], members: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine evaluations of the global model and of the clients' models: ``client_NAME`` is the mean over clients."""
    row = dict(whole)
    if members:
        row |= {f"client_{name}": _mean([one[name] for one in members]) for name in whole}
    if members and "accuracy" in whole:
        row["fusion_gap"] = whole["accuracy"] - row["client_accuracy"]
    return row


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _names(vectors: Sequence[Vector]) -> list[str]:
    return list(dict.fromkeys(name for vector in vectors for name in vector))

"""Names on the command line become values: a method with its strengths, its server and its way to combine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch

from sparing.errors import require
from sparing.federated import Client, FedSign
from sparing.federated.methods.controls import Hinge, NormMatched, OwnSign
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.interface import Method, Vector
from sparing.federated.methods.lora import FedExLoRA, FFALoRA, FLoRA
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.private import Private
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.methods.secure import SecureSum
from sparing.federated.server.closing import Delays
from sparing.federated.server.collusion import Collusion, flip_labels
from sparing.federated.server.defences import Bucketing, Bulyan, CenteredClipping, GeometricMedian
from sparing.federated.server.faults import Sabotage, SabotageKind
from sparing.federated.server.optimizers import FedAdam, FedAvgM, FedYogi, Replace, Server
from sparing.federated.server.robust import Clipped, Combine, Krum, Mean, Median, TrimmedMean
from sparing.federated.server.trust import FLTrust
from sparing.jobs.federate.settings import MethodName, Settings
from sparing.report.palette import ROLES, Role
from sparing.seeds import stream

NORM_MATCHED: Final = "norm-matched"

# What methods are called on terminal and page.
LABELS: Final[Mapping[str, str]] = {
    "fedavg": "FedAvg", "fedprox": "FedProx", "moon": "MOON", "feddyn": "FedDyn", "fedpan": "FedPAN",
    "scaffold": "SCAFFOLD", "fednova": "FedNova", "fedsign": "FedSign", "own-sign": "own sign", "hinge": "hinge",
    NORM_MATCHED: "FedSign at FedAvg's norms", "fedex-lora": "FedEx-LoRA", "flora": "FLoRA", "ffa-lora": "FFA-LoRA",
}  # fmt: skip

_ROLES: Final[Mapping[str, Role]] = {
    "fedsign": "ours", "fedavg": "baseline", "own-sign": "extension", "hinge": "good", NORM_MATCHED: "warning",
    "scaffold": "rival", "feddyn": "second_rival", "fedprox": "reference", "moon": "good", "fedpan": "warning",
    "fednova": "second_rival", "fedex-lora": "extension", "flora": "rival", "ffa-lora": "second_rival",
}  # fmt: skip


def method_of(
    name: MethodName, settings: Settings, norms: Sequence[Mapping[str, float]] = (), clients: int | None = None
) -> Method:
    """Build a method from the settings; ``norms`` are those of the reference run after each round, for norm-matched.

    ``clients`` counts those of the split, by default the settings'.
    """
    lr, kind = settings.server_lr, settings.server
    rate = (0.01 if kind in {"fedadam", "fedyogi"} else 1.0) if lr is None else lr
    servers: dict[str, Callable[..., Server]] = {"fedadam": FedAdam, "fedyogi": FedYogi, "fedavgm": FedAvgM}
    server = servers.get(kind, Replace)(lr=rate)
    both: dict[str, Any] = {"server": server, "combine": combine_of(settings)}
    push: dict[str, Any] = {"gamma": settings.fedsign.gamma, "reduction": settings.fedsign.reduction}
    makers: dict[str, Callable[[], Method]] = {
        "fedavg": lambda: FedAvg(**both),
        "fedprox": lambda: FedProx(mu=settings.fedprox.mu, **both),
        "moon": lambda: MOON(mu=settings.moon.mu, temperature=settings.moon.temperature, **both),
        "feddyn": lambda: FedDyn(alpha=settings.feddyn.alpha, **both),
        "fedpan": lambda: FedPAN(periods=settings.fedpan.periods, amplitude=settings.fedpan.amplitude, **both),
        "scaffold": lambda: SCAFFOLD(momentum=settings.momentum, **both),
        "fednova": lambda: FedNova(momentum=settings.momentum, **both),
        "fedex-lora": lambda: FedExLoRA(**both),
        "flora": lambda: FLoRA(seed=settings.seed, **both),
        "ffa-lora": lambda: FFALoRA(**both),
        "fedsign": lambda: FedSign(temperature=settings.fedsign.temperature, **push, **both),
        "own-sign": lambda: OwnSign(temperature=settings.fedsign.temperature, **push, **both),
        "hinge": lambda: Hinge(**push, **both),
        NORM_MATCHED: lambda: NormMatched(FedSign(temperature=settings.fedsign.temperature, **push, **both), norms),
    }
    return _protected(makers[name](), name, settings, clients or settings.clients)


def _protected(made: Method, name: MethodName, settings: Settings, clients: int) -> Method:
    """Put a method under secure aggregation or noise, where the settings ask for it."""
    if settings.aggregation == "secure":
        why = "norms of a run that sees single updates tell of them"
        require(name != NORM_MATCHED, "methods", name, why, "leave it out, or pass --aggregation plain")
        why = "noise would be rounded before it is summed, which no ε counts"
        require(settings.privacy == "none", "privacy", settings.privacy, why, "pass --privacy none")
        masked = settings.secure
        return SecureSum(
            made, bound=masked.bound, step=masked.step, bits=masked.bits, threshold=masked.threshold,
            dropout=masked.dropout, seed=settings.seed, signed=masked.signed,
        )  # fmt: skip
    if settings.privacy == "none":
        return made
    why = "norms of a run without noise tell what noise should hide"
    require(name != NORM_MATCHED, "methods", name, why, "leave it out, or pass --privacy none")
    own = settings.private
    return Private(
        made, noise=own.noise, clip=own.clip, quantile=own.quantile, at_clients=settings.privacy == "clients",
        per_round=settings.training().participants(clients), seed=settings.seed,
    )  # fmt: skip


def combine_of(settings: Settings) -> Combine:
    """How models become one."""
    rules: dict[str, Callable[[], Combine]] = {
        "none": Mean,
        "median": Median,
        "trimmed": lambda: TrimmedMean(settings.trimmed.share),
        "krum": lambda: Krum(settings.krum.hostile, settings.krum.keep),
        "bulyan": lambda: Bulyan(settings.krum.hostile),
        "geometric": GeometricMedian,
        "clip": lambda: Clipped(settings.robust_clip.norm),
        "centered": lambda: CenteredClipping(settings.robust_clip.norm),
        "fltrust": FLTrust,
    }
    rule = rules[settings.robust]()
    return rule if settings.bucket == 1 else Bucketing(rule, settings.bucket, seed=settings.seed)


def sabotage_of(settings: Settings) -> Sabotage | Collusion | None:
    """What attacked clients do to their updates, if any do."""
    attack = settings.attack
    if attack in {"none", "labels"}:
        return None
    if attack in {"alie", "inner", "sybil"}:
        return Collusion(kind=attack, share=settings.attacked, seed=settings.seed)
    kind = "not finite" if attack == "nan" else attack
    return Sabotage(kind=cast("SabotageKind", kind), share=settings.attacked, seed=settings.seed)


def delays_of(settings: Settings) -> Delays | None:
    """When each client answers in each round, if they do not all at once."""
    if settings.delays == "none":
        return None
    late, seed = settings.late, settings.seed

    def normal(*labels: str | int) -> float:
        return float(torch.randn((), generator=stream(seed, "federate", "delay", *labels), dtype=torch.float64))

    def delay(client: int, number: int) -> float:
        draw = torch.rand((), generator=stream(seed, "federate", "gone", client), dtype=torch.float64)
        if float(draw) < late.gone:
            return math.inf
        both = normal("client", client) + normal("round", client, number)
        return late.median * math.exp(late.spread * both / math.sqrt(2))

    return delay


def poisoned(clients: list[Client], settings: Settings, classes: int) -> list[Client]:
    """Return the clients, with the labels of attacked ones turned round where that is the attack."""
    if settings.attack != "labels":
        return clients
    return flip_labels(clients, Sabotage(kind="flip", share=settings.attacked, seed=settings.seed), classes)


def force_of(method: Method, params: Vector) -> float | None:
    """Mean force on an element near zero, in units of the gradient; None for methods that do not push signs."""
    # Norm matching takes the growth away again; the push is that of the method inside.
    inner = method.method if isinstance(method, NormMatched | Private | SecureSum) else method
    return inner.force(params) if isinstance(inner, FedSign | Hinge) else None


def roles_of(names: Sequence[str]) -> dict[str, Role]:
    """Give each method a role of its own, by label."""
    # A method keeps its color from run to run; only where two want one color does the second take a free one.
    free = [role for role in ROLES if role not in {_ROLES[name] for name in names}]
    given: dict[str, Role] = {}
    for name in names:
        wanted = _ROLES[name]
        taken = wanted in given.values()
        given[LABELS[name]] = (free.pop(0) if free else wanted) if taken else wanted
    return given

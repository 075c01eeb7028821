"""Settings of federated training, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from sparing.errors import UserError, require
from sparing.jobs.limits import (
    Count,
    CountOrZero,
    Group,
    LiveShare,
    Rate,
    Several,
    ShareBelowOne,
    Size,
    SizeOrZero,
    Workers,
)  # fmt: skip
from sparing.jobs.settings import Saving, Seeded

if TYPE_CHECKING:
    from sparing.federated import Schedule

MethodName = Literal[
    "fedavg", "fedprox", "moon", "feddyn", "fedpan", "scaffold", "fedsign", "own-sign", "hinge", "norm-matched"
]
SplitName = Literal["dirichlet", "shards", "natural", "iid"]
ServerName = Literal["none", "fedadam", "fedavgm"]
RobustName = Literal["none", "median", "trimmed", "krum", "bulyan", "geometric", "clip", "centered", "fltrust"]
AttackName = Literal["none", "crash", "nan", "flip", "huge", "alie", "inner", "sybil", "labels"]
PrivacyName = Literal["none", "server", "clients"]
DelayName = Literal["none", "lognormal"]
AggregationName = Literal["plain", "secure"]
EngineName = Literal["embedded", "flower"]
NetName = Literal["mlp", "cnn", "cnn-bn", "cnn-gn"]


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Group, name="dirichlet", flag="split", choices=("dirichlet",)):
    """Settings of the uneven split, used by `--split dirichlet`."""

    alpha: Size = 0.5
    """Concentration α of the draw, > 0: small is uneven."""

    rule: Literal["classes", "clients"] = "classes"
    """A draw over clients for each class, or over classes for each client."""


@dataclass(frozen=True, kw_only=True)
class Shards(Group, name="shards", flag="split", choices=("shards",)):
    """Settings of the split by label, used by `--split shards`."""

    per_client: Count = 2
    """Label shards of each client (count)."""


@dataclass(frozen=True, kw_only=True)
class FedSign(Group, name="fedsign", flag="methods", choices=("fedsign", "own-sign", "hinge", "norm-matched")):
    """Settings of FedSign and its controls, used by `--methods fedsign`, `own-sign`, `hinge` and `norm-matched`."""

    gamma: float = 0.01
    """Strength γ; the paper's grid is 0.001, 0.01, 0.1."""

    reduction: Literal["tensor_mean", "sum", "mean"] = "tensor_mean"
    """How the sum over elements is weighed: γ over tensors, γ, or γ over elements and tensors."""

    temperature: float | Literal["scale-aware"] = 1.0
    """Temperature τ, in units of the weights; hinge has none."""


@dataclass(frozen=True, kw_only=True)
class FedProx(Group, name="fedprox", flag="methods", choices=("fedprox",)):
    """Settings of FedProx, used by `--methods fedprox`."""

    mu: float = 0.01
    """Strength μ of the pull towards the global model."""


@dataclass(frozen=True, kw_only=True)
class Moon(Group, name="moon", flag="methods", choices=("moon",)):
    """Settings of MOON, used by `--methods moon`."""

    mu: float = 1.0
    """Strength μ of the contrast."""

    temperature: float = 0.5
    """Temperature τ of the contrast."""


@dataclass(frozen=True, kw_only=True)
class FedDyn(Group, name="feddyn", flag="methods", choices=("feddyn",)):
    """Settings of FedDyn, used by `--methods feddyn`."""

    alpha: float = 0.01
    """Strength α, > 0."""


@dataclass(frozen=True, kw_only=True)
class FedPan(Group, name="fedpan", flag="methods", choices=("fedpan",)):
    """Settings of FedPAN, used by `--methods fedpan`."""

    periods: float = 1.0
    """Periods of the sine across the channels of a layer, T."""

    amplitude: float = 0.05
    """Height of the sine, A."""


@dataclass(frozen=True, kw_only=True)
class Trimmed(Group, name="trimmed", flag="robust", choices=("trimmed",)):
    """Settings of the trimmed mean, used by `--robust trimmed`."""

    share: float = 0.2
    """Share of the clients left out at each end (0 to 0.5)."""


@dataclass(frozen=True, kw_only=True)
class Krum(Group, name="krum", flag="robust", choices=("krum", "bulyan")):
    """Settings of Krum and Bulyan, used by `--robust krum` and `bulyan`."""

    hostile: int = 1
    """Hostile models in a round that it reckons with (count)."""

    keep: Count | None = None
    """Models whose mean Krum takes (count); 1 loses much where clients differ; none: all but the hostile ones."""


@dataclass(frozen=True, kw_only=True)
class RobustClip(Group, name="robust_clip", flag="robust", choices=("clip", "centered")):
    """Settings of clipped updates, used by `--robust clip` and `centered`."""

    norm: Size = 1.0
    """Largest norm of a client's update, or in centred clipping of its distance from the rest."""


@dataclass(frozen=True, kw_only=True)
class Trust(Group, name="trust", flag="robust", choices=("fltrust",)):
    """Settings of FLTrust, used by `--robust fltrust`."""

    rows: Count = 100
    """Held-out rows on which the server trains, to compare clients with itself (count); no accuracy is taken on
    them."""


@dataclass(frozen=True, kw_only=True)
class Privacy(Group, name="private", flag="privacy", choices=("server", "clients")):
    """Settings of client-level differential privacy, used by `--privacy server` and `clients`."""

    noise: SizeOrZero = 1.0
    """Noise multiplier z: standard deviation of the noise on the sum of updates, in clipping norms; 0: a control
    without privacy."""

    clip: Size = 1.0
    """Norm to which each client's update is shortened, in units of the weights."""

    quantile: LiveShare | None = None
    """Share of updates that should be shorter than the norm (0 to 1), which then follows them; none: it stays."""

    delta: LiveShare | None = None
    """Probability δ with which ε may fail (0 to 1); none: clients^−1.1."""


@dataclass(frozen=True, kw_only=True)
class Secure(Group, name="secure", flag="aggregation", choices=("secure",)):
    """Settings of secure aggregation, used by `--aggregation secure`."""

    bound: Size = 8.0
    """Largest element of an update, in units of the weights; a client beyond it sends nothing and is named."""

    bits: Literal[16, 24, 32, 40, 48, 56, 64] = 32
    """Bits that travel for each element (count)."""

    step: Size = 2.0**-20
    """What elements are rounded to multiples of, in units of the weights."""

    threshold: ShareBelowOne = 0.5
    """Share of the round's clients (0 to below 1) of which more must stay until the sum is unmasked."""

    dropout: ShareBelowOne = 0.0
    """Share of the clients (0 to below 1) that leaves before each of the four exchanges, to see what it costs."""


@dataclass(frozen=True, kw_only=True)
class Late(Group, name="late", flag="delays", choices=("lognormal",)):
    """Settings of simulated delays, used by `--delays lognormal`."""

    median: Size = 1.0
    """Median time until an update is with the server (seconds); nobody really waits."""

    spread: SizeOrZero = 0.5
    """Standard deviation of the logarithm of the time; half of its variance is the client's own, half the round's."""

    gone: ShareBelowOne = 0.0
    """Share of the clients that never answer (0 to below 1); each is drawn for itself."""

    patience: Size = 60.0
    """Time that a round waits for an answer (seconds); a client that was late then is not waited for again until it
    answers in time."""


@dataclass(frozen=True, kw_only=True)
class Settings(Saving, Seeded):
    """Train one model over clients that keep their data, by one method or several on the same split and schedule.

    Before the run the price is told: clients trained, steps, and bytes on the wire, from shapes alone; afterwards the
    page holds it against what was counted. Accuracy is that on test rows, which choose nothing; `--held-out` holds
    training rows back to choose settings by. An interrupted run goes on to the same bits with `--resume`. OUT gets
    report.html, record.jsonl, split.json and the models.
    """

    out: Path = Path("runs/federate")

    methods: Annotated[tuple[MethodName, ...], Several("nothing would be trained")] = ("fedavg", "fedsign")
    """Ways to compare. own-sign and hinge are controls of fedsign; norm-matched is fedsign held, tensor by tensor
    and round by round, to the norms of a fedavg run that is made first."""

    fedsign: FedSign = field(default_factory=FedSign)
    fedprox: FedProx = field(default_factory=FedProx)
    moon: Moon = field(default_factory=Moon)
    feddyn: FedDyn = field(default_factory=FedDyn)
    fedpan: FedPan = field(default_factory=FedPan)

    data: str = "mnist-1d"
    """mnist-1d (made in code), digits, mnist, fashion-mnist or cifar10; or a .safetensors file with inputs, targets,
    test_inputs, test_targets and, for `--split natural`, groups."""

    train_rows: Count | None = None
    """Training rows to use, drawn at random (count); none: all."""

    test_rows: Count | None = 2000
    """Test rows to report on, drawn at random (count); none: all."""

    held_out: ShareBelowOne = 0.1
    """Share of the rows kept for measuring (0 to below 1): training rows that the server holds back, to choose settings
    by."""

    split: SplitName = "dirichlet"
    """Who holds what: classes spread by a Dirichlet draw, label shards, the data's own groups, or at random."""

    dirichlet: Dirichlet = field(default_factory=Dirichlet)
    shards: Shards = field(default_factory=Shards)

    clients: Count = 100
    """All clients (count); a natural split brings its own number."""

    participation: float = 0.1
    """Share of the clients that train in a round (0 to 1)."""

    sampling: Literal["fixed", "poisson"] = "fixed"
    """How the clients of a round are drawn: as many each time, or each by a coin of its own."""

    spare: SizeOrZero = 0.0
    """Share of further clients that are asked, 0.2 for a fifth more; a round closes when as many as without have
    answered."""

    delays: DelayName = "none"
    """When clients answer: all at once, or after times drawn from a lognormal distribution."""

    late: Late = field(default_factory=Late)

    rounds: int = 50
    """Rounds of sending, training and averaging (count)."""

    local_epochs: int = 5
    """Passes over its own rows that a client makes in a round (count)."""

    batch: Count = 64
    """Rows per step (count): of a client."""

    lr: Rate = 0.1
    """Peak learning rate: of the clients' SGD."""

    momentum: float = 0.9
    """Momentum of the clients' SGD, from zero in every round (0 to 1)."""

    weight_decay: SizeOrZero = 0.0
    """Weight decay λ: coupled, its product with the weights is part of the clients' gradient."""

    clip: SizeOrZero = 0.0
    """Norm above which gradients are scaled down (unit of the gradient norm); 0: never."""

    warmup_rounds: int = 0
    """Rounds over which the learning rate rises linearly to its peak (count)."""

    schedule: Literal["cosine", "constant"] = "constant"
    """How the learning rate goes after warm-up: half a cosine down to 0, or flat."""

    least_steps: int = 0
    """Steps that a client with few rows makes at least (count)."""

    batch_norm: Literal["average", "local", "recalibrate"] = "average"
    """Running statistics: averaged, kept by each client, or taken anew on the held-out rows."""

    weighting: Literal["uniform", "size"] = "uniform"
    """How much a client counts in the mean: all the same, or by its rows."""

    blocks: int | None = None
    """Body blocks that each client draws, trains and sends (count); none: all."""

    net: NetName = "mlp"
    """Perceptron, or convolutional net without norm, with batch norm, or with group norm."""

    density: LiveShare = 1.0
    """Live share of every hidden weight (0 to 1); below 1 every client trains the same masks, scaled by SμPar."""

    server: ServerName = "none"
    """What the server does with the mean: take it, or treat its step as a gradient."""

    server_lr: Rate | None = None
    """Rate of the server's step; none: 1, for fedadam 0.01."""

    robust: RobustName = "none"
    """How models become one where clients may be hostile."""

    trimmed: Trimmed = field(default_factory=Trimmed)
    krum: Krum = field(default_factory=Krum)
    robust_clip: RobustClip = field(default_factory=RobustClip)

    trust: Trust = field(default_factory=Trust)

    bucket: Count = 1
    """Clients that are averaged at random before `--robust` sees their mean (count); 1: none."""

    privacy: PrivacyName = "none"
    """Who clips the updates and adds noise: nobody, the server to their sum, or every client its share."""

    private: Privacy = field(default_factory=Privacy)

    aggregation: AggregationName = "plain"
    """What the server sees: every update, or masked integers whose sum alone it can read (secure aggregation)."""

    secure: Secure = field(default_factory=Secure)

    attack: AttackName = "none"
    """What attacked clients do: nothing, fail, send NaN, their update turned round or a million times as long; together
    hide among the honest (alie), reverse their mean (inner), or copy one (sybil); or train on wrong labels."""

    attacked: ShareBelowOne = 0.2
    """Share of the clients that are attacked (0 to 1); each is drawn for itself."""

    engine: EngineName = "embedded"
    """Fast simulation in this process, or Flower's messages, ClientApp and strategy in this process."""

    workers: Workers | None = None
    """Processes that share the work (count): of convolutional nets, a client at a time each; none: small nets of known
    layers are trained side by side in this process, others by one process a core."""

    evaluate_every: CountOrZero = 1
    """Rounds between measurements on test rows (count); 0: after the last only."""

    members: bool = True
    """Whether clients' models are evaluated before averaging, for the fusion gap; it costs an evaluation a client."""

    save_every: CountOrZero = 10
    """Rounds between checkpoints (count); 0: none."""

    def __post_init__(self) -> None:
        """Reject settings in conflict."""
        super().__post_init__()
        own = self.batch_norm != "recalibrate" or self.held_out > 0
        why = "the server needs rows of its own to take statistics from"
        require(own, "batch_norm", "recalibrate without held-out rows", why, "pass --held-out 0.1")
        if self.engine == "flower":
            why, do = "the in-process grid has no checkpoints", "start anew with --overwrite, or pass --engine embedded"
            require(not self.resume, "resume", "with --engine flower", why, do)
            honest = self.attack == "none"
            why = "attacks are made by the embedded engine"
            require(honest, "attack", f"{self.attack} with --engine flower", why, "pass --engine embedded")
            why = "delays are made by the embedded engine"
            require(
                self.delays == "none", "delays", f"{self.delays} with --engine flower", why, "pass --engine embedded"
            )
            masked = self.secure.dropout == 0
            why = "clients that leave are made by the embedded engine"
            require(masked, "secure.dropout", self.secure.dropout, why, "pass --secure.dropout 0")
        self.training()

    def training(self) -> Schedule:
        """What is the same for all methods, as ``simulate`` takes it."""
        # here, because it loads torch, which help need not wait for
        from sparing.federated import Schedule

        same = ("rounds", "participation", "sampling", "spare", "local_epochs", "lr", "momentum", "weight_decay",
                "warmup_rounds", "least_steps", "batch_norm", "blocks")  # fmt: skip
        try:
            return Schedule(
                **{name: getattr(self, name) for name in same},
                batch_size=self.batch,
                clip=self.clip or None,
                decay="none" if self.schedule == "constant" else self.schedule,
                weights=self.weighting,
            )
        except UserError as error:
            name = error.what.removeprefix("Schedule.")
            raise UserError(name, got=error.got, why=error.why, do=error.do) from None

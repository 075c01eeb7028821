"""What a person may choose about federated training, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparing.errors import UserError, require
from sparing.federated import Schedule
from sparing.federated.fedsign import Reduction
from sparing.federated.settings import BatchNorm, Decay, Weights
from sparing.jobs.federate.nets import NetName
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least, positive

MethodName = Literal[
    "fedavg", "fedprox", "moon", "feddyn", "fedpan", "scaffold", "fedsign", "own-sign", "hinge", "norm-matched"
]
SplitName = Literal["dirichlet", "shards", "natural", "iid"]
ServerName = Literal["none", "fedadam", "fedavgm"]
RobustName = Literal["none", "median", "trimmed", "krum", "clip"]
AttackName = Literal["none", "crash", "nan", "flip", "huge"]
EngineName = Literal["embedded", "flower"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Train one model over clients that keep their data, by one method or several on the same split and schedule.

    Before the run the price is told: clients trained, steps, and bytes on the wire, from shapes alone; afterwards the
    page holds it against what was counted. Accuracy is that on test rows, which choose nothing; `--validation` holds
    training rows back to choose settings by. An interrupted run goes on to the same bits with `--resume`. OUT gets
    report.html, record.jsonl, split.json and the models.
    """

    method: tuple[MethodName, ...] = ("fedavg", "fedsign")
    """Methods to compare. own-sign and hinge are controls of fedsign; norm-matched is fedsign held, tensor by tensor
    and round by round, to the norms of a fedavg run that is made first."""

    data: str = "mnist-1d"
    """mnist-1d (made in code), digits, mnist, fashion-mnist or cifar10; or a .safetensors file with inputs, targets,
    test_inputs, test_targets and, for `--split natural`, groups."""

    rows: int | None = None
    """Training rows to use, drawn at random (count); default all."""

    test_rows: int | None = 2000
    """Test rows to report on, drawn at random (count); none for all."""

    validation: float = 0.1
    """Share of the training rows that the server holds back, to choose settings by (0 to 1)."""

    split: SplitName = "dirichlet"
    """Who holds what: classes spread by a Dirichlet draw, label shards, the data's own groups, or at random."""

    alpha: float = 0.5
    """Concentration α of the Dirichlet draw, > 0: small is uneven."""

    rule: Literal["classes", "clients"] = "classes"
    """Dirichlet rule: a draw over clients for each class, or over classes for each client."""

    shards: int = 2
    """Label shards of each client (count), for shards."""

    clients: int = 100
    """All clients (count); a natural split brings its own number."""

    participation: float = 0.1
    """Share of the clients that train in a round (0 to 1)."""

    rounds: int = 50
    """Rounds of sending, training and averaging (count)."""

    local_epochs: int = 5
    """Passes over its own rows that a client makes in a round (count)."""

    batch_size: int = 64
    """Rows of a client's step (count)."""

    lr: float = 0.1
    """Learning rate of the clients' SGD (per step)."""

    momentum: float = 0.9
    """Momentum of the clients' SGD, from zero in every round (0 to 1)."""

    weight_decay: float = 0.0
    """Factor of the weights in the clients' gradient."""

    clip: float | None = None
    """Largest norm of a client's gradient; default no clipping."""

    warmup_rounds: int = 0
    """Rounds in which the rate rises linearly (count)."""

    decay: Decay = "none"
    """What the learning rate does after the warm-up."""

    least_steps: int = 0
    """Steps that a client with few rows makes at least (count)."""

    batch_norm: BatchNorm = "average"
    """Running statistics: averaged, kept by each client, or taken anew on the validation rows."""

    weights: Weights = "uniform"
    """How much a client counts in the mean: all alike, or by its rows."""

    blocks: int | None = None
    """Body blocks that each client draws, trains and sends (count); default all."""

    net: NetName = "mlp"
    """Perceptron, or convolutional net without norm, with batch norm, or with group norm."""

    density: float = 1.0
    """Share of live hidden weights (0 to 1); below 1 every client trains the same masks, scaled by SμPar."""

    gamma: float = 0.01
    """Strength γ of fedsign and its controls; the paper's grid is 0.001, 0.01, 0.1."""

    reduction: Reduction = "tensor_mean"
    """How fedsign's sum over elements is weighed: γ over tensors, γ, or γ over elements and tensors."""

    temperature: float | Literal["scale-aware"] = 1.0
    """Temperature τ of fedsign and own-sign, in units of the weights."""

    mu: float | None = None
    """Strength μ of fedprox (default 0.01) and of moon (default 1)."""

    moon_temperature: float = 0.5
    """Temperature τ of moon's contrast."""

    feddyn_alpha: float = 0.01
    """Strength α of feddyn, > 0."""

    pan_periods: float = 1.0
    """Periods of fedpan's sine across the channels of a layer, T."""

    pan_amplitude: float = 0.05
    """Height of fedpan's sine, A."""

    server: ServerName = "none"
    """What the server does with the mean: take it, or treat its step as a gradient."""

    server_lr: float | None = None
    """Rate of the server's step; default 1, for fedadam 0.01."""

    robust: RobustName = "none"
    """How models become one where clients may be hostile."""

    trim: float = 0.2
    """Share of the clients that trimmed leaves out at each end (0 to 0.5)."""

    hostile: int = 1
    """Hostile models in a round that krum reckons with (count)."""

    keep: int = 1
    """Models whose mean krum takes (count); more than one is Multi-Krum."""

    clip_norm: float = 1.0
    """Largest norm of a client's update, for clip."""

    attack: AttackName = "none"
    """What attacked clients do: nothing, fail, send NaN, send their update turned round, or a million times as long."""

    attacked: float = 0.2
    """Share of the clients that are attacked (0 to 1); each is drawn for itself."""

    engine: EngineName = "embedded"
    """Fast simulation in this process, or Flower's messages, ClientApp and strategy in this process."""

    workers: int | None = None
    """Processes for convolutional nets (count); default one a core. They change nothing but the time."""

    every: int = 1
    """Rounds between evaluations (count)."""

    members: bool = True
    """Whether clients' models are evaluated before averaging, for the fusion gap; it costs an evaluation a client."""

    save_every: int = 10
    """Rounds between checkpoints (count)."""

    seed: int = 0
    """Of the split, the initial model and everything drawn."""

    out: Path = Path("runs/federate")
    """Folder of the record, the page, the split, the models and the checkpoints."""

    resume: bool = False
    """Go on where an interrupted run stopped, to the same bits."""

    overwrite: bool = False
    """Delete an earlier run in that folder."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict."""
        require(len(self.method) > 0, "method", "none", "nothing would be trained", "pass one or more")
        once = len(set(self.method)) == len(self.method)
        require(once, "method", " ".join(self.method), "a method stands there twice", "pass each once")
        at_least(1, self, "rows", "test_rows", "clients", "shards", "every", "save_every")
        at_least(1, self, "workers", why="someone must do the work", most=1024)
        positive(self, "alpha", why="the Dirichlet distribution needs a positive concentration")
        positive(self, "server_lr", "clip_norm", why="it is a size")
        for name in ("validation", "attacked"):
            share = getattr(self, name)
            require(0 <= share < 1, name, share, "it is a share", "pass one of 0 or more, below 1")
        share = 0 < self.density <= 1
        require(share, "density", self.density, "it is a share of live weights", "pass 0 < density <= 1")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        self._check_pairs()
        self.schedule()

    def _check_pairs(self) -> None:
        own = self.batch_norm != "recalibrate" or self.validation > 0
        why = "the server needs rows of its own to take statistics from"
        require(own, "batch_norm", "recalibrate without validation rows", why, "pass --validation 0.1")
        if self.engine == "flower":
            why, do = "the in-process grid has no checkpoints", "start anew with --overwrite, or pass --engine embedded"
            require(not self.resume, "resume", "with --engine flower", why, do)
            honest = self.attack == "none"
            why = "attacks are made by the embedded engine"
            require(honest, "attack", f"{self.attack} with --engine flower", why, "pass --engine embedded")

    def schedule(self) -> Schedule:
        """What is the same for all methods, as ``simulate`` takes it."""
        try:
            return Schedule(
                rounds=self.rounds,
                participation=self.participation,
                local_epochs=self.local_epochs,
                batch_size=self.batch_size,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                clip=self.clip,
                warmup_rounds=self.warmup_rounds,
                decay=self.decay,
                least_steps=self.least_steps,
                batch_norm=self.batch_norm,
                weights=self.weights,
                blocks=self.blocks,
            )
        except UserError as error:
            name = error.what.removeprefix("Schedule.")
            raise UserError(name, got=error.got, why=error.why, do=error.do) from None

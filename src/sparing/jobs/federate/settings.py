"""Settings of federated training, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from sparing.errors import UserError, require
from sparing.jobs.federate.groups import (
    Dirichlet,
    FedDyn,
    FedPan,
    FedProx,
    FedSign,
    Krum,
    Late,
    Lora,
    Moon,
    Privacy,
    RobustClip,
    Secure,
    Shards,
    Table,
    Text,
    Trimmed,
    Trust,
)
from sparing.jobs.limits import (
    Count,
    CountOrZero,
    LiveShare,
    Rate,
    Several,
    ShareBelowOne,
    SizeOrZero,
    Workers,
)  # fmt: skip
from sparing.jobs.settings import OnDevice, Saving, Seeded

if TYPE_CHECKING:
    from sparing.federated import Schedule

MethodName = Literal[
    "fedavg",
    "fedprox",
    "moon",
    "feddyn",
    "fedpan",
    "scaffold",
    "fednova",
    "fedsign",
    "own-sign",
    "hinge",
    "norm-matched",
    "fedex-lora",
    "flora",
    "ffa-lora",
]
SplitName = Literal["dirichlet", "shards", "natural", "iid"]
ServerName = Literal["none", "fedadam", "fedyogi", "fedavgm"]
RobustName = Literal["none", "median", "trimmed", "krum", "bulyan", "geometric", "clip", "centered", "fltrust"]
AttackName = Literal["none", "crash", "nan", "flip", "huge", "alie", "inner", "sybil", "labels"]
PrivacyName = Literal["none", "server", "clients"]
DelayName = Literal["none", "lognormal"]
AggregationName = Literal["plain", "secure"]
EngineName = Literal["embedded", "flower"]
NetName = Literal["mlp", "cnn", "cnn-bn", "cnn-gn"]


@dataclass(frozen=True, kw_only=True)
class Settings(Saving, Seeded, OnDevice):
    """Train one model over clients that keep their data, by one method or several on the same split and schedule.

    Before the run the price is told: clients trained, steps, and bytes on the wire, from shapes alone; afterwards the
    page holds it against what was counted. Accuracy is that on test rows, which choose nothing; `--held-out` holds
    training rows back to choose settings by. An interrupted run goes on to the same bits with `--resume`. OUT gets
    report.html, record.jsonl, split.json and the models.
    """

    out: Path = Path("runs/federate")

    methods: Annotated[tuple[MethodName, ...], Several("nothing would be trained")] = ("fedavg", "fedsign")
    """Ways to compare. own-sign and hinge are controls of fedsign; norm-matched is fedsign held, tensor by tensor
    and round by round, to the norms of a fedavg run that is made first. fedex-lora, flora and ffa-lora average models
    with LoRA exactly, where fedavg averages the factors."""

    fedsign: FedSign = field(default_factory=FedSign)
    fedprox: FedProx = field(default_factory=FedProx)
    moon: Moon = field(default_factory=Moon)
    feddyn: FedDyn = field(default_factory=FedDyn)
    fedpan: FedPan = field(default_factory=FedPan)

    model: Annotated[Positional[Path | None], arg(metavar="[MODEL]")] = None
    """Folder of a language model and its tokenizer, as `save_pretrained` writes them, to fine-tune over clients that
    hold texts; none: `--net` is trained from nothing."""

    trained: Literal["lora", "full"] = "lora"
    """What of a language model trains: low-rank additions, or all weights, with `--blocks` those drawn."""

    lora: Lora = field(default_factory=Lora)
    text: Text = field(default_factory=Text)

    data: str = "mnist-1d"
    """mnist-1d (made in code), digits, mnist, fashion-mnist or cifar10; or a .safetensors or .npz file with inputs,
    targets, test_inputs, test_targets and, for `--split natural`, groups; or a .csv or .parquet file, what save_to_disk
    of datasets wrote, or a folder in which each file or folder is a client. For a language model a folder of texts,
    each file a client, or one .jsonl, .json, .csv or .parquet file with `--text.client`."""

    table: Table = field(default_factory=Table)

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

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer: of the clients; SGD with momentum, or AdamW (β₂ 0.999). Its moments start at zero in every round."""

    lr: Rate | None = None
    """Peak learning rate; none: 0.1 for sgd, 0.001 for adamw."""

    momentum: float = 0.9
    """Momentum of the clients' SGD, or β₁ of AdamW (0 to 1)."""

    weight_decay: SizeOrZero = 0.0
    """Weight decay λ: coupled, its product with the weights is part of the clients' gradient; of adamw decoupled."""

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
    """Rate of the server's step; none: 1, for fedadam and fedyogi 0.01."""

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
    layers are trained side by side in this process, others by one process a core. On CUDA they take the visible devices
    in turn, and without a number there is one process."""

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
        hidden = self.net == "cnn-bn" and (self.privacy != "none" or self.aggregation == "secure")
        why, do = (
            "the server never sees statistics, and would measure its model without",
            "pass --batch-norm recalibrate",
        )
        require(not (self.batch_norm == "local" and hidden), "batch_norm", "local", why, do)
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
        dense = self.density == 1 or self.optimizer == "sgd"
        why, do = "SμPar asks for a rate of its own for each layer, and clients have one", "pass --optimizer sgd"
        require(dense, "optimizer", f"adamw with --density {self.density:g}", why, do)
        check_model(self)
        self.training()

    def training(self) -> Schedule:
        """What is the same for all methods, as ``simulate`` takes it."""
        # here, because it loads torch, which help need not wait for
        from sparing.federated import Schedule

        same = ("rounds", "participation", "sampling", "spare", "local_epochs", "optimizer", "momentum", "weight_decay",
                "warmup_rounds", "least_steps", "batch_norm", "blocks")  # fmt: skip
        try:
            return Schedule(
                **{name: getattr(self, name) for name in same},
                lr=RATES[self.optimizer] if self.lr is None else self.lr,
                batch_size=self.batch,
                clip=self.clip or None,
                decay="none" if self.schedule == "constant" else self.schedule,
                weights=self.weighting,
            )
        except UserError as error:
            name = error.what.removeprefix("Schedule.")
            raise UserError(name, got=error.got, why=error.why, do=error.do) from None


NAMES = ("mnist-1d", "digits", "mnist", "fashion-mnist", "cifar10")
"""Data sets by name, also where a folder is called so."""

RATES = {"sgd": 0.1, "adamw": 0.001}
"""Peak learning rates where none is given."""

ON_LORA, NO_TEXT = ("fedex-lora", "flora", "ffa-lora"), ("moon", "fedpan")
SIGNS = ("fedsign", "own-sign", "hinge", "norm-matched")


def _is_saved(path: Path, table: Table) -> bool:
    """Whether a folder is one data set, which says nothing of clients."""
    return not table.client and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def check_model(settings: Settings) -> None:
    """Refuse what does not go with a language model, and what goes only with one."""
    on_lora = [name for name in settings.methods if name in ON_LORA]
    if settings.model is None:
        named = settings.data not in NAMES and (settings.table.client or Path(settings.data).is_dir())
        why, do = f"rows of {settings.data} are each a client's own", "pass --split natural"
        folder = not named or settings.split == "natural" or _is_saved(Path(settings.data), settings.table)
        require(folder, "split", settings.split, why, do)
        why, do = "only a language model has LoRA here", "pass its folder: sparing federate MODEL"
        require(not on_lora, "methods", " ".join(on_lora), why, do)
        own = (settings.trained, settings.lora, settings.text) == ("lora", Lora(), Text())
        require(own, "model", "none, with settings of one", "they would change nothing", do)
        return
    why, do = "texts have no columns of numbers", "pass --text.client"
    require(settings.table == Table(), "table", "with a language model", why, do)
    full = settings.trained == "full"
    refused = [name for name in settings.methods if name in NO_TEXT]
    require(not refused, "methods", " ".join(refused), "it is made for classifiers", "leave it out")
    why = "no LoRA trains"
    require(not (full and on_lora), "methods", f"{' '.join(on_lora)} with --trained full", why, "pass --trained lora")
    signs = [name for name in settings.methods if name in SIGNS]
    why = "B A is (−B)(−A), so signs of its factors mean nothing"
    do = "leave it out (--methods fedavg fedex-lora), or pass --trained full"
    require(full or not signs, "methods", f"{' '.join(signs)} with LoRA", why, do)
    why, do = "texts have no classes", "pass --split natural, or iid"
    require(settings.split in ("natural", "iid"), "split", settings.split, why, do)
    require(settings.attack != "labels", "attack", "labels", why, "pass another attack")
    why, do = "a language model is as dense as it comes", "pass --density 1"
    require(settings.density == 1, "density", settings.density, why, do)

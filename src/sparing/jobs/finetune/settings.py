"""Settings of a fine-tuning run, checked before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.hub import OnHub
from sparing.jobs.limits import Count, CountOrZero, Group, Length, Rate, ShareBelowOne, Size
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.names import Attention, OptimizerName
from sparing.jobs.lm.optimizer import (
    AdamW,
    Apollo,
    Device,
    GaLore,
    Optimizer,
    check_optimizer,
    optimizer_of,
)
from sparing.jobs.lm.step import Method
from sparing.jobs.parallel import NO_PLAN
from sparing.jobs.settings import FromHub, Parallel, Saving, Steps
from sparing.jobs.torch_state import device_for
from sparing.layersample import Adaptive, Bernoulli, CostAware, Fixed, LayerSampling, Ordered, Reshuffle, Uniform
from sparing.layersample.config import Frozen
from sparing.layersample.price.predict import Full


@dataclass(frozen=True, kw_only=True)
class Lisa(Group, name="lisa", flag="method", choices=("lisa",)):
    """Settings of layer sampling, used by `--method lisa`."""

    active: int = 2
    """Middle blocks trained at once (count); the paper's γ."""

    period: int = 20
    """Optimizer steps between draws (count); the paper's K."""

    embed: bool = True
    """Whether the embeddings train (yes or no)."""

    head: bool = True
    """Whether the output head trains (yes or no)."""

    tail: bool = True
    """Whether the final norm trains (yes or no)."""

    state: Literal["reset", "keep", "offload", "reset_all"] = "reset"
    """Moments of a block that leaves: dropped, kept on the device, or moved to main memory; reset_all drops those of
    embeddings and head too."""

    sampler: Literal[
        "uniform",
        "reshuffle",
        "ascending",
        "descending",
        "bernoulli",
        "adaptive",
        "cost-aware",
        "fixed",
        "last",
    ] = "uniform"
    """How blocks are drawn: uniformly (the paper), in shuffled rounds that miss none, from the first up or the last
    down, each by its own coin (the paper's first version), by size of gradient, by gradient and cost (needs
    --lisa.no-embed), once for the whole run, or always those next to the head."""

    blocks: tuple[int, ...] = ()
    """The middle blocks that the sampler `fixed` trains (indices from 0); none: `active` of them, drawn by `seed`."""

    body: str | None = None
    """Dotted path of the list of middle blocks (such as `model.layers`); none: found."""

    warmup: int = 0
    """Steps at the start of each interval over which the learning rate of all that trains rises to its full value
    (count)."""

    exact: bool = True
    """With `weights`: whether main memory keeps the exact weights of frozen blocks, from which a drawn block starts and
    of which the saved model is made (yes), or a block is rounded at random when it leaves (no)."""

    def sampling(self) -> LayerSampling:
        """The settings as ``LayerSampling`` takes them."""
        fits = not self.blocks or self.sampler == "fixed"
        require(fits, "lisa.blocks", self.blocks, f"the sampler {self.sampler} draws its own", "use the sampler fixed")
        draws: dict[str, Callable[[], Any]] = {
            "uniform": Uniform,
            "reshuffle": Reshuffle,
            "ascending": Ordered,
            "descending": lambda: Ordered(descending=True),
            "bernoulli": Bernoulli,
            "adaptive": Adaptive,
            "cost-aware": CostAware,
            "fixed": lambda: Fixed(blocks=self.blocks or None),
            "last": lambda: Fixed(blocks="last"),
        }
        same = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in {"sampler", "blocks", "active"}}
        return LayerSampling(active=len(self.blocks) or self.active, sampler=draws[self.sampler](), **same)


@dataclass(frozen=True, kw_only=True)
class Pace(Steps):
    """How the steps go, whatever trains: shared by the command line and by ``fit``."""

    batch: Count = 1
    """Rows per step (count): with `accumulate`, per micro-batch, what memory holds at once."""

    lr: Rate | None = None
    """Peak learning rate; none: 2e-5 for full, 5e-5 for lisa, 2e-4 for lora."""

    steps: Count | None = None
    """Optimizer steps (count); none: those of `epochs`."""

    epochs: Size = 1.0
    """Passes over the training rows (count, may be a fraction)."""

    accumulate: Count = 8
    """Micro-batches per optimizer step (count); the loss is the mean over the labels of all of them."""

    weights: Frozen | None = None
    """Number format of frozen linear weights of the middle blocks: nf4 (4 bits) or int8, which needs `pip install
    'sparing[lowbit]'`; none: that of the model. With LoRA this is QLoRA. Not with full."""

    checkpointing: bool = False
    """Whether activations are computed again in backward instead of held (yes or no)."""

    loss_tokens: CountOrZero | None = None
    """Tokens whose logits exist at once (count); 0: all of a micro-batch; none: as many as fit 256 MiB. More than these
    are computed again in the backward pass, a part at a time."""
    masters: bool = False
    """Whether what trains of a 16-bit model keeps 32-bit copies, on which the optimizer steps (yes or no). LoRA's
    additions are 32-bit whatever this says."""

    keep_zeros: bool = False
    """Whether weights that are exactly zero stay so: a pruned model, such as `pretrain` exports, stays pruned (yes or
    no). Not with LoRA, whose additions would fill the zeros."""


@dataclass(frozen=True, kw_only=True)
class Training(Pace):
    """A whole training run of a live model: a method and a pace."""

    method: Method
    """What trains."""

    optimizer: Optimizer = field(default_factory=AdamW)
    """What steps."""

    seconds: float | None = None
    """Training time (seconds, evaluation excluded) after which the run stops at the end of a step; none: never."""

    def __post_init__(self) -> None:
        """Reject low-bit weights where every weight trains."""
        why, do = "every weight trains, and none is frozen", "pass --method lisa or lora"
        frozen = self.weights is None or not isinstance(self.method, Full)
        require(frozen, "weights", f"{self.weights} with full fine-tuning", why, do)

    @property
    def peak(self) -> float:
        """The peak learning rate, by default the method's own."""
        default = 2e-5 if isinstance(self.method, Full) else 2e-4 if isinstance(self.method, Lora) else 5e-5
        return default if self.lr is None else self.lr


@dataclass(frozen=True, kw_only=True)
class Finetune(Saving, Parallel, Pace, FromHub):
    """Fine-tune a Hugging Face causal language model on your files.

    A record is {"text": …}, {"prompt": …, "response": …} or "completion", {"instruction": …, "input": …, "output": …},
    {"messages": [{"role": …, "content": …}, …]} or ShareGPT's "conversations". Only responses are learnt. Files are
    JSONL, JSON, CSV, parquet or text. OUT gets model/ with a model card (with LoRA also adapter/), report.html,
    record.jsonl and checkpoints/.
    """

    model: Annotated[Positional[Path], arg(metavar="MODEL"), OnHub("model")]
    """Folder of the model and its tokenizer, as `save_pretrained` writes them; or its name on the Hugging Face hub,
    OWNER/NAME, of which @REVISION says another than main. Only safetensors are read, and no code."""

    data: Annotated[Positional[tuple[Path, ...]], arg(metavar="DATA [DATA ...]"), OnHub("data")]
    """Files or folders to learn from: .jsonl, .json, .csv, .parquet or .txt; in each one kind of record. Or names of
    data sets on the hub, OWNER/NAME or OWNER/NAME:CONFIG, whose part `train` is read."""

    mix: tuple[Size, ...] = ()
    """Shares of the rows that each of `data` gives to an epoch (ratios, one for each in their order, such as 0.7 0.3);
    none: by size, so that every row comes once."""

    out: Path = Path("runs/finetune")

    method: Literal["full", "lisa", "lora"] = "lisa"
    """What trains: every parameter, sampled blocks, or low-rank additions."""

    lisa: Lisa = field(default_factory=Lisa)
    lora: Lora = field(default_factory=Lora)

    optimizer: OptimizerName = "adamw"
    """Optimizer: AdamW; with moments of 8 bits, also in pages that leave a full GPU, or of 4 bits; with one moment by
    row and column (Adafactor); with a rate per channel or matrix from a sketch of the gradient (APOLLO, APOLLO-Mini);
    in a subspace of the gradient (GaLore); or AdamW with its state in host memory. Bits and sketches need the extra
    `lowbit`."""

    apollo: Apollo = field(default_factory=Apollo)
    galore: GaLore = field(default_factory=GaLore)

    length: Length = 512
    """Tokens per row (count)."""

    packing: bool = True
    """Whether rows are filled with several records, which do not see each other (yes), or padded with one each (no)."""

    held_out: ShareBelowOne = 0.1
    """Share of the rows kept for measuring (0 to below 1): records of each file, drawn by `seed`."""

    held_out_data: Annotated[Path | None, OnHub("data")] = None
    """File or folder to measure on, or the name of a data set, whose part `validation` or else `test` is read; none: a
    share of `data`."""

    keep: Literal["last", "best"] = "last"
    """Which weights become OUT/model: those of the last step, or of the measurement with the lowest held-out loss."""

    log: Literal["none", "tensorboard", "wandb"] = "none"
    """Where losses, rates and speed are also written as the run goes: OUT/tensorboard, or Weights & Biases."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of weights and arithmetic."""

    attention: Attention = "auto"
    """Fused attention, one that holds all scores, one product for each document of a packed row, which needs no mask of
    all pairs of tokens, or the one that transformers takes for the model."""

    prompts: tuple[str, ...] = ()
    """Texts to continue before and after training; none: the beginnings of the first two held-out records."""

    max_new_tokens: CountOrZero = 48
    """Length of each continuation (tokens), where the model has positions for it; 0: none is made."""

    def __post_init__(self) -> None:
        """Reject settings in conflict, before any file is opened."""
        # from Python a single file is given as it is
        if isinstance(self.data, str | Path):
            object.__setattr__(self, "data", (Path(self.data),))
        super().__post_init__()
        self._check_data()
        why, do = "what LoRA adds fills the zeros when it is merged", "pass --method lisa or full"
        require(not self.keep_zeros or self.method != "lora", "keep_zeros", "yes with LoRA", why, do)
        if self.method == "lisa":
            self.lisa.sampling()
            self.local.check_multiple("lisa.period", self.lisa.period)
        self.local.check_multiple("evaluate_every", self.evaluate_every)
        why, do = "the slices of a head are gathered once a pass", "omit --plan or --loss-tokens"
        parted = bool(self.loss_tokens) and self.plan != NO_PLAN
        require(not parted, "loss_tokens", f"{self.loss_tokens} with a plan", why, do)
        why, do = "a plan cuts weights into slices, and a slice has no codes of its own", "omit --plan or --weights"
        require(self.weights is None or self.plan == NO_PLAN, "weights", f"{self.weights} with a plan", why, do)
        self._require_optimizer()
        self.training()

    def _require_optimizer(self) -> None:
        """Refuse an optimizer that is not installed, or does not go with the rest."""
        name, plain = self.optimizer, "pass --optimizer adamw"
        check_optimizer(name)
        why = "state of this kind cannot be cut over ranks"
        require(self.plan == NO_PLAN or name == "adamw", "optimizer", f"{name} with --plan {self.plan}", why, plain)
        why = "its pages are held until the process ends, so those of a block that leaves are never freed"
        paged = name == "paged-adamw-8bit" and self.method == "lisa"
        require(not paged, "optimizer", f"{name} with lisa", why, "pass --optimizer adamw-8bit")
        # a zero gradient comes back from a subspace as another number, and from a code of 8 bits on the CPU too
        fills = name in {"galore", "adamw-8bit", "paged-adamw-8bit"}
        require(not (self.keep_zeros and fills), "keep_zeros", f"yes with {name}", "its updates fill zeros", plain)
        why, do = "its kernels compute in 32 bits", "pass --dtype float32"
        wide = self.dtype == "float64" and name.endswith("bit")
        require(not wide, "dtype", f"float64 with {name}", why, do)

    def _check_data(self) -> None:
        require(len(self.data) > 0, "data", "none", "there is nothing to learn", "pass a file")
        fits, counts = len(self.mix) in {0, len(self.data)}, f"{len(self.mix)} shares of {len(self.data)} files"
        require(fits, "mix", counts, "each file has one", "pass as many shares as files, or none")
        if self.keep == "best":
            measured = self.evaluate_every > 0 and (self.held_out > 0 or self.held_out_data is not None)
            why, do = "nothing is measured on the way", "pass --evaluate-every and rows to hold out"
            require(measured, "keep", "best", why, do)
            resting = self.weights is not None and self.method == "lisa"
            why, do = "the weights of a block that rests are codes", "pass --keep last, or omit --weights"
            require(not resting, "keep", f"best with lisa and --weights {self.weights}", why, do)
            why = "no process has all weights while it trains"
            require(self.plan == "none", "keep", "best with --plan", why, "pass --keep last, or omit --plan")

    def training(self) -> Training:
        """The part that ``fit`` needs."""
        methods: dict[str, Callable[[], Method]] = {
            "full": Full,
            "lisa": self.lisa.sampling,
            "lora": lambda: self.lora,
        }
        pace = {f.name: getattr(self, f.name) for f in fields(Pace)}
        return Training(method=methods[self.method](), optimizer=self.stepping(), **pace)

    def stepping(self) -> Optimizer:
        """The optimizer, as a value."""
        on: Device = "cuda" if device_for(self.device).type == "cuda" else "cpu"
        return optimizer_of(self.optimizer, device=on, apollo=self.apollo, galore=self.galore)

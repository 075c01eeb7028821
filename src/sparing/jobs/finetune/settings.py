"""What a person may choose about a fine-tuning run, checked before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least, positive
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.sharded import check_spread
from sparing.layersample import Adaptive, Bernoulli, CostAware, Fixed, LayerSampling, Reshuffle, Uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class Full:
    """Train every parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lisa:
    """Layer sampling as the command line spells it; ``sampling()`` is the value of the layersample room."""

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

    sampler: Literal["uniform", "reshuffle", "bernoulli", "adaptive", "cost-aware", "fixed"] = "uniform"
    """How blocks are drawn: uniformly (the paper), in shuffled rounds that miss none, each by its own coin (the paper's
    first version), by size of gradient, by gradient and cost (needs --lisa.no-embed), or once for the whole run."""

    blocks: tuple[int, ...] = ()
    """The middle blocks that the sampler `fixed` trains (indices from 0); none: `active` of them, drawn by `seed`."""

    body: str | None = None
    """Dotted path of the list of middle blocks (such as `model.layers`); none: found."""

    warmup: int = 0
    """Steps over which the learning rate of a freshly drawn block rises to its full value (count)."""

    masters: bool = False
    """Whether active blocks of a 16-bit model keep 32-bit copies (yes or no)."""

    def sampling(self) -> LayerSampling:
        """The settings as ``LayerSampling`` takes them."""
        fits = not self.blocks or self.sampler == "fixed"
        require(fits, "lisa.blocks", self.blocks, f"the sampler {self.sampler} draws its own", "use the sampler fixed")
        draws: dict[str, Callable[[], Any]] = {
            "uniform": Uniform,
            "reshuffle": Reshuffle,
            "bernoulli": Bernoulli,
            "adaptive": Adaptive,
            "cost-aware": CostAware,
            "fixed": lambda: Fixed(blocks=self.blocks or None),
        }
        same = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in {"sampler", "blocks", "active"}}
        return LayerSampling(active=len(self.blocks) or self.active, sampler=draws[self.sampler](), **same)


Method = Full | LayerSampling | Lora  # what trains: everything, sampled blocks, or low-rank additions


def default_lr(method: Method) -> float:
    """Default learning rate of a method."""
    if isinstance(method, Lora):
        return 2e-4
    return 2e-5 if isinstance(method, Full) else 5e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How the steps go, whatever trains: shared by the command line and by ``fit``."""

    steps: int | None = None
    """Optimizer steps (count); when given, `epochs` is not used."""

    epochs: float = 1.0
    """Passes over the training rows (count, may be a fraction)."""

    lr: float | None = None
    """Peak learning rate of AdamW; none: 2e-5 for full, 5e-5 for lisa, 2e-4 for lora."""

    batch: int = 1
    """Rows per micro-batch (count): what memory holds at once."""

    accumulate: int = 8
    """Micro-batches per optimizer step (count); the loss is the mean over the labels of all of them."""

    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate goes after warm-up: down to 0 along half a cosine, or flat."""

    warmup: int = 0
    """Steps over which the learning rate rises linearly from 0 to its peak (count)."""

    weight_decay: float = 0.0
    """Decoupled decay of matrices, per step and unit of learning rate; vectors are never decayed."""

    clip: float = 1.0
    """Global norm above which gradients are scaled down (same unit as the gradient norm); 0: never."""

    checkpointing: bool = False
    """Whether activations are computed again in backward instead of held (yes or no)."""

    keep_zeros: bool = False
    """Whether weights that are exactly zero stay so: a pruned model, such as `pretrain` exports, stays pruned (yes or
    no). Not with LoRA, whose additions would fill the zeros."""

    evaluate_every: int = 0
    """Steps between measurements of the held-out loss (count); 0: before and after only."""

    seed: int = 0
    """Start of every stream of random numbers: order of rows, draws of blocks, dropout, adapters."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict, before any file is opened."""
        at_least(1, self, "batch", "accumulate", "steps", why="it counts things to do")
        at_least(0, self, "warmup", "evaluate_every", why="it counts steps")
        positive(self, "epochs", why="no row would be seen", do="pass a positive number, or --steps")
        positive(self, "lr", why="a step needs a positive finite learning rate", do="pass one such as 1e-5")
        at_least(0, self, "weight_decay", "clip", why="it is a finite size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(Pace):
    """A whole training run of a live model: a method and a pace."""

    method: Method
    """What trains."""

    seconds: float | None = None
    """Training time (seconds, evaluation excluded) after which the run stops at the end of a step; none: never."""

    @property
    def peak(self) -> float:
        """The peak learning rate, by default the method's own."""
        return default_lr(self.method) if self.lr is None else self.lr


@dataclass(frozen=True, kw_only=True, slots=True)
class Finetune(Pace):
    """Fine-tune a local Hugging Face causal language model on your JSONL file.

    A line of the file is {"text": …}, or {"prompt": …, "response": …}, or {"instruction": …, "input": …, "output": …},
    or {"messages": [{"role": …, "content": …}, …]}. Only responses are learnt. OUT gets model/ (with LoRA also
    adapter/), report.html, record.jsonl and checkpoints/.
    """

    model: Annotated[Positional[Path], arg(metavar="MODEL_DIR")]
    """Directory of the model and its tokenizer, as `save_pretrained` writes them."""

    data: Annotated[Positional[Path], arg(metavar="DATA.jsonl")]
    """JSONL file to learn from, UTF-8, one record per line, all of one kind."""

    out: Path = Path("runs/finetune")
    """Directory for everything this run writes."""

    method: Literal["full", "lisa", "lora"] = "lisa"
    """What trains: every parameter, sampled blocks, or low-rank additions."""

    lisa: Lisa = field(default_factory=Lisa)
    """Settings of layer sampling, used by `--method lisa`."""

    lora: Lora = field(default_factory=Lora)
    """Settings of the low-rank additions, used by `--method lora`."""

    length: int = 512
    """Tokens per row (count)."""

    packing: bool = True
    """Whether rows are filled with several records, which do not see each other (yes), or padded with one each (no)."""

    held_out: float = 0.1
    """Share of the records kept for measuring (0 to below 1); drawn by `seed`."""

    held_out_data: Path | None = None
    """JSONL file to measure on instead of a share of `data`."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of weights and arithmetic."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto: the first CUDA device, else the processor."""

    prompts: tuple[str, ...] = ()
    """Texts to continue before and after training; none: the beginnings of the first two held-out records."""

    max_new_tokens: int = 48
    """Length of each continuation (tokens); 0: none is made."""

    plan: str = "none"
    """How ranks share parameters, gradients and optimizer state: `none` is one process; `auto` measures the network
    and chooses; or three of N (every rank holds all), I (cut inside a group), G (cut over all), such as IIG. 16-bit
    weights then have 32-bit copies. Start it with torchrun; the global batch stays the same on any number of ranks."""

    groups: int | None = None
    """Groups of ranks that a slow network joins (count); none: one per machine, or those of `topology`."""

    topology: Path | None = None
    """File of `sparing probe` that says how fast the links are; none: `auto` measures them."""

    memory: str | None = None
    """Memory of a rank that `auto` must keep to, such as 80GB; none: no limit."""

    save_every: int = 100
    """Steps between checkpoints (count); 0: only when interrupted and at the end."""

    resume: bool = False
    """Whether to go on from the newest checkpoint in `out` (yes or no)."""

    overwrite: bool = False
    """Whether a run that `out` already holds may be deleted (yes or no)."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict, before any file is opened."""
        Pace.__post_init__(self)
        at_least(2, self, "length", why="a token needs one before it")
        share = 0 <= self.held_out < 1
        require(share, "held_out", self.held_out, "it is a share of the records", "pass 0 <= held_out < 1")
        at_least(0, self, "save_every", "max_new_tokens")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        check_spread(self)
        why, do = "what LoRA adds fills the zeros when it is merged", "pass --method lisa or full"
        require(not self.keep_zeros or self.method != "lora", "keep_zeros", "yes with LoRA", why, do)
        if self.method == "lisa":
            self.lisa.sampling()

    def training(self) -> Training:
        """The part that ``fit`` needs."""
        methods: dict[str, Callable[[], Method]] = {"full": Full, "lisa": self.lisa.sampling, "lora": lambda: self.lora}
        return Training(method=methods[self.method](), **{f.name: getattr(self, f.name) for f in fields(Pace)})

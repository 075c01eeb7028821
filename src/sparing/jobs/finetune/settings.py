"""Settings of a fine-tuning run, checked before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.limits import Count, CountOrZero, Group, Length, Rate, ShareBelowOne, Size
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.settings import Parallel, Saving, Steps
from sparing.layersample import Adaptive, Bernoulli, CostAware, Fixed, LayerSampling, Reshuffle, Uniform


@dataclass(frozen=True, kw_only=True)
class Full:
    """Train every parameter."""


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

    checkpointing: bool = False
    """Whether activations are computed again in backward instead of held (yes or no)."""

    keep_zeros: bool = False
    """Whether weights that are exactly zero stay so: a pruned model, such as `pretrain` exports, stays pruned (yes or
    no). Not with LoRA, whose additions would fill the zeros."""


@dataclass(frozen=True, kw_only=True)
class Training(Pace):
    """A whole training run of a live model: a method and a pace."""

    method: Method
    """What trains."""

    seconds: float | None = None
    """Training time (seconds, evaluation excluded) after which the run stops at the end of a step; none: never."""

    @property
    def peak(self) -> float:
        """The peak learning rate, by default the method's own."""
        default = 2e-5 if isinstance(self.method, Full) else 2e-4 if isinstance(self.method, Lora) else 5e-5
        return default if self.lr is None else self.lr


@dataclass(frozen=True, kw_only=True)
class Finetune(Saving, Parallel, Pace):
    """Fine-tune a local Hugging Face causal language model on your JSONL file.

    A line of the file is {"text": …}, or {"prompt": …, "response": …}, or {"instruction": …, "input": …, "output": …},
    or {"messages": [{"role": …, "content": …}, …]}. Only responses are learnt. OUT gets model/ (with LoRA also
    adapter/), report.html, record.jsonl and checkpoints/.
    """

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Folder of the model and its tokenizer, as `save_pretrained` writes them."""

    data: Annotated[Positional[Path], arg(metavar="DATA.jsonl")]
    """JSONL file to learn from, UTF-8, one record per line, all of one kind."""

    out: Path = Path("runs/finetune")

    method: Literal["full", "lisa", "lora"] = "lisa"
    """What trains: every parameter, sampled blocks, or low-rank additions."""

    lisa: Lisa = field(default_factory=Lisa)
    lora: Lora = field(default_factory=Lora)

    length: Length = 512
    """Tokens per row (count)."""

    packing: bool = True
    """Whether rows are filled with several records, which do not see each other (yes), or padded with one each (no)."""

    held_out: ShareBelowOne = 0.1
    """Share of the rows kept for measuring (0 to below 1): records, drawn by `seed`."""

    held_out_data: Path | None = None
    """JSONL file to measure on; none: a share of `data`."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of weights and arithmetic."""

    prompts: tuple[str, ...] = ()
    """Texts to continue before and after training; none: the beginnings of the first two held-out records."""

    max_new_tokens: CountOrZero = 48
    """Length of each continuation (tokens); 0: none is made."""

    def __post_init__(self) -> None:
        """Reject settings in conflict, before any file is opened."""
        super().__post_init__()
        why, do = "what LoRA adds fills the zeros when it is merged", "pass --method lisa or full"
        require(not self.keep_zeros or self.method != "lora", "keep_zeros", "yes with LoRA", why, do)
        if self.method == "lisa":
            self.lisa.sampling()

    def training(self) -> Training:
        """The part that ``fit`` needs."""
        methods: dict[str, Callable[[], Method]] = {"full": Full, "lisa": self.lisa.sampling, "lora": lambda: self.lora}
        return Training(method=methods[self.method](), **{f.name: getattr(self, f.name) for f in fields(Pace)})

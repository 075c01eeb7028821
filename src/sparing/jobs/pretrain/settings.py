"""What a person may choose about a training from scratch, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least, positive
from sparing.jobs.pretrain.choices import dynamic_of, law_of, rule_of, shares_of
from sparing.jobs.schedule import Schedule
from sparing.jobs.sharded import ALONE, check_spread
from sparing.scaling.rules import Decay, Form

RuleName = Literal["sp", "mup", "supar", "init-only", "rate-only"]
LawName = Literal["bernoulli", "exact", "fan-in", "balanced", "blocks", "2:4"]
DynamicName = Literal["none", "rigl", "set", "gmp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrain:
    """Train a GPT-2 or Llama from scratch on real text, dense or sparse, by a rule that transfers learning rates.

    The learning rate is that of a dense model of width `base_width`; the rule turns it into one per layer. OUT gets
    model/ (an ordinary transformers checkpoint), report.html, record.jsonl and checkpoints/.
    """

    out: Path = Path("runs/pretrain")
    """Directory for everything this run writes."""

    data: tuple[str, ...] = ("bryant-stories", "burgess-busterbrown", "alice")
    """Texts to learn: names of `sparing fetch`, `bundled` (ships with the package), or UTF-8 files."""

    first: int | None = None
    """Leading bytes of each text to use (count); none: all of it, of enwik8 the first 8,000,000."""

    held_out: float = 0.1
    """Share of each text, at its end, that is not learnt: half is measured along the way, half once after the end."""

    tokenizer: str = "bpe"
    """`char`: the characters of the training part; `bpe`: byte pairs learnt from it; or the directory of one."""

    vocabulary: int = 1024
    """Tokens of `bpe` (count); at least 257."""

    family: Literal["gpt2", "llama"] = "llama"
    """Architecture: GPT-2 (learned positions, biases, tied head) or Llama (rotary, gated MLP, untied head)."""

    config: Path | None = None
    """A transformers config.json, or a directory with one, in place of family, width, layers, heads and context; the
    size of its vocabulary becomes the tokenizer's."""

    width: int = 128
    """Dimensions of the residual stream (count); a multiple of `head_dim`."""

    layers: int = 4
    """Transformer blocks (count)."""

    head_dim: int = 32
    """Dimensions of a head (count); it stays the same at every width, there are width / head_dim heads."""

    kv_heads: int | None = None
    """Heads of keys and values in a Llama (count); a divisor of the heads; none: as many."""

    context: int = 128
    """Tokens of a row (count)."""

    base_width: int | None = 128
    """Width of the dense model that `lr` was tuned on (count); none: the model's own."""

    rule: RuleName = "supar"
    """Parameterization: standard, μP, SμPar, or SμPar's correction of the initial weights or of the rates alone."""

    form: Form = "rescaled"
    """Where the correction of hidden layers lies: in the weights, or in their forward pass (mask may change)."""

    base_layers: int | None = None
    """Depth of the model that `lr` was tuned on, for CompleteP (count); none: no rule for depth."""

    input_scale: float = 1.0
    """Multiplier of the embedding's output, α_input; not in `sp`."""

    output_scale: float = 1.0
    """Multiplier of the head's input before 1/width, α_output; not in `sp`."""

    density: float | str = "1/4"
    """Live share of every hidden weight: a number, a fraction, `erk:0.1` or `er:20` (spread by shape, total or ε), or
    patterns `*.mlp.*=1/8,*.attn.*=1/2`; the rest is dense."""

    masks: LawName = "fan-in"
    """Which weights live: each by its own coin, an exact count, equally many inputs per neuron (balanced: outputs
    too), blocks of 16 × 16, or two in four."""

    dynamic: DynamicName = "none"
    """How masks change: never, RigL, SET, or by pruning from dense to `density` (GMP)."""

    drop: float = 0.3
    """Share of live weights that the first exchange of RigL, or every one of SET, replaces."""

    every: int = 100
    """Optimizer steps between changes of the masks (count)."""

    until: float = 0.75
    """Share of the run after which masks stay."""

    follow: Literal["none", "density", "energy"] = "density"
    """What factors follow when masks change: nothing, the density, or the share of squared weights that is left."""

    backend: Literal["dense", "csr", "auto"] = "dense"
    """How masked layers run: as dense matrices with zeros, as compressed rows (CPU), or whichever was timed faster."""

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW, SGD with momentum, or Muon on hidden weights (masked, then set to a spectral norm of lr · √(out / in)) and
    AdamW on the rest."""

    lr: float = 3e-3
    """Peak learning rate of the base."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the means of gradient and squared gradient (per step); the first is the momentum of sgd and muon."""

    weight_decay: float = 0.1
    """Decoupled decay of matrices in the base, per step and unit of learning rate."""

    decay: Decay = "independent"
    """What stays as rates are scaled: the decay per step, the coefficient, or per step a law in width or its root."""

    schedule: Schedule = "cosine"
    """How the rate goes after warm-up: half a cosine or a line down to 0, or flat."""

    warmup: int = 50
    """Steps over which the rate rises linearly (count)."""

    clip: float = 1.0
    """Global norm above which gradients are scaled down (unit of the gradient norm); 0: never."""

    batch: int = 16
    """Rows per step (count)."""

    steps: int = 1000
    """Optimizer steps (count)."""

    seed: int = 0
    """Start of every stream of random numbers: initial weights, masks, batches, samples."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto: the first CUDA device, else the processor."""

    plan: str = "none"
    """How ranks share parameters, gradients and optimizer state: `none` is one process; `auto` measures the network
    and chooses; or three of N (every rank holds all), I (cut inside a group), G (cut over all), such as IIG. Start
    it with torchrun; the global batch stays the same on any number of ranks."""

    groups: int | None = None
    """Groups of ranks that a slow network joins (count); none: one per machine, or those of `topology`."""

    topology: Path | None = None
    """File of `sparing probe` that says how fast the links are; none: `auto` measures them."""

    memory: str | None = None
    """Memory of a rank that `auto` must keep to, such as 80GB; none: no limit."""

    eval_every: int = 100
    """Steps between measurements on held-out text (count); 0: before and after only."""

    samples: int = 2
    """Texts to write at the end (count)."""

    sample_tokens: int = 96
    """Length of each, prompt included (tokens); at most the context."""

    checkpoint_every: int = 100
    """Steps between checkpoints (count); 0: only when interrupted and at the end."""

    resume: bool = False
    """Whether to go on from the newest checkpoint in `out` (yes or no)."""

    overwrite: bool = False
    """Whether a run that `out` already holds may be deleted (yes or no)."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict, before any file is opened."""
        at_least(1, self, "layers", "head_dim", "kv_heads", "base_width", "base_layers", "first", "every")
        at_least(1, self, "batch", "steps", why="it counts things to do")
        at_least(2, self, "context", why="a token needs one before it")
        at_least(257, self, "vocabulary", why="256 bytes and an end of text come first")
        at_least(0, self, "warmup", "eval_every", "checkpoint_every", "samples")
        at_least(0, self, "weight_decay", "clip", why="it is a finite size")
        positive(self, "lr", "input_scale", "output_scale", "sample_tokens")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        check_spread(self)
        self._check_shape()
        self._check_run()

    def _check_shape(self) -> None:
        whole = self.width >= 1 and self.width % self.head_dim == 0
        require(whole, "width", self.width, f"heads have {self.head_dim} dimensions", "pass a multiple of --head-dim")
        heads = self.width // self.head_dim
        divides = self.kv_heads is None or heads % self.kv_heads == 0
        require(divides, "kv_heads", self.kv_heads, f"there are {heads} heads", "pass a divisor of width / head_dim")
        llama = self.kv_heads is None or self.family == "llama"
        require(llama, "kv_heads", self.kv_heads, "GPT-2 has no shared keys and values", "pass --family llama")
        named = bool(self.data) and all(self.data)
        require(named, "data", self.data, "there is nothing to learn", "name a text or a file")

    def _check_run(self) -> None:
        share = 0 < self.held_out < 1
        require(share, "held_out", self.held_out, "it is a share of each text", "pass 0 < held_out < 1")
        fits = self.warmup < self.steps
        require(fits, "warmup", self.warmup, f"the run has {self.steps} steps", "pass a smaller --warmup")
        dense = self.dynamic != "gmp" or self.backend == "dense"
        require(dense, "backend", self.backend, "gmp begins dense", "pass --backend dense")
        if self.optimizer == "muon":
            why = "muon steps matrices, and compressed rows are none"
            require(self.backend == "dense", "backend", self.backend, why, "pass --backend dense")
            still = self.dynamic in {"none", "rigl", "set"} and (self.dynamic == "none" or self.follow != "energy")
            why = "factors of muon's groups cannot follow masks"
            require(still, "dynamic", self.dynamic, why, "pass rigl or set with --follow density, or --optimizer adamw")
        if self.plan != ALONE:
            self._check_plan()
        means = all(0 <= beta < 1 for beta in self.betas)
        require(means, "betas", self.betas, "they decay means", "pass numbers in [0, 1)")
        shares_of(self.density)
        rule_of(self)
        law_of(self.masks)
        dynamic_of(self)

    def _check_plan(self) -> None:
        still, do = self.dynamic == "none", "pass --dynamic none, or omit --plan"
        require(still, "dynamic", self.dynamic, "moving masks need whole weights, and a rank has slices", do)
        dense, do = self.backend == "dense", "pass --backend dense, or omit --plan"
        require(dense, "backend", self.backend, "slices of compressed rows are not known", do)
        apart, do = self.optimizer != "muon", "pass --optimizer adamw, or omit --plan"
        require(apart, "optimizer", self.optimizer, "it steps whole matrices, and a rank has slices", do)

"""What a person may choose about a training from scratch, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from sparing.errors import require
from sparing.jobs.hub import OnHub
from sparing.jobs.limits import AtLeast, Count, CountOrZero, Length, Rate, Share, ShareBelowOne, Size, SizeOrZero
from sparing.jobs.settings import FromHub, MaskUpdates, Parallel, RuleName, Saving, Scaled, Steps

LanguageFamily = Literal["gpt2", "llama"]
LawName = Literal["bernoulli", "exact", "fan-in", "balanced", "blocks", "2:4"]


@dataclass(frozen=True, kw_only=True)
class Updates(MaskUpdates):
    """When masks change, used by `--dynamic rigl`, `set` and `gmp`."""

    share: Share = 0.3
    """Share of live weights that the first exchange of RigL, or every one of SET, replaces."""

    until: Share = 0.75
    """Share of the run after which masks stay."""


@dataclass(frozen=True, kw_only=True)
class Pretrain(Saving, Parallel, Steps, Scaled, FromHub):
    """Train a GPT-2 or Llama from scratch on real text, dense or sparse, by a rule that transfers learning rates.

    The learning rate is that of a dense model of width `base_width`; the rule turns it into one per layer. OUT gets
    model/ (an ordinary transformers checkpoint), report.html, record.jsonl and checkpoints/.
    """

    out: Path = Path("runs/pretrain")

    data: tuple[str, ...] = ("bryant-stories", "burgess-busterbrown", "alice")
    """Texts to learn: names of `sparing fetch`, `bundled` (ships with the package), or UTF-8 files."""

    first: Count | None = None
    """Leading bytes of each text to use (count); none: all of it, of enwik8 the first 8,000,000."""

    held_out: ShareBelowOne = 0.1
    """Share of the rows kept for measuring (0 to below 1), at the end of each text: half is measured along the way,
    half once after the end."""

    tokenizer: Annotated[str, OnHub("tokenizer")] = "bpe"
    """`char`: the characters of the training part; `bpe`: byte pairs learnt from it; or the directory of one, or the
    name of a model on the Hugging Face hub that has one, OWNER/NAME."""

    vocabulary: Annotated[int, AtLeast(257, "256 bytes and an end of text come first")] = 1024
    """Tokens of `bpe` (count); at least 257."""

    family: LanguageFamily = "llama"
    """Architecture: GPT-2 (learned positions, biases, tied head) or Llama (rotary, gated MLP, untied head)."""

    model_config: Path | None = None
    """A transformers config.json, or a directory with one, in place of family, width, layers, heads and length;
    the size of its vocabulary becomes the tokenizer's; none: those settings."""

    width: int = 128
    """Width of the net (count): dimensions of the residual stream; a multiple of `head_dim`."""

    layers: Count = 4

    head_dim: Count = 32
    """Dimensions of a head (count); it stays the same at every width, there are width / head_dim heads."""

    kv_heads: Count | None = None
    """Heads of keys and values in a Llama (count); a divisor of the heads; none: as many."""

    length: Length = 128
    """Tokens per row (count)."""

    base_width: Count | None = 128

    rule: RuleName = "supar"
    """Parameterization: standard, μP, SμPar, or SμPar's correction of the initial weights or of the rates alone."""

    form: Literal["rescaled", "shifted"] = "rescaled"
    """Where the correction of hidden layers lies: in the weights, or in their forward pass (mask may change)."""

    base_layers: Count | None = None
    """Depth of the model that `lr` was tuned on, for CompleteP (count); none: no rule for depth."""

    input_scale: Size = 1.0
    """Multiplier of the embedding's output, α_input."""

    output_scale: Size = 1.0
    """Multiplier of the head's input, α_output; 1/width comes on top, but in `sp`."""

    density: float | str = "1/4"
    """Live share of every hidden weight (0 to 1): a number, a fraction, `erk:0.1` or `er:20` (spread by shape, total or
    ε), or patterns `*.mlp.*=1/8,*.attn.*=1/2`; the rest is dense."""

    masks: LawName = "fan-in"
    """Which weights live: each by its own coin, an exact count, equally many inputs per neuron (balanced: outputs
    too), blocks of 16 × 16, or two in four."""

    mask_updates: Updates = field(default_factory=Updates)

    follow: Literal["none", "density", "energy"] = "density"
    """What factors follow when masks change: nothing, the density, or the share of squared weights that is left."""

    backend: Literal["dense", "csr", "auto"] = "dense"
    """How masked layers run: as dense matrices with zeros, as compressed rows (CPU), or whichever was timed faster."""

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer: AdamW, SGD with momentum, or Muon on hidden weights (masked, then set to a spectral norm of
    lr · √(out / in)) and AdamW on the rest."""

    steps: Count = 1000
    batch: Count = 16
    lr: Rate = 3e-3
    warmup: CountOrZero = 50
    weight_decay: SizeOrZero = 0.1
    """Weight decay λ: of matrices alone, per step and unit of learning rate; decoupled, but of sgd added to the
    gradient, where momentum makes it 1 / (1 − momentum) times as strong."""

    evaluate_every: CountOrZero = 100

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """Decay of the means of gradient and squared gradient (per step); the first is the momentum of sgd and muon."""

    control: bool = True
    """Whether the model is also trained without its blocks, by as many steps, to tell what they learn (yes or no)."""

    samples: CountOrZero = 2
    """Texts to write at the end (count)."""

    sample_tokens: Count = 96
    """Length of each, prompt included (tokens); at most `length`."""

    def __post_init__(self) -> None:
        """Reject settings in conflict, before any file is opened."""
        super().__post_init__()
        whole = self.width >= 1 and self.width % self.head_dim == 0
        require(whole, "width", self.width, f"heads have {self.head_dim} dimensions", "pass a multiple of --head-dim")
        self.local.check_multiple("evaluate_every", self.evaluate_every)
        heads, kv, apart = self.width // self.head_dim, self.kv_heads, "omit --plan"
        planned, muon, moving = self.plan != "none", self.optimizer == "muon", self.dynamic != "none"
        follows = moving and (self.dynamic == "gmp" or self.follow == "energy")
        factors = "pass rigl or set with --follow density, or --optimizer adamw"
        # What must not be, which setting to blame, why, and what to do instead.
        for wrong, name, why, do in (
            (kv is not None and heads % kv, "kv_heads", f"there are {heads} heads",
             "pass a divisor of width / head_dim"),
            (kv is not None and self.family != "llama", "kv_heads", "GPT-2 has no shared keys and values",
             "pass --family llama"),
            (not (self.data and all(self.data)), "data", "there is nothing to learn", "name a text or a file"),
            (self.held_out <= 0, "held_out", "the losses are those on held-out text", "pass a share above 0"),
            (self.warmup >= self.steps, "warmup", f"the run has {self.steps} steps", "pass a smaller --warmup"),
            (self.dynamic == "gmp" and self.backend != "dense", "backend", "gmp begins dense", "pass --backend dense"),
            (muon and self.backend != "dense", "backend", "muon steps matrices, and compressed rows are none",
             "pass --backend dense"),
            (muon and follows, "dynamic", "factors of muon's groups cannot follow masks", factors),
            (planned and moving, "dynamic", "moving masks need whole weights, and a rank has slices",
             f"pass --dynamic none, or {apart}"),
            (planned and self.backend != "dense", "backend", "slices of compressed rows are not known",
             f"pass --backend dense, or {apart}"),
            (planned and muon, "optimizer", "it steps whole matrices, and a rank has slices",
             f"pass --optimizer adamw, or {apart}"),
        ):  # fmt: skip
            require(not wrong, name, getattr(self, name), why, do)
        # here, because it loads torch, which help need not wait for
        from sparing.jobs.pretrain.choices import dynamic_of, law_of, rule_of, shares_of

        shares_of(self.density)
        rule_of(self)
        law_of(self.masks)
        dynamic_of(self)

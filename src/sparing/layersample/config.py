"""Settings of layer sampling."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, get_args

from sparing.errors import require
from sparing.layersample.draws import Adaptive, Bernoulli, CostAware, Draw, Fixed, Ordered, Reshuffle, Uniform
from sparing.layersample.importance import Importance

Units = Literal["block", "module"]  # what is drawn: whole body blocks, or each weight matrix of them
Order = Literal["random", "ascending", "descending"]  # in which BAdam goes through the blocks
Frozen = Literal["nf4", "int8"]  # how the weights of frozen blocks are stored, other than as they are
StatePolicy = Literal["reset", "keep", "offload", "reset_all"]  # what happens to optimizer state when blocks change


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSampling:
    """Which blocks train, and for how long.

    Example:
        >>> LayerSampling(active=2, period=20).describe()["sampler"]
        {'name': 'Uniform'}

    Source: Pan et al. 2024, Algorithm 1 (arXiv:2403.17919), where γ is ``active`` and K is ``period``.
    """

    active: int = 2
    """Body blocks trained at once (count), γ; 0 trains only the roles that are always on."""

    period: int = 20
    """Optimizer steps between draws (count), K; gradient accumulation does not count."""

    embed: bool = True
    """Always train the embedding (E); False lets the backward pass stop at the lowest active block."""

    head: bool = True
    """Always train the output head (H)."""

    tail: bool = True
    """Always train what lies between body and head: the final norm."""

    state: StatePolicy = "reset"
    """Optimizer state of a block that leaves: drop it ("reset"), leave it on the device ("keep"), move it to pinned
    host memory ("offload"), or drop all state, also that of the always-on roles, at every draw ("reset_all", the
    paper's runs)."""

    sampler: Draw = field(default_factory=Uniform)
    """Rule that picks the blocks of an interval."""

    warmup: int = 0
    """Steps of linear learning-rate warm-up at the start of each interval (count), at most ``period``; 0 is none."""

    masters: bool = False
    """Keep fp32 masters of the active half-precision parameters; steps below half a unit in the last place then
    count."""

    frozen: Frozen | None = None
    """How the weights of linear layers of frozen blocks are stored on the device: "nf4" (4.25 bits each in a 16-bit
    model), "int8" (8.25), or as they are (None). Needs bitsandbytes."""

    exact: bool = True
    """With ``frozen``, keep the exact weights of frozen blocks in host memory: a drawn block starts from them, and
    ``close`` gives them back; on a CPU that saves nothing. False rounds a block whenever it leaves, each weight at
    random to one of the two nearest values, so that its mean is unchanged."""

    body: str | tuple[str, ...] | None = None
    """Path of the list of body blocks, or several paths of blocks and lists; None finds them, an encoder's too."""

    no_grad_prefix: bool = True
    """Run what lies below the lowest trained block without recording a graph, when the embedding is frozen."""

    units: Units = "block"
    """What is drawn: whole body blocks ("block"), or each weight matrix of them ("module": query, key, up, …). Norms
    and biases of body blocks then stay frozen, and `active` counts matrices."""

    budget: float | None = None
    """Largest share of the model's parameters drawn at once (0 to 1), δ; in place of `active`, which must be 0, for
    samplers that fill a budget (`Importance`)."""

    probe: int = 0
    """Steps at the start that train nothing and score every unit by its gradients (count), for samplers that use
    scores. Gradients are measured as they come and dropped; over several backward passes of a step norms add up. Not
    with a gradient scaler (fp16), which finds none to scale."""

    momentum_step: bool = False
    """Take one more step along the momentum of whatever loses its optimizer state at the end of an interval:
    ``θ ← θ − α·β₁/(1 − β₁)·m/√(v + ε)``. For Adam and AdamW."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range, unknown choices, and settings under which nothing would train."""
        for name, least in (("active", 0), ("period", 1), ("warmup", 0)):
            value = getattr(self, name)
            counts = isinstance(value, int) and not isinstance(value, bool) and value >= least
            require(counts, f"LayerSampling.{name}", value, "it is a count", f"pass an integer >= {least}")
        period, policies = self.period, get_args(StatePolicy)
        why, do = f"an interval has {period} steps", f"pass warmup <= {period}"
        require(self.warmup <= period, "LayerSampling.warmup", self.warmup, why, do)
        do = f"pass one of {', '.join(policies)}"
        require(self.state in policies, "LayerSampling.state", self.state, "no such policy", do)
        do = f"pass None or one of {', '.join(get_args(Frozen))}"
        known = self.frozen is None or self.frozen in get_args(Frozen)
        require(known, "LayerSampling.frozen", self.frozen, "no such number format", do)
        do = "pass a value such as Uniform() or Reshuffle()"
        require(
            isinstance(self.sampler, Draw), "LayerSampling.sampler", self.sampler, "it has no draw and inclusion", do
        )
        self._check_units()
        always = self.embed or self.head or self.tail
        draws = (self.active > 0 or self.budget is not None) and not isinstance(self.sampler, Bernoulli)
        got, why = "embed, head and tail all False", "an interval could train nothing"
        do = "keep one of them, or draw exactly active >= 1 blocks"
        require(always or draws, "LayerSampling", got, why, do)
        got, why = "CostAware with embed=True", "a trained embedding makes every block cost the same"
        uneven = not (self.embed and isinstance(self.sampler, CostAware))
        require(uneven, "LayerSampling.sampler", got, why, "pass embed=False, or sampler=Adaptive()")

    def _check_units(self) -> None:
        """Refuse what is not drawn, not scored or not dropped under these settings."""
        what, kinds, draw = "LayerSampling", get_args(Units), type(self.sampler).__name__
        require(self.units in kinds, f"{what}.units", self.units, "no such unit", f"pass one of {', '.join(kinds)}")
        fills, budget = getattr(self.sampler, "fills_budget", False), self.budget
        why, do = f"{draw} {'fills a budget' if fills else 'draws a count'}", "give Importance() and no other a budget"
        require(fills == (budget is not None), f"{what}.budget", budget, why, do)
        share = budget is None or 0.0 < budget <= 1.0
        require(share, f"{what}.budget", budget, "it is a share of the parameters", "pass a number above 0, at most 1")
        counted = budget is None or self.active == 0
        require(
            counted, f"{what}.active", self.active, "the budget says how much is drawn", "pass active=0 with a budget"
        )
        counts = isinstance(self.probe, int) and not isinstance(self.probe, bool) and self.probe >= 0
        require(counts, f"{what}.probe", self.probe, "it is a count", "pass an integer >= 0")
        scored = (
            getattr(self.sampler, "needs_scores", False) and getattr(self.sampler, "signal", "gradient") == "gradient"
        )
        why, do = f"{draw} uses no scores of gradients", "pass probe=0, or sampler=Adaptive()"
        require(scored or not self.probe, f"{what}.probe", self.probe, why, do)
        plain = self.units == "block" and not self.probe
        why, do = "blocks rest as a whole, and a probe asks all of them for gradients", "pass frozen=None"
        require(self.frozen is None or plain, f"{what}.frozen", self.frozen, why, do)
        dropped = self.state in {"reset", "reset_all"} or not self.momentum_step
        why, do = f"state={self.state!r} keeps the momentum", "pass state='reset' or 'reset_all'"
        require(dropped, f"{what}.momentum_step", self.momentum_step, why, do)

    @classmethod
    def badam(cls, *, order: Order | int = "random", period: int = 50, **others: Any) -> Self:
        """BAdam: one block at a time, with Adam restarted on each, in fp32 where the model is not.

        For each block i of the order, with m = v = 0 and t = 1 … K: ``m ← β₁m + (1 − β₁)g_i``,
        ``v ← β₂v + (1 − β₂)g_i²``, ``θ_i ← θ_i − α·(m/(1 − β₁ᵗ))/(√(v/(1 − β₂ᵗ)) + ε)``. Use ``torch.optim.Adam``, or
        AdamW for decoupled decay.

        Embedding, head and final norm stay frozen. The ``badam`` package 1.4 differs in one point: its first block
        trains K − 1 steps.

        Args:
            order: A new random order in each round, upwards, downwards, or the index of the only block that trains.
            period: Steps on each block (count), K; the package has 50.
            others: Settings that replace the preset's.

        Returns:
            The settings.

        Source: Luo et al. 2024, Algorithm 1 (arXiv:2404.02827).

        Example:
            >>> LayerSampling.badam(order="ascending").sampler
            Ordered(descending=False)
        """
        named = {"random": Reshuffle(), "ascending": Ordered(), "descending": Ordered(descending=True)}
        one = isinstance(order, int) and not isinstance(order, bool)
        why, do = "no such order", f"pass one of {', '.join(named)}, or a block's index"
        require(one or order in named, "LayerSampling.badam", order, why, do)
        sampler = Fixed(blocks=(order,)) if isinstance(order, int) else named[order]
        preset = {"active": 1, "sampler": sampler, "state": "reset_all", "masters": True}
        return cls(**_ALONE | preset | {"period": period} | others)

    @classmethod
    def grass(
        cls, *, active: int = 2, period: int = 25, probe: int = 20, temperature: float = 1.0, decay: float = 0.5,
        **others: Any,
    ) -> Self:  # fmt: skip
        """GRASS: γ blocks drawn by the size of their gradients, state in host memory.

        ``m_l = mean_t √(‖g_l,t‖²/n_l)`` over the steps of an interval, for the n_l parameters of block l;
        ``p_l = exp(m_l/τ)/Σ exp(m/τ)``; a block that trained moves to ``(1 − β)·m_l + β·m_l,before``, the paper's α
        being 1 − β, and the others keep theirs. The first ``probe`` steps score all blocks and train none.

        Left open by the paper, and decided here: embedding, head and final norm stay frozen; chances are refreshed at
        each draw; a set of γ blocks has exactly p as inclusion probabilities (γ·p, none above 1); τ is in units of the
        mean score (``sampler=Adaptive(relative=False, …)`` takes it as written). Length of the probe, τ and β are ours.

        Args:
            active: Blocks trained at once (count), γ.
            period: Steps between draws (count), T_s; 25 to 50 did best there.
            probe: Steps of the probe (count), T_p; activations are then those of full fine-tuning.
            temperature: Temperature τ, in units of the mean score.
            decay: Weight β of the old score, in [0, 1).
            others: Settings that replace the preset's.

        Returns:
            The settings.

        Source: Tian et al. 2026 (arXiv:2604.07808).
        """
        sampler = Adaptive(temperature=temperature, decay=decay, floor=0.0)
        preset = {"active": active, "period": period, "probe": probe, "sampler": sampler, "state": "offload"}
        return cls(**_ALONE | preset | others)

    @classmethod
    def misa(
        cls, *, budget: float = 0.03, period: int = 50, eta: float = 1.0, decay: float = 0.8, **others: Any
    ) -> Self:
        """MISA: weight matrices drawn by importance until δ of the parameters train.

        Chances and scores are those of :class:`Importance`. Norms, biases, embedding and head stay frozen. State is
        dropped at each draw; pass ``momentum_step=True`` for the step before that, which the proof needs and the
        released code does not take. The last interval of a run gets none. The proof's largest second moment
        (AMSGrad's) is left to the optimizer: ``torch.optim.Adam(amsgrad=True)`` keeps it per element.

        Args:
            budget: Largest share of the model's parameters drawn at once, δ.
            period: Steps between draws (count), T.
            eta: Weight of importance against evenness, η.
            decay: Weight β of the old importance, in [0, 1).
            others: Settings that replace the preset's.

        Returns:
            The settings.

        Source: Liu et al. 2025, Algorithm 1 (arXiv:2511.00056).
        """
        sampler = Importance(eta=eta, decay=decay)
        preset = {"units": "module", "active": 0, "budget": budget, "sampler": sampler, "state": "reset_all"}
        return cls(**_ALONE | preset | {"period": period, "masters": True} | others)

    def interval_of(self, step: int) -> tuple[int, int]:
        """Index of the interval that a step is in, −1 while probing, and the step's place in it."""
        return (-1, step) if step < self.probe else divmod(step - self.probe, self.period)

    def validate_for(self, count: int) -> None:
        """Check the settings against a model of ``count`` body blocks.

        Args:
            count: Body blocks of the model, N.

        Raises:
            UserError: If more blocks are to be active than there are, or the sampler does not fit the model.
        """
        why = f"the model has only {count} body blocks"
        require(self.active <= count, "active", self.active, why, f"pass active <= {count}")
        if count and self.budget is None:
            self.sampler.inclusion(count, self.active)

    def describe(self) -> dict[str, Any]:
        """Give the settings as plain JSON values; equal descriptions mean equal training."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "sampler"}
        sampler: dict[str, Any] = {"name": type(self.sampler).__name__}
        if is_dataclass(self.sampler):
            sampler |= {f.name: _plain(getattr(self.sampler, f.name)) for f in fields(self.sampler)}
        return plain | {"sampler": sampler}


_ALONE: dict[str, Any] = {"embed": False, "head": False, "tail": False}  # of the body alone, as in these papers


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON reads them back."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value

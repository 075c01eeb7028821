"""Settings of layer sampling."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

from sparing.errors import require
from sparing.layersample.draws import Bernoulli, CostAware, Draw, Uniform

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
    """Train the embedding always (E); False lets the backward pass stop at the lowest active block."""

    head: bool = True
    """Train the output head always (H)."""

    tail: bool = True
    """Train what stands between body and head always: the final norm."""

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

    body: str | tuple[str, ...] | None = None
    """Path of the list of body blocks, or several paths of blocks and lists; None finds them, an encoder's too."""

    no_grad_prefix: bool = True
    """Run what lies below the lowest trained block without recording a graph, when the embedding is frozen."""

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
        do = "pass a value such as Uniform() or Reshuffle()"
        require(
            isinstance(self.sampler, Draw), "LayerSampling.sampler", self.sampler, "it has no draw and inclusion", do
        )
        always = self.embed or self.head or self.tail
        draws = self.active > 0 and not isinstance(self.sampler, Bernoulli)
        got, why = "embed, head and tail all False", "an interval could train nothing"
        do = "keep one of them, or draw exactly active >= 1 blocks"
        require(always or draws, "LayerSampling", got, why, do)
        got, why = "CostAware with embed=True", "a trained embedding makes every block cost the same"
        uneven = not (self.embed and isinstance(self.sampler, CostAware))
        require(uneven, "LayerSampling.sampler", got, why, "pass embed=False, or sampler=Adaptive()")

    def validate_for(self, count: int) -> None:
        """Hold the settings against a model of ``count`` body blocks.

        Args:
            count: Body blocks of the model, N.

        Raises:
            UserError: If more blocks shall be active than there are, or the sampler does not fit the model.
        """
        why = f"the model has only {count} body blocks"
        require(self.active <= count, "active", self.active, why, f"pass active <= {count}")
        if count:
            self.sampler.inclusion(count, self.active)

    def describe(self) -> dict[str, Any]:
        """Give the settings as plain JSON values; equal descriptions mean equal training."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "sampler"}
        sampler: dict[str, Any] = {"name": type(self.sampler).__name__}
        if is_dataclass(self.sampler):
            sampler |= {f.name: _plain(getattr(self.sampler, f.name)) for f in fields(self.sampler)}
        return plain | {"sampler": sampler}


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON reads them back."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value

"""Freezes and thaws the blocks of a model while a training loop, ours or any other, trains it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparing.blocks import Block, named_parameters, submodule
from sparing.layersample import checks, ranks
from sparing.layersample.config import LayerSampling
from sparing.layersample.guard import Guard
from sparing.layersample.lowbit import RestingBlocks
from sparing.layersample.masters import Masters
from sparing.layersample.momentum import MomentumStep
from sparing.layersample.parts import Unit, parts_of, units_of
from sparing.layersample.probes import GradientProbe, Probe, probe_for, updated
from sparing.layersample.rates import ScaledRate, warmup_factor
from sparing.layersample.state import StateStore, named_state, pack, put_, unpack
from sparing.layersample.truncate import Prefix

# A new sampler closes live ones that share a parameter with it: blocks they froze would look frozen by the user.
_live: weakref.WeakSet[Sampler] = weakref.WeakSet()


class Sampler:
    """Trains a few body blocks at a time: LISA in your own loop.

    Build the optimizer from all parameters first, then the sampler, which freezes everything but the roles that are
    always on. ``begin_step`` thaws the blocks of the step's interval. Parameters that did not require gradients when
    the sampler was built stay frozen throughout; a block that was frozen entirely may still be drawn and then trains
    nothing. Blocks of an encoder are drawn like those of its decoder; vision and audio towers of a multimodal Hugging
    Face model and their projectors stay frozen unless ``body`` names their blocks. ``close``, or leaving a ``with``
    block in any way, restores ``requires_grad`` of every parameter.

    With ``LayerSampling(frozen="nf4")`` the linear layers of frozen blocks are stored in 4 bits (QLISA). Their
    ``weight`` is then the same parameter without data, all NaN; ``model.state_dict()`` and ``save_pretrained`` see
    ordinary weights, and ``state_dict`` of the sampler holds those of blocks that trained.

    Frozen parameters have no gradient, so optimizers skip them: they get no weight decay either.

    Source: Pan et al. 2024, Algorithm 1 (arXiv:2403.17919).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: LayerSampling | None = None,
        *,
        seed: int = 0,
        group: Any = None,
    ) -> None:
        """Check, and freeze.

        Args:
            model: Any model with repeated blocks; sharded by ``fully_shard`` or not, adapted by peft or not.
            optimizer: Holds every parameter that may become active.
            settings: Which blocks train, and for how long.
            seed: Seed of the draws; the same on every rank.
            group: Processes that must draw the same blocks; None is all.
        """
        self.model, self.settings, self.seed = model, settings or LayerSampling(), seed
        checks.check_wrapper(model)
        self.optimizer = checks.plain_optimizer(optimizer)
        checks.check_state(self.optimizer, self.settings.state)
        params = set(model.parameters())
        for other in list(_live):
            if not params.isdisjoint(other.model.parameters()):
                other.close()
        blocks, self._frozen = parts_of(model, self.settings.body)
        checks.check_blocks(model, blocks, self.settings)
        self.body: tuple[Block, ...] = tuple(b for b in blocks if b.role == "body")
        self._outside = [b for b in blocks if b.role != "body"]
        self.units: tuple[Unit, ...] = tuple(units_of(model, self.body, matrices=self.settings.units == "module"))
        """What is drawn: the body blocks, or their weight matrices."""
        self._shares = checks.check_units(model, self.units, self.settings)
        self._group = group
        self._sort_parameters()
        checks.check_optimizer(self._may_train, self.optimizer)
        self.active: tuple[int, ...] = ()
        """Units that train now, sorted indices; in a probe phase all, and then none is changed."""
        self.interval: int | None = None
        """Index of the interval, −1 in a probe phase, None before the first ``begin_step``."""
        self.step = 0
        """Optimizer step last begun (count)."""
        self.scores: Tensor | None = None
        """Running score of each unit, for samplers that use one; NaN where nothing was seen."""
        self.history: list[tuple[int, int, tuple[int, ...]]] = []
        """One row per draw: first step, interval, blocks."""
        self.closed = False
        self._attach_()

    def _sort_parameters(self) -> None:
        """Divide the parameters into always trained, never trained, and those of each block."""
        on = {"embed": self.settings.embed, "tail": self.settings.tail, "head": self.settings.head}
        self._block_params = [unit.params for unit in self.units]
        drawn = {n for params in self._block_params for n in params}
        rest = _trainable(b.params for b in (*self._outside, *self.body))
        kept = _trainable(b.params for b in self._outside if on[b.role])
        self._always = {n: p for n, p in kept.items() if n not in self._frozen}
        self._never = {n: p for n, p in rest.items() if n not in self._always and n not in drawn}
        joined = _trainable([self._always, *self._block_params])
        self._may_train = {n: joined[n] for n in named_parameters(self.model) if n in joined}

    def _attach_(self) -> None:
        """Hook into model and optimizer, or leave both as they were."""
        flags = [(p, p.requires_grad) for p in (*self._may_train.values(), *self._never.values())]
        try:
            self._make_parts_()
            # a resumed optimizer's state of all blocks stays until the first draw says which of them train
            self._activate_((), evict=False)
        except BaseException:
            # hooks of a sampler that nobody has would refuse every later step
            _restore_(flags, self._parts())
            raise
        self._restore = weakref.finalize(self, _restore_, flags, self._parts())
        self._restore.atexit = False  # at exit, modules that the hooks need may be gone
        _live.add(self)

    def _parts(self) -> list[Any]:
        """What was made so far, in the order in which it is closed."""
        names = ("_masters", "_rate", "_momentum", "_probe", "guard", "_prefix", "_store", "_resting")
        return [vars(self).get(name) for name in names]

    def _make_parts_(self) -> None:
        blocks, modules = [submodule(self.model, b.name) for b in self.body], [unit.module for unit in self.units]
        embedding = next((b.params for b in self._outside if b.role == "embed"), {})
        truncates = self.settings.no_grad_prefix and not self._always.keys() & embedding.keys()
        self._prefix = Prefix(self.model, blocks if truncates else [])
        names = {p: name for name, p in self._may_train.items()}
        self._sharded = checks.sharded_modules(self.model)
        # outer modules come first: the innermost around a parameter shards it
        self._sharded_by = {p: module for module in self._sharded for p in module.parameters()}
        plain = partial(ranks.assert_averaged, group=self._group)
        # fully_shard averages gradients itself, and each process holds another part of them
        averaged = (lambda params: None) if self._sharded else plain
        self.guard = Guard(self.optimizer, modules, self._block_params, averaged)
        """Refuses the optimizer's step where the loop trains something else than was drawn."""
        self._store = StateStore(self.optimizer, self.settings.state)
        self._masters = Masters(self.optimizer, names, self._store.offload) if self.settings.masters else None
        self._momentum = MomentumStep(self.optimizer, self._masters) if self.settings.momentum_step else None
        self._rate = ScaledRate(self.optimizer, _weakly(self._warmup)) if self.settings.warmup else None
        self._resting = self._rest_()
        self._probe: Probe | None = probe_for(self.settings.sampler, self.optimizer, self._block_params, modules)

    def _rest_(self) -> RestingBlocks | None:
        """Quantise the blocks, which are all frozen before the first draw."""
        settings = self.settings
        if settings.frozen is None:
            return None
        checks.check_plain(self.model)
        exact, seed = settings.exact, self.seed
        return RestingBlocks(self.model, self.body, self._block_params, settings.frozen, exact=exact, seed=seed)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """What trains now, by canonical name, in the model's own order."""
        drawn = {name for i in self.active for name in self._block_params[i]}
        return {n: p for n, p in self._may_train.items() if n in drawn or n in self._always}

    def begin_step(self, step: int) -> None:
        """Announce the next optimizer step; call before its first forward pass.

        Blocks change only when the step is in another interval than the last one, so the call may be repeated for every
        micro-batch. Any step may come first: the blocks follow from seed and step (and, for samplers that learn, from
        ``load_state_dict``).

        Args:
            step: Index of the optimizer step, from 0.
        """
        checks.check_open(closed=self.closed)
        checks.check_step(step)
        self.guard.begin_step(step)
        if self._probe is not None and step != self.step:
            self._probe.end_step()
        # a step that raised left its masters and scaled rates in place
        for part in (self._masters, self._rate):
            if part is not None:
                part.put_back_()
        self._prefix.disable_input_gradients_()
        interval, _ = self.settings.interval_of(step)
        if interval != self.interval:
            self._switch_(interval, step)
        self.step = step
        self.guard.note_weights()

    def _switch_(self, interval: int, step: int) -> None:
        checks.check_gradients(self._may_train.values(), self.guard.used)
        checks.check_known(self.model, self._may_train | self._never, replaced=not self._sharded)
        if self._probe is not None:
            draw: Any = self.settings.sampler
            seen = ranks.mean_over_ranks(self._probe.mean.take(), self._group)
            self.scores = updated(self.scores, seen, draw.decay, getattr(draw, "start", math.nan))
        drawn = self._draw(interval) if interval >= 0 else tuple(range(len(self.units)))
        resumed_inside = self.interval is None and self.settings.interval_of(step)[1]
        # a run resumed in the middle of an interval goes on with the state that its interval had
        clears = self.settings.state == "reset_all" and not resumed_inside
        if self._momentum is not None:
            staying = {n for i in drawn for n in self._block_params[i]} | self._always.keys()
            self._momentum.apply_({n: p for n, p in self._may_train.items() if clears or n not in staying})
        if clears:
            self._store.clear_()
        self._activate_(drawn)
        self._drop_gradients_(while_probing=interval < 0)
        self.interval = interval
        self.history.append((step, interval, drawn))

    def _drop_gradients_(self, *, while_probing: bool) -> None:
        if isinstance(self._probe, GradientProbe):
            self._probe.drop_gradients_(self.trainable.values() if while_probing else ())

    def _draw(self, interval: int) -> tuple[int, ...]:
        settings, count = self.settings, len(self.units)
        known: dict[str, Any] = {"seed": self.seed, "interval": interval, "scores": self.scores}
        if settings.budget is not None:
            known |= {"shares": self._shares, "budget": settings.budget}
        drawn = settings.sampler.draw(count, settings.active, **known)
        assert list(drawn) == sorted(set(drawn)), drawn
        assert set(drawn) <= set(range(count)), (drawn, count)
        ranks.assert_agreed((drawn, interval, self.seed, settings.describe()), drawn, self._group)
        return tuple(drawn)

    def _activate_(self, drawn: tuple[int, ...], *, evict: bool = True) -> None:
        entering = _trainable((self._block_params[i] for i in drawn), flagged=False)
        leaving = {n: p for n, p in (self._may_train | self._never).items() if n not in entering | self._always}
        for p in leaving.values():
            p.requires_grad_(False)
            p.grad = None
        if evict:
            self._store.evict_(leaving)
            if self._masters is not None:
                self._masters.evict_(leaving, self.settings.state)
        if self._resting is not None:
            self._resting.set_(drawn, -1 if self.interval is None else self.interval)
        for p in entering.values():
            p.requires_grad_(True)
        # after the leaving state is freed, so that both are never on the device at once
        if self._masters is not None:
            self._masters.restore_(entering)
        self._store.restore_(entering)
        depths = (self.units[i].depth for i in drawn if self._block_params[i])
        self._prefix.set_(min(depths, default=len(self.body)))
        thawed = dict.fromkeys(self._sharded_by[p] for p in entering.values() if p in self._sharded_by)
        ranks.refresh_mixed_precision_(thawed)  # after the flags are set: it reads them
        self.active = drawn
        self.guard.set_trained(self.trainable, leaving, drawn)

    def _warmup(self) -> float:
        return warmup_factor(self.settings.interval_of(self.step)[1], self.settings.warmup)

    def all_reduce_gradients(self) -> None:
        """Average the gradients of what trains over the processes; call before each optimizer step, on every rank.

        This is data parallelism without ``DistributedDataParallel``: frozen blocks send nothing and have no buffer.
        """
        ranks.all_reduce_gradients(self.trainable, self._group)

    def state_dict(self, *, optimizer: bool = False) -> dict[str, Any]:
        """Everything a resumed run needs besides the weights and, unless asked for, the optimizer's state.

        Call between two optimizer steps.

        Args:
            optimizer: Add the optimizer's state, by parameter name. The state of parameters that have masters is
                always there: ``optimizer.load_state_dict`` would round it.

        Returns:
            Plain JSON values, and under ``"tensors"`` live tensors by ``kind/parameter name/value``, ready for
            safetensors (``write_state`` puts both in one file).
        """
        if self._probe is not None:
            self._probe.end_step()
        self._store.offload.copies.finish()
        hosted, plain = pack(self._store.hosted, "hosted")
        masters = self._masters.weights if self._masters is not None else {}
        kept = {n: p for n, p in (self._may_train | self._never).items() if optimizer or n in masters}
        states, more = pack(named_state(self.optimizer, kept), "state")
        weights = self._resting.weights() if self._resting is not None else {}
        return {
            "settings": self.settings.describe(),
            "seed": self.seed,
            "blocks": len(self.units),
            "step": self.step,
            "interval": self.interval,
            "active": list(self.active),
            # JSON has no NaN: a score that was never seen is null
            "scores": None if self.scores is None else [None if s != s else s for s in self.scores.tolist()],
            "probe": self._probe.mean.state() if self._probe is not None else None,
            "rates": [list(rates) for rates in self._momentum.rates] if self._momentum is not None else [],
            "history": [[step, interval, list(drawn)] for step, interval, drawn in self.history],
            "values": plain | more,
            "tensors": hosted
            | states
            | {f"master/{name}/weight": weight for name, weight in masters.items()}
            | {f"block/{name}/weight": weight for name, weight in weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Continue from ``state_dict``; load model and optimizer as well, before or after.

        Args:
            state: What ``state_dict`` gave.
            force: Accept other settings, seed or model: then only state by parameter name is loaded.
        """
        checks.check_open(closed=self.closed)
        same = checks.check_resume(state, self.settings, self.seed, len(self.units), force=force)
        if same:
            self.step, self.interval, self.active = state["step"], state["interval"], tuple(state["active"])
            scores = state["scores"]
            unseen = [math.nan if score is None else score for score in scores or ()]
            self.scores = None if scores is None else torch.tensor(unseen, dtype=torch.float64)
            self.history = [(step, interval, tuple(drawn)) for step, interval, drawn in state["history"]]
            if self._probe is not None:
                self._probe.mean.load(state["probe"])
            if self._momentum is not None:
                self._momentum.load(state["rates"])
            self._activate_(self.active)
            self._drop_gradients_(while_probing=self.interval == -1)
        self.guard.restart()
        # the optimizer writes in place: the caller's tensors must not change
        copies = {key: tensor.clone() for key, tensor in state["tensors"].items()}
        entries = {**state["values"], **copies}
        known = self._may_train | self._never
        if self.settings.state == "offload":
            self._store.hosted = {n: values for n, values in unpack(entries, "hosted").items() if n in known}
        if self._resting is not None:
            self._resting.load_({n: values["weight"] for n, values in unpack(entries, "block").items()})
        if self._masters is not None:
            masters = unpack(entries, "master")
            self._masters.load_({n: values["weight"] for n, values in masters.items() if n in known})
        for name, values in unpack(entries, "state").items():
            if name in known:
                put_(self.optimizer, known[name], values)

    def close(self) -> None:
        """Restore every parameter's ``requires_grad`` and remove all hooks; state of frozen blocks is not restored."""
        if self.closed:
            return
        self.closed = True
        self._restore()
        _live.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _trainable(sources: Iterable[Mapping[str, nn.Parameter]], *, flagged: bool = True) -> dict[str, nn.Parameter]:
    """Join named parameters, by default those that require gradients only."""
    return {n: p for params in sources for n, p in params.items() if p.requires_grad or not flagged}


def _weakly(method: Callable[[], float]) -> Callable[[], float]:
    """Call a sampler's method without keeping the sampler: an optimizer's hook would hold it when it is lost."""
    reference = weakref.WeakMethod(method)

    def call() -> float:
        found = reference()
        return 1.0 if found is None else found()

    return call


def _restore_(flags: Sequence[tuple[nn.Parameter, bool]], parts: Sequence[Any]) -> None:
    """Undo what a sampler did to model and optimizer; holds no reference to it, so it also runs when that is lost."""
    for part in parts:
        if part is not None:
            part.close()
    for p, flag in flags:
        p.requires_grad_(flag)

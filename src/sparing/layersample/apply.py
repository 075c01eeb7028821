"""The live half of layer sampling: freezes and thaws the blocks of a model while somebody else's loop trains it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparing.blocks import Block, find_blocks, submodule
from sparing.errors import UserError
from sparing.layersample import checks, ranks
from sparing.layersample.config import LayerSampling
from sparing.layersample.masters import Masters
from sparing.layersample.probes import BoundProbe, GradientProbe, Probe, updated
from sparing.layersample.rates import ScaledRate, warmup_factor
from sparing.layersample.state import StateStore, named_state, pack, put_, unpack
from sparing.layersample.truncate import Prefix

_attached: set[int] = set()
"""``id`` of every model that has a live sampler; a second one would take the first one's frozen blocks for the user's."""


class Sampler:
    """Trains a few body blocks at a time: LISA in a loop of your own.

    Build the optimizer from all parameters first, then the sampler, which freezes everything but the roles that are
    always on. ``begin_step`` thaws the blocks of the step's interval. Parameters that did not require gradients when
    the sampler was built stay frozen throughout; a block frozen whole may still be drawn, it then trains nothing.
    ``close``, or leaving a ``with`` block in any way, gives every parameter its flag back.

    Frozen parameters have no gradient, so AdamW skips them: they get no weight decay either, and a body block decays
    γ/N as often as the paper's full-time ones.

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
        self.settings, self.seed, self._group = settings or LayerSampling(), seed, group
        checks.check_wrapper(model)
        checks.check_attached(model, _attached)
        self.optimizer = checks.plain_optimizer(optimizer)
        self.model = model
        blocks = find_blocks(model, body=self.settings.body)
        checks.check_blocks(model, blocks, self.settings)
        self.body: tuple[Block, ...] = tuple(b for b in blocks if b.role == "body")
        self._always, self._never = _split(blocks, self.settings)
        self._drawn = [_trainable(b.params) for b in self.body]
        self._may_train = dict(self._always) | {n: p for params in self._drawn for n, p in params.items()}
        checks.check_optimizer(self._may_train, self.optimizer)
        self.active: tuple[int, ...] = ()
        """Body blocks that train now, sorted indices."""
        self.interval: int | None = None
        """Index of the interval, None before the first ``begin_step``."""
        self.step = 0
        """Optimizer step last begun (count)."""
        self.scores: Tensor | None = None
        """Running score of each body block, for samplers that use one; NaN where nothing was seen."""
        self.history: list[tuple[int, int, tuple[int, ...]]] = []
        """One row per draw: first step, interval, blocks."""
        self.closed = False
        self._attach_()

    def _attach_(self) -> None:
        settings, modules = self.settings, [submodule(self.model, b.name) for b in self.body]
        _attached.add(id(self.model))
        self._store = StateStore(self.optimizer, settings.state)
        self._sharded = checks.sharded_modules(self.model)
        names = {p: name for name, p in self._may_train.items()}
        self._masters = Masters(self.optimizer, names) if settings.masters else None
        self._rate = ScaledRate(self.optimizer, self._warmup) if settings.warmup else None
        self._probe = _probe(settings, self.optimizer, self._drawn, modules)
        frozen_embedding = not any(b_role == "embed" for b_role in self._always_roles())
        self._prefix = Prefix(self.model, modules) if settings.no_grad_prefix and frozen_embedding else None
        self._freeze_(self._never)
        for params in self._drawn:
            self._freeze_(params)

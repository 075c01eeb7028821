"""What the engine on ``fully_shard`` holds, and its weights: whole for a while, loaded, and by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sparing.blocks.names import named_buffers, named_parameters
from sparing.errors import require
from sparing.sharding.engine.masters import OptimizerFactory
from sparing.sharding.engine.state import Settings
from sparing.sharding.engine.weights import check_state
from sparing.sharding.fsdp import checkpoint
from sparing.sharding.fsdp.parameters import whole_of
from sparing.sharding.fsdp.units import Pass, Unit
from sparing.sharding.levels import Plan
from sparing.sharding.network.consistency import check_apart, check_same
from sparing.sharding.network.mesh import Mesh


class FsdpState:
    """Model, mesh, units and optimizer of an engine on ``fully_shard``, with the counts of its steps."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        settings: Settings,
        units: Sequence[Unit],
        blocks: Sequence[str],
        now: Pass,
        factory: OptimizerFactory,
        groups: tuple[Mapping[str, int], Sequence[Mapping[str, Any]]],
    ) -> None:
        self.model, self.plan, self.mesh, self.settings = model, plan, mesh, settings
        self.units, self.blocks, self.closed = tuple(units), tuple(blocks), False
        self.micro_step = self.steps = self.skipped = 0  # backward passes since the last step; steps; those skipped
        self.complete = False  # whether the last backward pass of this step has been
        self._now, self._factory, self._groups = now, factory, groups
        # of all ranks; those that a model makes later, such as masks as long as its rows, are each rank's own
        self.shared_buffers = tuple(named_buffers(model))
        self._optimizer: torch.optim.Optimizer | None = None
        self._trains, self._ran = self._flags(), False  # whether a forward pass has begun
        model.register_forward_pre_hook(torch.compiler.disable(self._before_forward_), prepend=True)  # type: ignore[no-untyped-call]

    # ---- once there are values

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer: its groups are the user's, its parameters DTensors; schedulers may hold it."""
        if self._optimizer is None:
            self._arm_()
        assert self._optimizer is not None
        return self._optimizer

    @property
    def armed(self) -> bool:
        """Whether the parameters have values, so that there is an optimizer."""
        return self._optimizer is not None

    def _before_forward_(self, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        self._prepare_()
        self._ran = True

    def _prepare_(self) -> None:
        """Follow what the user has changed since the last forward pass."""
        if not self.armed:
            self._arm_()
        for unit in self.units:
            unit.check_kinds()
            unit.show_whole_()
        if not self.micro_step:
            # freeze and thaw what the user's ``requires_grad_`` says
            changed = [unit.follow_flags_() for unit in self.units]
            self._trains = self._flags() if any(changed) else self._trains
        apart = self._ran and not all(unit.ran for unit in self.units)
        # weights do not change between the micro-batches of a schedule, whose other gradients are held
        if apart and self.plan.params != "N" and not self._now.schedule:
            # torch would still use what it had gathered ahead for a block that did not run
            self.reshard_()
        for unit in self.units:
            unit.ran = False

    def _flags(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in named_parameters(self.model).items()}

    def _arm_(self) -> None:
        """Make what needs the values of the cut parameters: hooks on them, and the optimizer with its rows."""
        self.reshard_()
        away = [name for name, p in self.model.named_parameters() if p.is_meta]
        why, do = "it holds no values yet", "call engine.load_full_state_dict_, or model.to_empty(device=…) and fill it"
        require(not away, away[0] if away else "", "a parameter on the meta device", why, do)
        indices, options = self._groups
        held: list[dict[str, Any]] = [{"params": [], **given} for given in options]
        for unit in self.units:
            unit.arm_([getattr(owner, name) for owner, name in unit.owners])
            if unit.shards:
                unit.make_values_(self.settings.master_dtype(unit.shards[0].dtype))
            for name, value in zip(unit.names, unit.values, strict=True):
                held[indices.get(name, 0)]["params"].append(value)
        self._optimizer = self._factory(held)
        given = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        check_same(self.mesh, given, "optimizer")

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def group_of(self, name: str) -> int:
        """Index of the parameter group that a parameter is in."""
        return self._groups[0].get(name, 0)

    def publish_(self) -> None:
        """Let parameters be what the optimizer's rows round to; all ranks call."""
        self.mesh.drain()
        for store in [unit.publish_() for unit in self.units if unit.on]:
            store()
        self._trains = self._flags()

    def reshard_(self) -> None:
        """Leave nothing whole, or on its way, so that what is registered are the cut parameters."""
        if self._ran:
            self._root.reset_iter_state()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- weights

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Keep every parameter whole for a while; in-place changes stay, if every rank makes the same."""
        why = "a step is under way"
        require(not self.micro_step, "gathered()", f"micro-step {self.micro_step}", why, "call step()")
        if not self.armed:
            self._arm_()
        self.reshard_()
        cut = dict(self.model.named_parameters())
        for unit in self.units:
            unit.module.set_reshard_after_forward(False, recurse=False)
            unit.module.unshard()
        try:
            yield self.model
        finally:
            for name, whole in self.model.named_parameters():
                checkpoint.write_rows_(cut[name], whole.detach())
            for unit in self.units:
                unit.free_after_use_(unit.cut)
            self.reshard_()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole weights as the model's own ``state_dict`` would have them, on every rank; all call."""
        self.reshard_()
        whole: dict[int, Tensor] = {}
        found = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in whole:
                whole[id(value)] = whole_of(value)
            found[name] = whole[id(value)].detach().clone()
        return found

    @torch.no_grad()
    def load_full_state_dict_(self, state: Mapping[str, Any]) -> None:
        """Take weights from an ordinary state dict, the same on every rank; nothing travels, optimizer state stays.

        A model on the meta device gets its memory here.
        """
        self._require_between_steps("load_full_state_dict_")
        self.reshard_()
        self.materialize_()
        named = self.model.state_dict(keep_vars=True)
        check_state(named, state)
        for name, value in named.items():
            if isinstance(value, DTensor):
                checkpoint.write_rows_(value, state[name])
            else:
                value.copy_(state[name])

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state by name, as DTensors, for ``torch.distributed.checkpoint``; all ranks call.

        ``model`` and ``optimizer`` are what torch's ``get_model_state_dict`` and ``get_optimizer_state_dict`` give, so
        any torch program of the same model loads them; in stages of a pipeline, whose ranks write one checkpoint
        together, with ``flatten_optimizer_state_dict=True``. To load, pass this to ``dcp.load``, which fills it in
        place, and then to ``load_state_dict_``. A model on the meta device gets its memory here.
        """
        self.reshard_()
        self.materialize_()
        why = "a checkpoint by name would keep one of them"
        do = "name parameters as in the whole model, or sharding.save(engine, a folder of the stage)"
        check_apart(self.mesh.stages, self.model.state_dict(), "state_dict", why, do)
        return checkpoint.state_of(self.model, self.optimizer, self.units, flat=self.mesh.stages is not None)

    @torch.no_grad()
    def load_state_dict_(self, state: Mapping[str, Any]) -> None:
        """Take weights and optimizer state that ``dcp.load`` has filled; all ranks call."""
        self._require_between_steps("load_state_dict_")
        self.reshard_()
        self.materialize_()
        checkpoint.load_(self.model, self.optimizer, self.units, state, flat=self.mesh.stages is not None)

    def _require_between_steps(self, what: str) -> None:
        why, do = "gradients of a step under way are of other weights", "call step() or abandon() first"
        require(not self.micro_step, what, f"after {self.micro_step} micro-steps", why, do)

    def materialize_(self) -> None:
        """Give a model on the meta device memory, without values."""
        if any(value.is_meta for value in (*self.model.parameters(), *self.model.buffers())):
            home = self.units[0].sums.home or self.mesh.device
            checkpoint.materialize_(self.model, home, self.mesh.device)

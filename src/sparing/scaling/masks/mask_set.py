"""The masks of a live model: read as a mapping, kept on weights, gradients and optimizer state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError
from sparing.scaling.masks import laws
from sparing.scaling.masks.gates import Gate, owner_and_name
from sparing.scaling.masks.sharded import ShardedGate, is_sharded, part, shard_gate_, whole
from sparing.scaling.plans.planning import APPLIED, Plan
from sparing.scaling.roles.initial import spread
from sparing.scaling.roles.structure import groups_of

MASKS = "_sparing_scaling_masks"  # attribute of a scaled model that holds its masks; checkpoints have the buffers
_WATCHING: WeakValueDictionary[int, Masks] = WeakValueDictionary()  # by id; those whose weights are not used yet
_INERT = {"exp_inf", "step_size", "sum"}  # never zero (ε, Rprop's steps, Adagrad's start); moves nothing by itself
_RELATIVE = 1e-3  # of a standard deviation: rounding to bf16 moves it less, a fresh draw of 10⁴ weights usually more


class Masks(Mapping[str, Tensor]):
    """Masks by canonical parameter name: boolean buffers of the modules, so they are saved, moved and copied with them.

    Build it with ``apply_`` or ``restore_``. A deep copy of the model has masks of its own: ``masks_of``.
    """

    def __init__(self, model: nn.Module, plan: Plan, gates: Mapping[str, Gate]) -> None:
        self.model = model
        """The model itself, without wrappers."""
        self.plan = plan
        """The plan at the densities of the masks."""
        self._gates = dict(gates)
        self.law: laws.Law | None = None
        """How they were drawn; None if they were loaded."""
        self.watched = False
        """Whether the next forward pass or optimizer step verifies that the weights are those scaled or loaded."""
        self._expected: dict[str, float] = {}

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._gates[name].mask)

    def __iter__(self) -> Iterator[str]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)

    def __deepcopy__(self, memo: dict[int, Any]) -> Masks:
        """Copy without the watch, unless the weights have been drawn anew already."""
        twin: Masks = object.__new__(Masks)
        memo[id(self)] = twin
        redrawn = self.watched and next(self._changes(), None) is not None
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        # A copy (an average, a target network) may be written to before its first call: it is not verified.
        if not redrawn:
            twin._expected, twin.watched = {}, False
        return twin

    def __repr__(self) -> str:
        if self.sharded:  # counting needs all processes, and a print may be of one
            return f"Masks({len(self)} weights, sharded)"
        total = sum(mask.numel() for mask in self.values())
        live = sum(int(mask.sum()) for mask in self.values())
        share = f"{live / total:.4g} of {total:,} weights live" if total else "none"
        return f"Masks({len(self)} weights: {share}, {len(self.dead)} with dead neurons or inputs)"

    @property
    def sharded(self) -> bool:
        """Whether weights are cut into DTensors; reading a mask then takes all processes."""
        return any(isinstance(gate, ShardedGate) for gate in self.gates)

    @property
    def gates(self) -> Iterable[Gate]:
        """What keeps each weight sparse."""
        return self._gates.values()

    def density(self, name: str) -> float:
        """Return the live fraction of one weight's entries."""
        live, total = self.live(name)
        return live / total

    def live(self, name: str) -> tuple[int, int]:
        """Return how many of a weight's entries are live, and how many there are (counts); no sparse layer is unpacked.

        Args:
            name: Masked weight.

        Returns:
            Both counts.
        """
        return self._gates[name].live

    @property
    def densities(self) -> dict[str, float]:
        """Live fraction of every masked weight."""
        return {name: self.density(name) for name in self}

    @property
    def dead(self) -> dict[str, tuple[int, int]]:
        """Weights that cut something off -> neurons without input and inputs that no neuron reads (counts)."""
        found = {name: laws.dead(mask, **self.layout(name)) for name, mask in self.items()}
        return {name: (len(out), len(into)) for name, (out, into) in found.items() if len(out) + len(into)}

    def layout(self, name: str) -> dict[str, Any]:
        """Return how a weight holds its matrices, as ``laws.matrices`` takes it."""
        entry, (module, _) = self.plan.entries[name], owner_and_name(self.model, name)
        return {"transposed": entry.transposed, "stacked": entry.stacked, "groups": groups_of(module)}

    def parameter(self, name: str) -> nn.Parameter:
        """Return a masked weight."""
        return self._gates[name].parameter

    def digest(self) -> str:
        """Return a hash of all masks (SHA-256): equal in two processes if and only if the masks are."""
        return laws.digest(self)

    def keep_dense_gradient(self, keep: bool = True) -> None:
        """Collect the gradient also where weights are masked, from the next backward pass on; or stop, and forget it.

        Args:
            keep: Whether to. Costs one more gradient per masked weight while it is on; passes add up as in ``grad``.
        """
        for gate in self._gates.values():
            gate.keep, gate.dense = keep, None

    @property
    def dense_gradient(self) -> dict[str, Tensor]:
        """Gradients before masking, as collected in this process; weights without any are omitted."""
        return {name: gate.dense for name, gate in self._gates.items() if gate.dense is not None}

    @property
    def has_dense_gradient(self) -> bool:
        """Whether any was collected; nothing is computed."""
        return any(gate.has_dense for gate in self._gates.values())

    def dense_gradient_of(self, name: str) -> Tensor | None:
        """Return one weight's gradient before masking; those of others are not computed.

        Args:
            name: Masked weight.

        Returns:
            Of its shape; None if none was collected.
        """
        found = self._gates[name].dense
        return None if found is None else whole(found)

    def forget_dense_gradient(self, name: str) -> None:
        """Drop one weight's gradient before masking.

        Args:
            name: Masked weight.
        """
        self._gates[name].dense = None

    @torch.no_grad()
    def zero_(self) -> None:
        """Zero weights and gradients off the masks."""
        for gate in self._gates.values():
            gate.zero_()

    def settle_(self) -> None:
        """Undo writes off the masks, also by replacing masked parameters; runs before every ``state_dict``."""
        for gate in self._gates.values():
            # Stand-ins, as under functional_call, are masked where they are used; only parameters are taken over.
            if not gate.is_current and type(gate.parameter) is nn.Parameter:
                gate.rehook_()
                gate.zero_()
            gate.settle_(written=True)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse optimizer state that lives off the masks: it would move masked weights, or grown ones by old moments.

        Args:
            optimizer: Any, after its step.

        Raises:
            UserError: Names the weight and the state.
        """
        for name, gate in self._gates.items():
            for key, value in optimizer.state.get(gate.parameter, {}).items():
                moves = isinstance(value, Tensor) and value.shape == gate.mask.shape and key not in _INERT
                if moves and bool(part(value)[~part(gate.mask)].any()):
                    do = "build the optimizer after apply_; one whose state mixes entries fits no masks that change"
                    raise UserError(f"{name}: {key}", got="state off the mask", why="masked weights would move", do=do)

    def set_(self, name: str, mask: Tensor) -> None:
        """Replace a mask in place; weight and gradient are zero off the new one.

        The plan stays: ``refresh_`` brings its densities up to date.

        Args:
            name: Masked weight.
            mask: Boolean, of its shape.

        Raises:
            UserError: If it has another shape or type.
        """
        held = self[name]
        if mask.shape != held.shape or mask.dtype != torch.bool:
            got = f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise UserError(f"mask of {name}", got=got, why=f"it is torch.bool of {tuple(held.shape)}", do="turn it")
        self._gates[name].set_(mask)

    def require_free(self, names: Iterable[str]) -> None:
        """Refuse to grow weights one by one where the law says how many live in each group of neighbours.

        Args:
            names: Weights of which the masks are to change.

        Raises:
            UserError: If one of them was drawn by ``NofM`` or ``Blocks``.
        """
        bound = isinstance(self.law, laws.NofM | laws.Blocks)
        held = next((name for name in names if name in self and bound), None)
        if held is not None:
            why, do = "weights that grow anywhere leave no such groups", "draw another law, or prune (GMP) or freeze it"
            raise UserError(held, got=f"a mask of {self.law}", why=why, do=do)

    def cover_(self, names: Iterable[str]) -> None:
        """Give weights that have none a full mask, so that pruning can begin.

        Args:
            names: Canonical names; those that are masked already are skipped.
        """
        for name in names:
            if name not in self._gates:
                module, local = owner_and_name(self.model, name)
                full = torch.ones_like(module.get_parameter(local), dtype=torch.bool)
                self._gates[name] = Gate(module, local, full)

    def refresh_(self) -> None:
        """Update the plan, and so the groups it gives, to the present densities of the masks."""
        self.plan = self.plan.with_densities(self.densities)
        self.model.__dict__[APPLIED] = self.plan

    def watch_(self) -> None:
        """Note the scale of the weights as it is, for ``verify`` at the first forward pass or optimizer step."""
        self.watched = True
        _WATCHING[id(self)] = self
        _watch_optimizers()
        params = named_parameters(self.model)
        # Only rescaled weights: a fresh draw of any other has the scale that the plan wants.
        self._expected = {n: spread(params[n]) for n, e in self.plan.entries.items() if e.rescale != 1.0}
        self._expected |= {n: spread(self.parameter(n)) for n in self}

    def shard_(self) -> None:
        """Follow ``fully_shard`` or ``parallelize_module``, called after ``apply_``: cut masks as weights are.

        Build the optimizer afterwards. All processes read a mask, and change it, together.

        Raises:
            UserError: If no masked weight is a DTensor, or the weights were drawn again in between.
        """
        cut = [gate for gate in self.gates if is_sharded(gate.module._parameters[gate.local])]
        if not cut and self._gates:
            do = "call it after fully_shard(model), or not at all"
            raise UserError("Masks.shard_", got="a model that is whole", why="no masked weight is a DTensor", do=do)
        for gate in cut:
            if not isinstance(gate, ShardedGate):
                shard_gate_(gate)
        # Deviations of the parts are not those of the weights; weights off the masks give a fresh draw away.
        self._expected = {}
        self.verify()

    def accept_(self) -> None:
        """Accept the weights as they are, loaded or set on purpose; masked ones are set to zero."""
        self._expected, self.watched = {}, True
        for gate in self._gates.values():
            gate.rehook_()
        self.zero_()

    def verify(self) -> None:
        """Refuse weights that were drawn again or replaced after they were scaled.

        Runs by itself at the first forward pass, or before the first optimizer step, which ends the watch: from then
        on weights change because they are trained. Costs one pass over the weights.

        Raises:
            UserError: Names the first weight that lives off its mask, has another scale, or is another tensor.
        """
        for name, got in self._changes():
            why = "something drew or replaced the weights after apply_ (init_weights, reset_parameters, fully_shard)"
            do = "call apply_ last; masks.shard_() after fully_shard; masks.accept_() if what is there now is meant"
            raise UserError(name, got=got, why=why, do=do)
        self._expected, self.watched = {}, False
        _WATCHING.pop(id(self), None)

    def _changes(self) -> Iterator[tuple[str, str]]:
        params = named_parameters(self.model)
        for name, gate in self._gates.items():
            if not gate.is_current:
                yield name, "another parameter in its place"
            elif gate.leaks():
                yield name, "weights off the mask"
        for name, std in self._expected.items():
            if name not in params:
                yield name, "no parameter of that name any more (adapters, pruning, parametrization)"
                continue
            now = spread(params[name])
            if abs(now - std) > _RELATIVE * std:
                yield name, f"standard deviation {now:.4g}, where {std:.4g} was set"


def masks_of(model: nn.Module) -> Masks:
    """Return the masks of a scaled model, such as a copy of one."""
    found = submodule(model, "").__dict__.get(MASKS)
    if not isinstance(found, Masks):
        raise UserError("model", got="no masks", why="it was not scaled", do="call apply_ or restore_ first")
    return found


@functools.cache
def _watch_optimizers() -> None:
    """Verify before steps of every optimizer, from the first scaled model of the process on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Verify weights that are trained without a call of the model itself (``training_step``)."""
    # Models that train by their parts are never called themselves: their optimizer's step is the first sign of use.
    if not _WATCHING:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for masks in list(_WATCHING.values()):
        if masks.watched and any(id(parameter) in stepped for parameter in masks.model.parameters()):
            masks.verify()

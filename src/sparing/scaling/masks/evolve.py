"""Masks that change while the user's loop trains the model: weights, optimizer state and factors follow.

evolution = Evolution(model, masks, optimizer, RigL(), steps=10_000)
for step in range(10_000):
    loss(model, batch).backward()
    optimizer.step()
    evolution.step(step)
    scheduler.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparing.blocks import submodule
from sparing.errors import UserError, require
from sparing.scaling.masks.dynamic import LiveMethod, Method, energy, prefill
from sparing.scaling.masks.laws import matrices, stored
from sparing.scaling.masks.live import factor_between, finite, floor_live, prefill_live
from sparing.scaling.masks.mask_set import Masks
from sparing.scaling.masks.ranks import average, from_rank_zero, places_from_rank_zero
from sparing.scaling.masks.sharded import cut_as, is_sharded, part, whole
from sparing.scaling.model.multipliers import attach_, factor_of, set_factor_
from sparing.scaling.plans.entries import Entry, rule_factors
from sparing.scaling.plans.planning import APPLIED, Plan
from sparing.scaling.roles.structure import is_embedding, modules_sharing_weight
from sparing.scaling.rules import Factors, Optimizer, Rule, shift, stepper
from sparing.scaling.sparse.layers import SparseLinear
from sparing.scaling.sparse.swap import repattern_, to_dense_, to_sparse_
from sparing.seeds import stream

Scale = Literal["density", "energy", "none"]
"""What the forward factor of a layer follows: the rule at its present density; the second moment of its weights, so
that no change of a mask changes the scale of the layer's output (κ); or nothing."""

# State that a step divides by, and Rprop's steps: from zero, grown weights would take steps too long, or none.
_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "step_size")
_OPTIONS = ("lr", "weight_decay", "eps")


@dataclass(slots=True, eq=False)
class _Layer:
    """One weight whose mask changes."""

    entry: Entry
    modules: list[nn.Module]
    start: float  # density at which the groups were built
    forward: float  # factor on the input at the start
    density: float  # now
    scale: float = 1.0  # factor on the input since the start, A


class Evolution:
    """Changes the masks of a model by a method, at the steps the method says.

    Dropped weights and their optimizer state become zero. Grown weights begin at zero, with zero momentum and the
    second moment of their neighbours (``prefill``), so that their first step is no longer than others.
    All processes make the same changes: dense gradients are averaged, and the masks of process 0 are used.
    Layers that run sparse stay so, and are updated by their live weights: only one score of the dense size is made at a
    time. A method without ``update_live`` makes each dense for the moment of its own update.

    With ``scale`` "density" or "energy" the layer's input is multiplied by A(t), and the optimizer's options follow
    during its step: lr, weight decay and ε of the weight are those of the rule at the present density with the
    factor A in the forward pass. Between steps the groups hold what the scheduler wrote, so every scheduler works,
    and so does ``check_optimizer`` of the plan at the initial densities; ``lr_factor`` in a group is the factor.
    Build it before the scheduler, and before ``optimizer.load_state_dict``: each weight gets a group of its own.

    Source: the update rules in ``dynamic``; factors after Dey et al. 2024 (arXiv:2405.15743), κ our own.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: Masks,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        steps: int,
        seed: int = 0,
        scale: Scale = "density",
        names: Sequence[str] | None = None,
        group: Any = None,
    ) -> None:
        """Give masks to weights that are to be pruned, and hook into the optimizer.

        Args:
            model: The scaled model, wrapped or not.
            masks: Its masks.
            optimizer: Built from ``plan.groups``; holds every weight concerned.
            method: How masks change.
            steps: Optimizer steps of the whole run (count).
            seed: Of random growth; the same in every process.
            scale: What the forward factor follows.
            names: Weights concerned; by default all masked ones, or all hidden ones if none is masked.
            group: Processes that share the model; None is all.
        """
        require(steps >= 1, "steps", steps, "a schedule needs the length of the run", "pass steps >= 1")
        known = ("density", "energy", "none")
        require(scale in known, "scale", scale, "no such choice", f"pass one of {', '.join(known)}")
        self.model, self.masks, self.optimizer, self.method = submodule(model, ""), masks, optimizer, method
        self.steps, self.seed, self.scale = steps, seed, scale
        self.closed = False  # whether masks stay as they are from now on
        self.done = -1  # last step seen; −1 before the first
        # One row per update: step, weights dropped and grown (counts), density over all weights concerned.
        self.history: list[dict[str, Any]] = []
        self._group, self._wrapped = group, isinstance(model, nn.parallel.DistributedDataParallel)
        self._scaled = scale == "energy" or (scale == "density" and method.density(0, steps) is not None)
        chosen = list(names or masks or [n for n, e in masks.plan.entries.items() if e.role == "hidden"])
        masks.require_free(chosen if method.fraction(0, steps) > 0 else ())
        masks.cover_(chosen)
        self._layers = {name: self._layer(name) for name in chosen}
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        optimizer.register_step_pre_hook(lambda *_: self._scale_options_())
        optimizer.register_step_post_hook(lambda *_: self._restore_options_())

    @property
    def plan(self) -> Plan:
        """The plan at present densities; the optimizer's groups follow ``masks.plan``, so check them with that."""
        return self.masks.plan.with_densities(self.masks.densities)

    def factors(self, name: str) -> Factors:
        """Return factors on what the groups hold: lr, weight decay, ε in each step, and forward since the start.

        Args:
            name: A weight concerned.

        Returns:
            Ones where nothing is scaled.
        """
        layer = self._layers[name]
        if not self._scaled:
            return Factors()
        # In the rescaled form the whole factor is in the weights; ``shift`` then moves A into the forward pass.
        plan, kind = self.masks.plan, stepper(layer.entry.role, self.masks.plan.optimizer)
        start = rescaled_form_factors(layer.entry, plan.rule, plan.optimizer, layer.start)
        now = shift(rescaled_form_factors(layer.entry, plan.rule, plan.optimizer, layer.density), layer.scale, kind)
        ratios = {option: getattr(now, option) / getattr(start, option) for option in ("lr", "weight_decay", "eps")}
        return Factors(forward=layer.scale, **ratios)

    def step(self, step: int) -> None:
        """Change the masks if this step says so; call after every optimizer step, before gradients are cleared.

        Args:
            step: Index of the optimizer step just done, from 0.

        Raises:
            UserError: If an update needs dense gradients and none were collected.
        """
        if not self.closed and self.method.due(step, self.steps):
            if self.method.dense_gradient and not self.masks.has_dense_gradient:
                why = "they are collected in the pass before an update only"
                do = "call evolution.step(step) after every optimizer step, in order"
                raise UserError("Evolution.step", got=f"step {step} without dense gradients", why=why, do=do)
            self._update_(step)
        self.done = step
        # Dense gradients cost memory: they are collected in the one pass before an update.
        self._request_dense_gradient_()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides model and optimizer: plain JSON values."""
        layers = {name: [layer.start, layer.forward, layer.scale] for name, layer in self._layers.items()}
        return {"settings": self._settings(), "done": self.done, "layers": layers, "history": list(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; load the model before, and the optimizer before or after.

        Args:
            state: What ``state_dict`` gave.

        Raises:
            UserError: If it is of another method, length, seed or set of weights.
        """
        if state["settings"] != self._settings() or state["layers"].keys() != self._layers.keys():
            why, do = f"this run has {self._settings()}, or other weights", "resume with the settings of the saved run"
            raise UserError("Evolution.load_state_dict", got=state["settings"], why=why, do=do)
        self.done, self.history = state["done"], list(state["history"])
        for name, layer in self._layers.items():
            layer.start, layer.forward, layer.scale = state["layers"][name]
            layer.density = self.masks.density(name)
            self._write_factor_(name)
        # Loading the model has set its plan to present densities, but the groups were scaled at those of the start.
        self.masks.plan = self.masks.plan.with_densities({n: layer.start for n, layer in self._layers.items()})
        self.model.__dict__[APPLIED] = self.masks.plan
        self._request_dense_gradient_()

    def close(self) -> None:
        """Freeze the masks; the present factors stay in force, in the forward pass and in the optimizer's steps."""
        self._restore_options_()
        self.closed = True
        self.masks.keep_dense_gradient(False)

    def _settings(self) -> str:
        return repr((self.method, self.steps, self.seed, self.scale))

    def _layer(self, name: str) -> _Layer:
        _separate_group_(self.optimizer, self.masks.parameter(name), name, split=self._scaled)
        entry = self.masks.plan.entries[name]
        modules = modules_sharing_weight(self.model, entry.module)
        if self._scaled and name.rpartition(".")[2] != "weight":
            do = "pass scale='none', or use layers of their own"
            raise UserError(name, got="a bare parameter", why="no call of its own can be scaled", do=do)
        users = [m for m in self.model.modules() if m._parameters.get("weight") is self.masks.parameter(name)]
        got, why = "a table that also reads out", "its energy would scale what is looked up alone"
        require(
            self.scale != "energy" or len(users) <= len(modules), name, got, why, "pass scale='density', or untie it"
        )
        for module in modules:
            if self._scaled and "forward_scale" not in module._buffers:
                # What a table takes in are ids.
                attach_(module, "forward_scale", 1.0, where="output" if is_embedding(module) else "input")
        return _Layer(entry, modules, entry.density, factor_of(modules[0], "forward_scale"), self.masks.density(name))

    def _request_dense_gradient_(self) -> None:
        """Collect dense gradients in the passes before an update that needs them."""
        due = not self.closed and self.method.due(self.done + 1, self.steps)
        self.masks.keep_dense_gradient(self.method.dense_gradient and due)

    def _update_(self, step: int) -> None:
        dropped = grown = 0
        for name in self._layers:
            module = submodule(self.model, name.rpartition(".")[0])
            if isinstance(module, SparseLinear) and self._wrapped:
                why = "an update may change how many weights live, and the wrapper's buckets would not follow"
                do = "average gradients by all_reduce instead of wrapping, or run the layer dense"
                raise UserError(name, got="a sparse layer under DistributedDataParallel", why=why, do=do)
            if isinstance(module, SparseLinear) and isinstance(self.method, LiveMethod):
                gone, new_ones = self._update_sparse_(name, module, self.method, step)
                dropped, grown = dropped + gone, grown + new_ones
                continue
            held = module.weight if isinstance(module, SparseLinear) else None
            if isinstance(module, SparseLinear):  # dense for its own update only: one such layer at a time
                to_dense_(module, self.optimizer)
            old, new = self._update_layer_(name, step)
            if held is not None:
                self.masks.forget_dense_gradient(name)
                to_sparse_(module, new, self.optimizer, again=held)
            dropped, grown = dropped + int((old & ~new).sum()), grown + int((new & ~old).sum())
        live, total = map(sum, zip(*(self.masks.live(name) for name in self._layers), strict=True))
        self.history.append({"step": step, "dropped": dropped, "grown": grown, "density": live / total})

    @torch.no_grad()
    def _update_sparse_(self, name: str, module: SparseLinear, method: LiveMethod, step: int) -> tuple[int, int]:
        """Change the pattern of one sparse layer, with values, state and factor; return counts dropped and grown."""
        layer, places, values, gradient = self._layers[name], module.places, module.placed, module.dense_gradient
        if gradient is not None:
            gradient = finite(average(gradient, self._group))
        self.masks.forget_dense_gradient(name)
        shape = torch.Size(module.pattern.shape[::-1] if module.transposed else module.pattern.shape)
        draws, schedule = stream(self.seed, "evolve", name, step), {"step": step, "steps": self.steps}
        new = method.update_live(values, places, gradient, shape=shape, generator=draws, **schedule)
        new = places_from_rank_zero(new, self._group)
        kept = torch.isin(places, new, assume_unique=True)
        # Grown weights are zero, so the energy after is that of the kept ones: no jump in the output's scale.
        before, after = (float(part.double().square().sum()) for part in (values, values[kept]))
        old_weight, old, pattern = module.weight, module.pattern, module.pattern_at(new)
        state, betas = self.optimizer.state.get(old_weight, {}), _groups(self.optimizer)[id(old_weight)].get("betas")
        floor = None
        if gradient is not None:
            seen = (gradient.t() if module.transposed else gradient).reshape(-1)
            floor = floor_live(seen[old.flat], seen[pattern.flat], old_weight.grad, state, betas)
        second = {
            key: prefill_live(held, old, pattern, floor)
            for key, held in state.items()
            if key in _SECOND and isinstance(held, Tensor) and held.shape == old_weight.shape
        }
        repattern_(module, pattern, self.optimizer)
        if second:
            self.optimizer.state[module.weight].update(second)
        layer.density = self.masks.density(name)
        if self._scaled:
            self._rescale_(name, before, after)
        both = int(kept.sum())
        return len(places) - both, len(new) - both

    @torch.no_grad()
    def _update_layer_(self, name: str, step: int) -> tuple[Tensor, Tensor]:
        """Change one mask, with weight, state and factor; return the old and the new one."""
        layer, old, parameter = self._layers[name], self.masks[name].clone(), self.masks.parameter(name)
        if parameter.shape != old.shape:
            do = 'call convert_(model, masks, backend="dense", optimizer=optimizer) before the update'
            raise UserError(name, got="a sparse layer", why="masks change on dense weights", do=do)
        sharded = is_sharded(parameter)
        weight, gradient = whole(parameter.detach()), self.masks.dense_gradient_of(name)
        if gradient is not None:  # of a sharded weight it is the mean of all processes already
            gradient = finite(gradient if sharded else average(gradient, self._group))
        # A stream per weight and step: a resumed run draws the same without saving generators.
        generator = stream(self.seed, "evolve", name, step)
        new = self.method.update(weight, old, gradient, step=step, steps=self.steps, generator=generator)
        new = from_rank_zero(new, self._group)  # sums differ in their last bits between ranks
        before, after = energy(weight, old), energy(weight, old & new)  # before ``set_``, which zeroes what was dropped
        state = self.optimizer.state.get(parameter, {})
        betas = _groups(self.optimizer)[id(parameter)].get("betas")
        floor = _second_moment_floor(parameter, state, betas, old, gradient)
        self.masks.set_(name, new)
        layer.density = self.masks.density(name)
        _move_state_(state, old, new, floor, self.masks.layout(name))
        # Grown weights are zero still, so this is the energy of the kept ones: no jump in the output's scale.
        if self._scaled:
            self._rescale_(name, before, after)
        return old, new

    def _rescale_(self, name: str, before: float, after: float) -> None:
        layer, plan = self._layers[name], self.masks.plan
        if self.scale == "energy":
            layer.scale *= (before / after) ** 0.5 if after > 0 else 1.0
        else:
            now = rescaled_form_factors(layer.entry, plan.rule, plan.optimizer, layer.density)
            layer.scale = now.std / rescaled_form_factors(layer.entry, plan.rule, plan.optimizer, layer.start).std
        self._write_factor_(name)

    def _write_factor_(self, name: str) -> None:
        layer = self._layers[name]
        for module in layer.modules if self._scaled else ():
            set_factor_(module, "forward_scale", layer.forward * layer.scale)

    def _scale_options_(self) -> None:
        """Scale the optimizer's options for the duration of its step."""
        self._restore_options_()  # a step that raised has left them scaled
        if not self._scaled:
            return
        groups = _groups(self.optimizer)
        for name in self._layers:
            group, factors = groups[id(self.masks.parameter(name))], self.factors(name)
            self._saved.append((group, {option: group[option] for option in _OPTIONS if option in group}))
            for option in self._saved[-1][1]:
                group[option] = group[option] * getattr(factors, option)
            group["lr_factor"] = factors.lr

    def _restore_options_(self) -> None:
        for group, options in self._saved:
            group.update(options)
        self._saved.clear()


def rescaled_form_factors(entry: Entry, rule: Rule, optimizer: Optimizer, density: float) -> Factors:
    """Return a weight's factors at some density, with the whole factor in the weights."""
    flat: Any = replace(rule, form="rescaled") if hasattr(rule, "form") else rule  # type: ignore[type-var]
    return rule_factors(entry, flat, optimizer, density)


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return parameter ``id`` -> group; not cached, since loading a state dict replaces the groups."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def _separate_group_(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, *, split: bool) -> None:
    """Require that the optimizer has a parameter; if ``split``, move it into a group of its own."""
    held = _groups(optimizer).get(id(parameter))
    if held is None:
        raise UserError(
            name, got="no group", why="the optimizer does not train it", do="build it from plan.groups(model)"
        )
    if not split or len(held["params"]) == 1:
        return
    # A scheduler has counted the groups: one more would step without it.
    if "initial_lr" in held:
        do = "build Evolution first, then the scheduler"
        raise UserError("optimizer", got="a scheduler on it", why="each weight needs a group of its own", do=do)
    at = next(i for i, p in enumerate(held["params"]) if p is parameter)
    lists = {key: [held[key].pop(at)] for key in ("params", "param_names") if key in held}
    optimizer.add_param_group(held | lists)


def _move_state_(state: Mapping[str, Any], old: Tensor, new: Tensor, floor: Tensor | None, layout: Any) -> None:
    """Clear the state of dropped weights and give grown ones theirs."""
    kept, grown = old & new, new & ~old
    for key, held in state.items():
        if not isinstance(held, Tensor) or held.shape != old.shape:
            continue
        part(held).masked_fill_(part(cut_as(~kept, held)), 0)
        if key in _SECOND:
            given = (whole(held), kept, grown, *(() if floor is None else (floor.to(held.dtype),)))
            rows = [matrices(each, **layout) for each in given]
            filled = prefill(*(each.flatten(0, 1).contiguous() for each in rows)).view(rows[0].shape)
            filled = stored(filled, transposed=layout["transposed"], stacked=layout["stacked"])
            part(held).copy_(part(cut_as(filled, held)))


def _second_moment_floor(
    parameter: nn.Parameter,
    state: Mapping[str, Any],
    betas: tuple[float, float] | None,
    mask: Tensor,
    gradient: Tensor | None,
) -> Tensor | None:
    """Return squares of the dense gradient in the units of Adam's second moment; None where there is none."""
    if gradient is None or betas is None or "exp_avg_sq" not in state:
        return None
    # Clipping or unscaling after the gradient was collected changed it by one factor, known from the live weights.
    unit = factor_between(gradient[mask], None if parameter.grad is None else whole(parameter.grad))
    maturity = 1.0 - betas[1] ** float(state["step"])  # Adam's moment is this share of what it estimates
    squares: Tensor = (gradient * unit).square() * maturity
    return squares

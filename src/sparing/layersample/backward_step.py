"""The optimizer's step inside the backward pass: a gradient is used the moment it is complete, then dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparing.errors import UserError, require
from sparing.layersample import ranks
from sparing.layersample.apply import Sampler
from sparing.layersample.probes import BoundProbe
from sparing.layersample.state import is_sharded

_EPSILON = 1e-6  # added to the norm by ``torch.nn.utils.clip_grad_norm_``, whose result this must equal


class StepInBackward:
    """Steps each active block as soon as backward has its gradients: those of two blocks are never held together.

    Replaces ``loss.backward(); clip_grad_norm_(...); optimizer.step(); optimizer.zero_grad()``. Updates are those of
    that loop: of the last micro-batch of an accumulation window only, and with the same global-norm clipping. The
    optimizer is called once for each body block, so that fused and foreach kernels have work, and once for each
    parameter outside.

    Clipping by the norm of *all* gradients needs them all before the first step. "exact" makes two backward passes: the
    first adds up norms and drops each gradient, the second steps. "delayed" clips by the norm of the step before, and
    makes two passes only where there is none: in the first step of an interval.

    With accumulation the earlier micro-batches' gradients must wait for the last, so only the last gradient's share of
    the memory is saved. Not for ``GradScaler``, reentrant checkpointing of shared weights, or several processes.

    Source: LOMO (arXiv:2306.09782) for the fusion and the two passes; stepping on every micro-batch instead of every
    window is the known defect of layer-wise hooks (GaLore issue 78).

    Example:
        >>> from torch import nn
        >>> from sparing.layersample import LayerSampling, Sampler, StepInBackward
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        >>> sampler = Sampler(model, torch.optim.SGD(model.parameters(), lr=0.1), LayerSampling(active=1, period=2))
        >>> step_in = StepInBackward(sampler, max_norm=1.0)
        >>> for step in range(3):
        ...     sampler.begin_step(step)
        ...     norm = step_in.backward(model(torch.ones(1, 4)).square().sum())
        >>> any(p.grad is not None for p in model.parameters())
        False
    """

    def __init__(
        self, sampler: Sampler, *, max_norm: float | None = None, clip: Literal["exact", "delayed"] = "exact"
    ) -> None:
        """Check; hooks come with the first ``backward``.

        Args:
            sampler: Says what is active and holds the optimizer.
            max_norm: Largest 2-norm of all gradients together; None does not clip.
            clip: Which norm is compared with it.

        Raises:
            UserError: If parameters are sharded, there are several processes, or the settings mean nothing.
        """
        if ranks.several() or any(is_sharded(p) for p in sampler.trainable.values()):
            raise UserError(
                "StepInBackward", got="several processes", why="gradients must be averaged before the step",
                do="call optimizer.step() after the backward pass",
            )  # fmt: skip
        if sampler.settings.probe:
            raise UserError(
                "StepInBackward", got=f"probe={sampler.settings.probe}", why="the steps of a probe change nothing",
                do="call optimizer.step() after the backward pass, or pass probe=0",
            )  # fmt: skip
        if clip not in {"exact", "delayed"} or (max_norm is not None and not max_norm > 0):
            raise UserError(
                "StepInBackward", got=f"max_norm={max_norm}, clip={clip}",
                why="a gradient is clipped by a positive norm", do="pass max_norm > 0 and clip='exact' or 'delayed'",
            )  # fmt: skip
        self.sampler, self.max_norm, self.clip = sampler, max_norm, clip
        self.last_norm: float | None = None
        """Norm of all gradients of the step before, None where the next step has to measure."""
        self._interval: int | None = None
        self._handles: list[RemovableHandle] = []
        self._phase: Literal["off", "measure", "step"] = "off"
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._accumulated: dict[nn.Parameter, Tensor] = {}
        self._factor: Tensor | float = 1.0
        self._groups: dict[nn.Parameter, list[nn.Parameter]] = {}  # what is stepped together
        self._waiting: dict[nn.Parameter, int] = {}  # gradients to come, by first parameter of the group

    def backward(self, loss: Tensor, *, last: bool = True) -> float | None:
        """Run the backward pass of a loss, and step if it is the last one of its accumulation window.

        Args:
            loss: Scalar; scaled by the caller if several micro-batches are to be averaged.
            last: False for the micro-batches before the last.

        Returns:
            The norm of all gradients of this step before clipping; None without clipping, or before the last
            micro-batch.

        Raises:
            UserError: If the norm is not finite; nothing has been stepped then and no gradient is left. With "delayed"
                it is known too late: the weights are already wrong then, and the error says so.
        """
        self._hook_active_()
        if not last:
            loss.backward()  # type: ignore[no-untyped-call]
            return None
        if self.max_norm is None:
            self._step_pass(loss, 1.0)
            return None
        # the norm is asked for once a step: each question lets the host wait for the device
        measured = self.clip == "exact" or self.last_norm is None
        if measured:
            self._measure_pass(loss)
            used = self._total()
            self.last_norm = self._finite(used, "a step would spoil the weights, which are as before")
        else:
            used = torch.tensor(self.last_norm)
        self._step_pass(loss, (self.max_norm / (used + _EPSILON)).clamp(max=1.0))
        if not measured:
            self.last_norm = self._finite(self._total(), "the step is taken, and the weights are spoilt")
        return self.last_norm

    def state_dict(self) -> dict[str, Any]:
        """Give what "delayed" remembers, as JSON."""
        return {"last_norm": self.last_norm, "interval": self._interval}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``.

        Args:
            state: What ``state_dict`` returned.
        """
        self._hook_active_()
        if state["interval"] == self.sampler.interval:
            self.last_norm = state["last_norm"]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._interval = None

    def _hook_active_(self) -> None:
        """Hook what is active now, once per interval."""
        if self._interval is not None and self._interval == self.sampler.interval:
            return
        self.close()
        self._interval, self.last_norm = self.sampler.interval, None
        trainable = dict.fromkeys(self.sampler.trainable.values())
        for p in trainable:
            handle = p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        blocks = [[p for p in b.params.values() if p in trainable] for b in self.sampler.body]
        inside = {p: block for block in blocks for p in block}
        # in the order in which the plain loop would step them
        self._groups = {p: inside.get(p, [p]) for p in trainable}

    def _measure_pass(self, loss: Tensor) -> None:
        """Find every gradient's norm; gradients of earlier micro-batches are set aside, unchanged."""
        params = self.sampler.trainable.values()
        self._accumulated = {p: p.grad for p in params if p.grad is not None}
        for p in self._accumulated:
            p.grad = None
        self._norms, self._phase = {}, "measure"
        probe = self.sampler._probe
        bound = probe if isinstance(probe, BoundProbe) else None
        try:
            if bound is not None:  # the step's own pass brings the same once more
                bound.counting = False
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        finally:
            self._phase = "off"
            if bound is not None:
                bound.counting = True
            for p, grad in self._accumulated.items():
                self._norms.setdefault(p, torch.linalg.vector_norm(grad))
                p.grad = grad
            self._accumulated = {}

    def _step_pass(self, loss: Tensor, factor: Tensor | float) -> None:
        self._factor, self._norms, self._phase = factor, {}, "step"
        self._waiting = {group[0]: len(group) for group in self._groups.values()}
        try:
            with self.sampler.guard.stepwise():
                loss.backward()  # type: ignore[no-untyped-call]
                for p, group in self._groups.items():  # those that only earlier micro-batches reached
                    if p.grad is not None and p not in self._norms:
                        self._on_gradient(p)
                    if p is group[-1] and any(q.grad is not None for q in group):  # some that nothing reached
                        self._step_(group)
        finally:
            self._phase = "off"

    def _on_gradient(self, p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        if self._phase == "off":
            return
        if p in self._norms:
            raise UserError(
                "StepInBackward", got="a weight whose gradient arrived twice",
                why="reentrant checkpointing walks backward several times", do="use use_reentrant=False",
            )  # fmt: skip
        assert p.grad is not None
        summed = p.grad if p not in self._accumulated else p.grad + self._accumulated[p]
        self._norms[p] = torch.linalg.vector_norm(summed)
        if self._phase == "measure":
            p.grad = None
            return
        group = self._groups[p]
        self._waiting[group[0]] -= 1
        if not self._waiting[group[0]]:
            self._step_(group)

    def _step_(self, params: list[nn.Parameter]) -> None:
        """Let the optimizer see these parameters only; its state, options and hooks are the usual ones."""
        reached = {p for p in params if p.grad is not None}
        if self.max_norm is not None:
            for p in reached:
                assert p.grad is not None
                p.grad.mul_(self._factor)
        optimizer = self.sampler.optimizer
        groups = optimizer.param_groups
        # copied groups of fewer parameters: the optimizer's own options, and state by parameter, stay the same. Empty
        # ones stay too, for hooks that know a group by its place
        copies = [{**group, "params": [p for p in group["params"] if p in reached]} for group in groups]
        optimizer.param_groups = copies
        tensors = _tensors(copies)
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        _check_options(optimizer, copies, groups, tensors)
        for p in params:
            p.grad = None

    def _total(self) -> Tensor:
        """Join the norms in the order and by the operations of ``clip_grad_norm_``, to agree to the bit."""
        norms = [self._norms[p] for p in self.sampler.trainable.values() if p in self._norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        return total

    def _finite(self, norm: Tensor, why: str) -> float:
        number = float(norm)
        if math.isfinite(number):
            return number
        for p in self.sampler.trainable.values():
            p.grad = None
        raise UserError("gradients", got=f"norm {number}", why=why, do="lower the learning rate, or look at the batch")


def _tensors(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, tuple[int, Tensor]]]:
    """Each option that is a tensor: how often it was written, and its value."""
    return [
        {key: (value._version, value.clone()) for key, value in group.items() if isinstance(value, Tensor)}
        for group in groups
    ]


def _check_options(
    optimizer: torch.optim.Optimizer,
    stepped: Sequence[Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
    tensors: Sequence[Mapping[str, tuple[int, Tensor]]],
) -> None:
    """Refuse an optimizer that counts in its groups: it is called for each block, and the copies are dropped."""
    for after, before, known in zip(stepped, groups, tensors, strict=True):
        for key, value in after.items():
            # some note a default of theirs, which stays what it is
            kept = before.setdefault(key, value)
            if kept is value and key in known:  # a tensor that counts is the same object before and after
                version, number = known[key]
                same = value._version == version or torch.equal(value, number)
            else:
                same = key == "params" or kept is value or repr(kept) == repr(value)
            why, do = "it would count each block as a step", "call optimizer.step() after the backward pass"
            got = f"{type(optimizer).__name__}, whose step changes {key!r} of its groups"
            require(same, "StepInBackward", got, why, do)

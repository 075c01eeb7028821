"""The spectral rule: every hidden weight moves by a set spectral norm, whatever the optimizer, width, density or mask.

Features learn at the same speed in layers of all shapes when ``‖ΔW‖ ∝ √(fan-out / fan-in)`` in the spectral norm. Under
Adam on dense layers that is the rule of μP, under random masks that of SμPar; measuring the norm of the masked update
instead of predicting it also covers Muon, few live inputs, masks that are not random, and masks that change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError, require
from sparing.scaling.plans.planning import Plan
from sparing.scaling.roles.structure import groups_of
from sparing.scaling.sparse.layers import SparseLinear
from sparing.seeds import stream

_FIRST = 64  # iterations in a weight's first step, when nothing is known of its singular vectors


class Operator(NamedTuple):
    """A matrix [out, in] given by its products."""

    shape: tuple[int, int]  # fan-out and fan-in (counts)
    times: Callable[[Tensor], Tensor]  # v -> A v, shapes (in,) -> (out,)
    transposed: Callable[[Tensor], Tensor]  # u -> Aᵀ u, shapes (out,) -> (in,)


def spectral_norm(matrix: Operator, right: Tensor, *, iterations: int = 2) -> tuple[Tensor, Tensor]:
    """Return an estimate of the largest singular value, shape (), and the unit vector to start from next time.

    ``right`` is where to start, shape (in,), not zero. Of a zero matrix zero and ``right`` are returned.

    Source: Golub & Van Loan 2013, §8.2.1, on AᵀA.
    """
    # The estimate never exceeds the true value, and grows with every iteration. From a vector at angle θ to the right
    # singular vector, k iterations leave a relative error of at most ½ tan²θ (σ₂/σ₁)^(4k − 2) to leading order.
    norm = right.new_zeros(())
    for _ in range(iterations):
        left = matrix.times(right)
        size = left.norm()
        back = matrix.transposed(left / size)
        norm = back.norm()
        if not bool(norm > 0):  # zero, or NaN from dividing by zero
            return torch.zeros_like(norm), right
        right = back / norm
    return norm, right


class _HiddenWeight(NamedTuple):
    """One hidden weight in a step."""

    name: str
    parameter: nn.Parameter
    group: dict[str, Any]
    before: Tensor  # the weight as it was


class Spectral(torch.optim.Optimizer):
    """An optimizer around another: hidden weights take its direction, at a spectral norm of ``lr · √(out/in) · ref``.

    ``lr`` is the base model's, free of the plan's factor (the group's ``lr`` over its ``lr_scale``), so schedulers work
    as usual. Other parameters step as in the inner optimizer. Weight decay of hidden weights is decoupled and as strong
    as the group says, ``lr · weight_decay`` of the group, also where the inner optimizer would add it to the gradient.
    A packed query-key-value matrix counts as one, and so does the block-diagonal one of a grouped convolution. The
    estimate never exceeds the norm; where singular values are nearly equal, as Muon makes them on dense layers, two
    iterations fall short of it by up to a fifth, and the step is too large by as much. Give the inner optimizer its
    groups by ``plan.groups``; groups that hold both hidden and other weights are split in two.

    Example:
        >>> from sparing.scaling import plan
        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 2))
        >>> chosen = plan(layers)
        >>> optimizer = Spectral(torch.optim.SGD(chosen.groups(layers, lr=0.5)), layers, chosen)
        >>> before = layers[1].weight.detach().clone()
        >>> layers(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> step = layers[1].weight.detach() - before
        >>> round(float(torch.linalg.matrix_norm(step, ord=2)), 4)
        0.5
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        plan: Plan,
        masks: Mapping[str, Tensor] | None = None,
        *,
        reference: Mapping[str, float] | float | None = 1.0,
        iterations: int = 2,
        seed: int = 0,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: AdamW, Adam, SGD, Muon, or any whose step does not look at the weights but for their decay.
            model: The model it steps.
            plan: Says which weights are hidden.
            masks: Canonical name -> mask; the update is masked before it is measured.
            reference: Spectral norm of an update at ``lr = 1`` and a square layer: one number, or by name what
                ``norms()`` gave in a dense run of the base model, which then steps as under its plain optimizer. None
                only measures.
            iterations: Power iterations a step, each two products with the update (count).
            seed: Of the vectors to begin with.

        Raises:
            UserError: If a reference is missing or not positive, iterations are fewer than one, or a hidden weight is
                no matrix and no convolution.
        """
        require(iterations >= 1, "iterations", iterations, "the norm must be measured", "give at least one")
        names = {id(parameter): name for name, parameter in named_parameters(model).items()}
        hidden = {name for name, entry in plan.entries.items() if entry.role == "hidden"}
        _check(plan, hidden & {names.get(id(p), "") for g in optimizer.param_groups for p in g["params"]}, reference)
        _split_(optimizer, {key for key, name in names.items() if name in hidden})
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner, self.model, self.masks = optimizer, model, masks or {}
        self.reference, self.iterations, self.seed = reference, iterations, seed
        self._hidden, self._transposed = hidden, {name for name in hidden if plan.entries[name].transposed}
        self._right: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}
        self._share_state()

    def _share_state(self) -> None:
        """Share the groups and the state of the inner optimizer: schedulers and checkpoints then see one set."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for group in self.param_groups:
            if "muon_growth" in group:
                # Whatever Muon makes of a rate, the norm of the step is set here.
                group["lr_measured"] = self.reference is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that come later: the plan does not know them."""
        if "inner" in self.__dict__:
            raise UserError("param group", got="a new one", why="the plan knows no such weights", do="plan again")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss again; called once, before any weight moves.

        Returns:
            The loss, if there is a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weights = list(self._hidden_weights())
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        for weight in weights:
            # What the inner step leaves in a zeroed weight is the update and nothing else.
            weight.parameter.zero_()
            weight.group["weight_decay"] = 0.0
        try:
            self.inner.step()
        finally:  # also after a step that raised, which would leave the weights zero
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
            for weight in weights:
                self._apply_update(weight)
        return loss

    def _hidden_weights(self) -> Iterator[_HiddenWeight]:
        """Yield the hidden weights that have gradients, with copies of what they are."""
        names = {id(parameter): name for name, parameter in named_parameters(self.model).items()}
        for group in self.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), "")
                if name in self._hidden and parameter.grad is not None:
                    yield _HiddenWeight(name, parameter, group, parameter.detach().clone())

    def _apply_update(self, weight: _HiddenWeight) -> None:
        """Scale the update, and apply it to the weight as it was."""
        update = weight.parameter.detach().clone()
        layer = submodule(self.model, weight.name.rpartition(".")[0])
        # Masked before it is measured: what falls off the mask moves nothing.
        if not isinstance(layer, SparseLinear) and weight.name in self.masks:
            update.mul_(self.masks[weight.name])
        exact = update if update.dtype == torch.float64 else update.float()
        if isinstance(layer, SparseLinear) and weight.name.endswith("weight"):
            at = layer.pattern  # each product costs one pass over the values
            operator = Operator(at.shape, at.matrix(exact).mv, at.transposed_matrix(exact).mv)
        elif (groups := groups_of(layer)) > 1:
            operator = _block_diagonal(exact, groups, transposed=weight.name in self._transposed)
        else:
            matrix = exact.flatten(1).t() if weight.name in self._transposed else exact.flatten(1)
            operator = Operator((len(matrix), matrix.shape[1]), matrix.mv, matrix.t().mv)
        scale = self._scale(weight, operator, exact)
        keep = 1 - float(weight.group["lr"]) * float(weight.group.get("weight_decay", 0.0))
        weight.parameter.copy_(weight.before.mul_(keep).add_(update * scale))

    def _scale(self, weight: _HiddenWeight, operator: Operator, update: Tensor) -> Tensor | float:
        """Return the factor on the update, and record its norm."""
        name = weight.name
        norm = update.new_zeros(())
        if name in self._right:  # start from the last step's singular vector
            norm, right = spectral_norm(operator, self._right[name].to(update), iterations=self.iterations)
        # From a vector in the kernel iterations lead nowhere: then, as in the first step, start at random.
        if not bool(norm > 0):
            draws = torch.randn(operator.shape[1], generator=stream(self.seed, "spectral", name), dtype=torch.float32)
            norm, right = spectral_norm(operator, draws.to(update), iterations=max(self.iterations, _FIRST))
        if not bool(norm > 0):
            return 0.0
        rate, ratio = float(weight.group["lr"]), math.sqrt(operator.shape[0] / operator.shape[1])
        self._right[name], self._norms[name] = right, norm * self._forward(name) / (rate * ratio)
        if self.reference is None:
            return 1.0
        wanted = self.reference[name] if isinstance(self.reference, Mapping) else self.reference
        # The plan's factor on the rate is Adam's; the rule here has its own, so the base's rate is what counts.
        base_rate = rate / float(weight.group.get("lr_scale", 1.0))
        # the layer multiplies its input by its own number, and with it whatever its weights change by
        return (wanted * ratio * base_rate / (norm * self._forward(name))).to(weight.before)

    def _forward(self, name: str) -> Tensor | float:
        """Return the number by which a layer multiplies what this weight of it acts on."""
        held = submodule(self.model, name.rpartition(".")[0])._buffers.get("forward_scale")
        return 1.0 if held is None else held

    def norms(self) -> dict[str, float]:
        """Return the last measured norm of the inner optimizer's update, at ``lr = 1`` and over √(fan-out/fan-in).

        Returns:
            Canonical name -> number; in the units of ``reference``.
        """
        return {name: float(norm) for name, norm in self._norms.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict with the singular vectors under ``spectral``."""
        return {**self.inner.state_dict(), "spectral": {name: right.clone() for name, right in self._right.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; the rest of the run is then the same to the bit.

        Args:
            state_dict: The state.

        Raises:
            UserError: If it comes from the inner optimizer alone.
        """
        if "spectral" not in state_dict:
            why = "it has no singular vectors"
            raise UserError("state dict", got="that of a plain optimizer", why=why, do="load it into optimizer.inner")
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "spectral"})
        self._right = {name: right.clone() for name, right in state_dict["spectral"].items()}
        self._share_state()


def _block_diagonal(weight: Tensor, groups: int, *, transposed: bool) -> Operator:
    """Return the matrix of a grouped convolution, of which each group has a block."""
    rows = weight.reshape(groups, len(weight) // groups, -1)
    blocks = rows.mT if transposed else rows
    return Operator(
        (groups * blocks.shape[1], groups * blocks.shape[2]),
        lambda right: (blocks @ right.view(groups, -1, 1)).flatten(),
        lambda left: (blocks.mT @ left.view(groups, -1, 1)).flatten(),
    )


def _check(plan: Plan, names: set[str], reference: Mapping[str, float] | float | None) -> None:
    """Refuse references that are missing or not positive, and weights that are not matrices."""
    for name in sorted(names):
        entry = plan.entries[name]
        if len(entry.shape) != 2 and not entry.kind.startswith("Conv"):
            got = f"{entry.kind} of shape {entry.shape}"
            raise UserError(f"spectral rule for {name}", got=got, why="it is no matrix", do="give it another role")
        wanted = reference.get(name) if isinstance(reference, Mapping) else reference
        if isinstance(reference, Mapping) and wanted is None:
            do = "pass norms() of a base model of the same depth"
            raise UserError("reference", got=f"none for {name}", why="each hidden weight needs one", do=do)
        if wanted is not None:
            require(wanted > 0, "reference", wanted, f"it is the norm of an update, here of {name}", "give one above 0")


def _split_(optimizer: torch.optim.Optimizer, hidden: set[int]) -> None:
    """Split every group of an optimizer that holds both hidden and other weights."""
    parts = []
    for group in optimizer.param_groups:
        inside = [id(parameter) in hidden for parameter in group["params"]]
        lists = {key: group[key] for key in ("params", "param_names") if key in group}
        for wanted in (True, False) if any(inside) and not all(inside) else ():
            chosen = {k: [e for e, flag in zip(v, inside, strict=True) if flag is wanted] for k, v in lists.items()}
            parts.append(group | chosen)
        parts += [group] if not any(inside) or all(inside) else []
    optimizer.param_groups[:] = parts

"""MOON: a client's representation of its rows, drawn to that of the global model, away from that of its last model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.blocks.modes import evaluating
from sparing.errors import UserError, require
from sparing.federated.methods.fedavg import FedAvg, NoTerm
from sparing.federated.methods.interface import Sent, State, Term, Vector


@dataclass(frozen=True, slots=True)
class MOON(FedAvg):
    """Clients add μ · mean over the batch of −log(e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + e^{cos(z, z_p)/τ})).

    z is the representation by the client's model, z_g by the global model, z_p by the client's model after its last
    round, the initial model if there was none; z_g and z_p are constants, computed in evaluation mode. A client's
    state is a whole model with its buffers, and each step has three more forward passes.

    Source: Li et al. 2021, "Model-Contrastive Federated Learning" (arXiv:2103.16257), Equation 3.
    """

    mu: float = 1.0
    """Weight of the contrastive loss μ, ≥ 0; the usual grid is 0.001, 0.01, 0.1, 1, 5, 10."""

    temperature: float = 0.5
    """τ, > 0."""

    features: str | None = None
    """Path of the module whose output is the representation, such as a projection head; None takes what the last
    linear layer receives."""

    def __post_init__(self) -> None:
        require(self.mu >= 0, "MOON.mu", self.mu, "clients would be driven apart", "pass mu >= 0, such as 1")
        require(self.temperature > 0, "MOON.temperature", self.temperature, "cosines are divided by it", "pass 0.5")

    @property
    def stackable(self) -> bool:
        """False: the term needs the model itself."""
        return False

    def client_state(self, params: Vector) -> State:
        """Return the initial model as the last one; its buffers are those of the model received."""
        return {"previous": dict(params)}

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the contrast with the global and the last model."""
        last = {**sent.buffers, **state.get("previous_buffers", {}), **state["previous"]}
        return _Contrast({**sent.buffers, **sent.params}, last, self.mu, self.temperature, self.features)

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """Return a copy of the client's model, and nothing to send."""
        model = {name: params.get(name, value).detach().clone() for name, value in sent.params.items()}
        statistics = {name: value.detach().clone() for name, value in (buffers or {}).items()}
        return {"previous": model, "previous_buffers": statistics}, {}


@dataclass(frozen=True, slots=True, eq=False)
class _Contrast(NoTerm):
    """The contrastive loss of one round; the models are parameters and buffers by name."""

    received: Vector
    last: Vector
    mu: float
    temperature: float
    features: str | None

    def loss(self, model: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Return μ times the contrast of a batch."""
        # A second pass of the client's model, on copies of the buffers, so that running statistics count a batch once.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        z = representation(model, buffers, inputs, self.features)
        with torch.no_grad(), evaluating(model):
            near = representation(model, self.received, inputs, self.features)
            far = representation(model, self.last, inputs, self.features)
        logits = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], dim=1) / self.temperature
        first = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return self.mu * F.cross_entropy(logits, first)


def representation(model: nn.Module, values: Vector, inputs: Tensor, features: str | None) -> Tensor:
    """Return the representation of a batch, shape (rows, width); batch norm in training mode writes into ``values``."""
    seen: list[Tensor] = []
    if features is None:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        handles = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for module in linear]
    else:
        try:
            module = model.get_submodule(features)
        except AttributeError:
            why, do = "the model has no module of that path", "pass one of model.named_modules()"
            raise UserError("MOON.features", got=repr(features), why=why, do=do) from None
        handles = [module.register_forward_hook(lambda _, args, output: seen.append(output))]
    try:
        torch.func.functional_call(model, values, (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    why, do = "no linear layer receives a representation", "pass features=, the path of the module whose output it is"
    require(bool(seen), "MOON.features", features, why, do)
    # Of the last linear layer that ran, which need not be the one registered last.
    return seen[-1].flatten(1)

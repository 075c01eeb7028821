"""A client's round in plain steps: the reference that every engine and every host equals.

    bench = workbench(method.adapt(make_model()), method, schedule, seed=1)
    visit = train(bench, Client(x, y), sent, state, number=0, client_id=7)
    visit.update.params, visit.state

A client's order of rows, its blocks and its dropout come from streams of its own, so who trains before whom, and in
which process, changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.federated.methods import Method, Sent, State, Update, Vector
from sparing.federated.sampling import body_of, resting
from sparing.federated.settings import Schedule, rate_at
from sparing.federated.steps import clip_, sgd_
from sparing.seeds import number as seed_number
from sparing.seeds import stream

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of a batch -> mean loss, shape ()."""


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """The rows of one client."""

    inputs: Tensor
    """What goes into the model, shape (n, ...)."""

    targets: Tensor
    """What the loss compares with, shape (n, ...)."""

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True, eq=False)
class Workbench:
    """A model to train clients on, one after another, and what does not change between them."""

    model: nn.Module  # as ``Method.adapt`` returned it; every round overwrites its parameters and buffers
    method: Method
    schedule: Schedule
    seed: int
    loss: Loss
    params: dict[str, nn.Parameter]  # those that train, by canonical name
    norms: frozenset[str]  # names of the parameters and buffers of batch-norm layers
    body: tuple[tuple[str, ...], ...]  # parameter names of each body block, where clients draw blocks


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """What a client's round leaves behind."""

    update: Update
    state: State  # of the method; kept only if the server received the update
    own: Vector = field(default_factory=dict)  # batch norm that stays with the client, for batch_norm="local"
    steps: int = 0
    loss: float = 0.0  # mean over the steps, without the method's term


def seeded_model(method: Method, make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make and adapt the model that ``simulate`` starts with; torch's global generator is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_number(seed, "federated", "model"))
        return method.adapt(make_model())


def workbench(
    model: nn.Module, method: Method, schedule: Schedule, *, seed: int = 0, loss: Loss = F.cross_entropy
) -> Workbench:
    """Check a model and gather what every client's round needs; ``model`` is as ``method.adapt`` returned it."""
    params = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    require(bool(params), "model", type(model).__name__, "it has no parameter that trains", "unfreeze some")
    odd = [name for name, value in {**params, **buffers_of(model)}.items() if value.is_complex()]
    require(
        not odd, "model", f"complex {odd[:1]}", "means, norms and signs are of real numbers", "hold two real tensors"
    )
    body = body_of(model, schedule)
    return Workbench(model, method, schedule, seed, loss, params, norm_names(model), body)


def norm_names(model: nn.Module) -> frozenset[str]:
    """Return the names of all parameters and buffers of batch-norm layers."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return frozenset(f"{path}.{name}" if path else name for path, module in layers for name in module.state_dict())


def buffers_of(model: nn.Module) -> Vector:
    """Return the buffers that a state dictionary has, by name; they share memory with the model."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = model.state_dict()
    return {name: value for name, value in kept.items() if name not in params and isinstance(value, Tensor)}


def load_(model: nn.Module, params: Vector, buffers: Vector) -> None:
    """Write parameters and buffers into a model, by canonical name; a name that it lacks is refused."""
    here = {**buffers_of(model), **named_parameters(model)}
    with torch.no_grad():
        for name, value in (*params.items(), *buffers.items()):
            if name not in here:
                raise UserError("vector", got=repr(name), why="the model has no such tensor", do="pass its own vectors")
            here[name].copy_(value)


def batches(rows: int, schedule: Schedule, source: torch.Generator, *, normed: bool) -> Iterator[Tensor]:
    """Yield the row numbers of each step of a client's round, shape (batch,), int64; a new order every epoch."""
    require(rows > 0, "client", "no rows", "there is nothing to train on", "split so that every client has rows")
    size = schedule.batch_size
    single = normed and schedule.drop_last_single and rows > size and rows % size == 1
    used = rows - single
    sizes = [min(size, used - start) for start in range(0, used, size)]
    made = epoch = 0
    while epoch < schedule.local_epochs or made < schedule.least_steps:
        for rows_now in torch.randperm(rows, generator=source)[:used].split_with_sizes(sizes):
            if epoch >= schedule.local_epochs and made >= schedule.least_steps:
                return
            yield rows_now
            made += 1
        epoch += 1


def steps_of(rows: int, schedule: Schedule, *, normed: bool) -> int:
    """Return how many batches ``batches`` yields: the optimizer steps of a client in a round."""
    single = normed and schedule.drop_last_single and rows > schedule.batch_size and rows % schedule.batch_size == 1
    return max(schedule.local_epochs * math.ceil((rows - single) / schedule.batch_size), schedule.least_steps)


def order_of(bench_seed: int, number: int, client: int) -> torch.Generator:
    """Return the stream of a client's order of rows in a round."""
    return stream(bench_seed, "federated", "order", number, client)


def local_round(
    model: nn.Module,
    client: Client,
    method: Method,
    sent: Sent,
    state: State,
    schedule: Schedule,
    number: int,
    seed: int,
    client_id: int,
    *,
    loss: Loss = F.cross_entropy,
    own: Vector | None = None,
) -> Visit:
    """Train one client for one round on a model that is at hand; see ``train``."""
    bench = workbench(model, method, schedule, seed=seed, loss=loss)
    return train(bench, client, sent, state, number=number, client_id=client_id, own=own)


def train(
    bench: Workbench,
    client: Client,
    sent: Sent,
    state: State,
    *,
    number: int,
    client_id: int,
    own: Vector | None = None,
) -> Visit:
    """Train one client for one round (0 is the first): the step that all engines and hosts share.

    Each step: gradient of the batch's mean loss and of ``Term.loss``; ``Term.add_``; clipping; SGD with momentum from
    zero. The model's parameters and buffers are overwritten; torch's global generator (dropout) is seeded and restored.
    """
    received = received_by(bench, sent, own or {})
    rest = resting(bench.body, bench.schedule, number, client_id, bench.seed)
    names = [name for name in bench.params if name not in rest]
    load_(bench.model, received.params, received.buffers)
    lr = rate_at(bench.schedule, number)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_number(bench.seed, "federated", "client", number, client_id))
        losses = _steps(bench, client, received, state, names, order_of(bench.seed, number, client_id), lr)
    params = {name: bench.params[name].detach().clone() for name in names}
    buffers = {name: value.clone() for name, value in buffers_of(bench.model).items()}
    mean = float(torch.stack(losses).double().mean())
    return conclude(bench, client, received, params, buffers, state, client_id, len(losses), lr, mean)


def conclude(
    bench: Workbench,
    client: Client,
    received: Sent,
    params: Vector,
    buffers: Vector,
    state: State,
    client_id: int,
    steps: int,
    lr: float,
    loss: float,
) -> Visit:
    """Let the method finish a client's round, and gather what it leaves behind."""
    fresh, extras = bench.method.finish(received, params, state, steps, lr, buffers)
    weight = float(len(client)) if bench.schedule.weights == "size" else 1.0
    update = Update(client_id, params, weight, extras, buffers)
    own = {}
    if bench.schedule.batch_norm == "local":
        own = {name: value for name, value in {**params, **buffers}.items() if name in bench.norms}
    return Visit(update, fresh, own, steps, loss)


def received_by(bench: Workbench, sent: Sent, own: Vector) -> Sent:
    """What a client begins with: its own batch norm, where it keeps one, in place of the server's."""
    if not own or bench.schedule.batch_norm != "local":
        return sent
    params = {name: own.get(name, value) for name, value in sent.params.items()}
    return replace(sent, params=params, buffers={name: own.get(name, value) for name, value in sent.buffers.items()})


def _steps(
    bench: Workbench,
    client: Client,
    sent: Sent,
    state: State,
    names: Sequence[str],
    source: torch.Generator,
    lr: float,
) -> list[Tensor]:
    """Make all steps of a round in place; return the losses."""
    term = bench.method.begin(sent, state)
    leaves = [bench.params[name] for name in names]
    values = {name: leaf.detach() for name, leaf in zip(names, leaves, strict=True)}
    momenta: Vector = {}
    losses: list[Tensor] = []
    bench.model.train()
    for rows in batches(len(client), bench.schedule, source, normed=bool(bench.norms)):
        inputs = client.inputs[rows]
        outputs = bench.model(inputs)
        loss = bench.loss(outputs, client.targets[rows])
        losses.append(loss.detach())
        extra = term.loss(bench.model, inputs, outputs)
        total = loss if extra is None else loss + extra
        found = torch.autograd.grad(total, leaves, materialize_grads=True)
        # Copies: two parameters that are added to each other have one and the same tensor as their gradient.
        grads = {name: grad.clone() for name, grad in zip(names, found, strict=True)}
        with torch.no_grad():
            term.add_(values, grads, lr)
            if bench.schedule.clip is not None:
                clip_(grads, bench.schedule.clip)
            sgd_(values, grads, momenta, lr, bench.schedule)
    return losses

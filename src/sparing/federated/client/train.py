"""A client's round in plain steps: the reference that every engine and every host equals.

    setup = client_setup(method.adapt(make_model()), method, schedule, seed=1)
    result = train(setup, Client(x, y), sent, state, number=0, client_id=7)
    result.update.params, result.state

A client's order of rows, its blocks and its dropout come from its own random streams, so the order of clients, and
the process, change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from sparing.blocks import find_blocks, named_parameters
from sparing.errors import UserError, require
from sparing.federated.client.optimizers import Moments, clip_, step_
from sparing.federated.client.statistics import Kept, kept_by_layers, refuse_lost, scratch_of
from sparing.federated.methods.ditto import ditto_of
from sparing.federated.methods.interface import Method, Sent, State, Term, Update, Vector
from sparing.federated.methods.lora import one_way_buffers
from sparing.federated.methods.private import Private
from sparing.federated.methods.secure import SecureSum
from sparing.federated.placement import HOST, device_of, placed, seeded, sent_on
from sparing.federated.settings import Schedule, rate_at
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


def require_tensors(client: Client, what: str) -> None:
    """Refuse rows that are no tensors, such as NumPy's arrays; ``what`` names whose they are."""
    rows = isinstance(client.inputs, Tensor) and isinstance(client.targets, Tensor)
    got = f"{type(client.inputs).__name__} and {type(client.targets).__name__}"
    require(rows, what, got, "rows are tensors", "pass Client(torch.tensor(inputs), torch.tensor(targets))")


@dataclass(frozen=True, slots=True, eq=False)
class ClientSetup:
    """A model to train clients on, one after another, and what does not change between them."""

    model: nn.Module  # as ``Method.adapt`` returned it; every round overwrites its parameters and buffers
    method: Method
    schedule: Schedule
    seed: int
    loss: Loss
    params: dict[str, nn.Parameter]  # those that train, by canonical name
    norms: frozenset[str]  # names of the parameters and buffers of batch-norm layers
    body: tuple[tuple[str, ...], ...]  # parameter names of each body block; empty unless clients draw blocks
    one_way: frozenset[str] = frozenset()  # buffers that the server sends and clients do not send back
    kept: Kept = field(default_factory=Kept)  # what layers keep of the rows they saw
    scratch: Vector = field(default_factory=dict)  # buffers that no state dictionary has, as a new model has them
    device: torch.device = HOST  # of the model

    def returned(self, buffers: Vector) -> Vector:
        """Those of some buffers that clients send back."""
        return {name: value for name, value in buffers.items() if name not in self.one_way}


@dataclass(frozen=True, slots=True, eq=False)
class ClientResult:
    """What a client's round leaves behind."""

    update: Update
    state: State  # of the method; kept only if the server received the update
    local_bn: Vector = field(default_factory=dict)  # batch norm that stays with the client, for batch_norm="local"
    steps: int = 0
    loss: float = 0.0  # mean over the steps, without the method's term


def initial_model(method: Method, make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make and adapt the model that ``simulate`` starts with; torch's global generator is restored."""
    with seeded(seed_number(seed, "federated", "model")):
        return method.adapt(make_model())


def client_setup(
    model: nn.Module, method: Method, schedule: Schedule, *, seed: int = 0, loss: Loss = F.cross_entropy
) -> ClientSetup:
    """Check a model and gather what every client's round needs; ``model`` is as ``method.adapt`` returned it."""
    unmade = [name for name, p in model.named_parameters() if is_lazy(p)]
    why, do = "it gets its shape in the first forward pass", "run the model on a row in make_model, and return it"
    require(not unmade, "model", f"{unmade[:1]} without a shape", why, do)
    params = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    require(bool(params), "model", type(model).__name__, "it has no parameter that trains", "unfreeze some")
    complex_names = [name for name, value in {**params, **buffers_of(model)}.items() if value.is_complex()]
    why, do = "means, norms and signs are of real numbers", "hold two real tensors"
    require(not complex_names, "model", f"complex {complex_names[:1]}", why, do)
    body: tuple[tuple[str, ...], ...] = ()
    if schedule.blocks is not None:
        body = tuple(tuple(block.params) for block in find_blocks(model) if block.role == "body")
        why = f"the body has {len(body)} blocks"
        require(schedule.blocks <= len(body), "Schedule.blocks", schedule.blocks, why, f"pass at most {len(body)}")
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm)]
    norms = frozenset(f"{path}.{name}" if path else name for path, module in layers for name in module.state_dict())
    kept = kept_by_layers(model)
    if kept.others:
        got = f'"{schedule.batch_norm}" with a {kept.kind} at {kept.others[0]}'
        why, do = "that knows batch norm alone, and this layer has running statistics too", 'pass batch_norm="average"'
        require(schedule.batch_norm == "average", "Schedule.batch_norm", got, why, do)
    return ClientSetup(
        model, method, schedule, seed, loss, params, norms, body, one_way_buffers(model), kept, scratch_of(model),
        device_of(model),
    )  # fmt: skip


def buffers_of(model: nn.Module) -> Vector:
    """Return the buffers that a state dictionary has, by name; they share memory with the model."""
    # remove_duplicate=False: a state dictionary has tied parameters under each of their names.
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state_dict = model.state_dict()
    return {name: value for name, value in state_dict.items() if name not in params and isinstance(value, Tensor)}


def load_(model: nn.Module, params: Vector, buffers: Vector) -> None:
    """Write parameters and buffers into a model, by canonical name; a name that it lacks is refused."""
    here = {**buffers_of(model), **named_parameters(model)}
    with torch.no_grad():
        for name, value in (*params.items(), *buffers.items()):
            if name not in here:
                raise UserError("vector", got=repr(name), why="the model has no such tensor", do="pass its own vectors")
            here[name].copy_(value)


def reset_(setup: ClientSetup) -> None:
    """Give buffers that do not travel their first values: what one client leaves there is not for the next."""
    if setup.scratch:
        here = dict(setup.model.named_buffers())
        for name, value in setup.scratch.items():
            here[name].copy_(value)


def batches(rows: int, schedule: Schedule, source: torch.Generator, *, normed: bool) -> Iterator[Tensor]:
    """Yield the row numbers of each step of a client's round, shape (batch,), int64; a new order every epoch."""
    require(rows > 0, "client", "no rows", "there is nothing to train on", "split so that every client has rows")
    size = schedule.batch_size
    used = _used_rows(rows, schedule, normed)
    sizes = [min(size, used - start) for start in range(0, used, size)]
    made = epoch = 0
    while epoch < schedule.local_epochs or made < schedule.least_steps:
        # Permute all rows, also one that is dropped, so that the order does not depend on the model.
        for batch in torch.randperm(rows, generator=source)[:used].split_with_sizes(sizes):
            if epoch >= schedule.local_epochs and made >= schedule.least_steps:
                return
            yield batch
            made += 1
        epoch += 1


def count_steps(rows: int, schedule: Schedule, *, normed: bool) -> int:
    """Return how many batches ``batches`` yields: the optimizer steps of a client in a round."""
    used = _used_rows(rows, schedule, normed)
    return max(schedule.local_epochs * math.ceil(used / schedule.batch_size), schedule.least_steps)


def _used_rows(rows: int, schedule: Schedule, normed: bool) -> int:
    """Rows of an epoch: batch norm has no variance from a last batch of one row, so that one may be dropped."""
    size = schedule.batch_size
    return rows - (normed and schedule.drop_last_single and rows > size and rows % size == 1)


def frozen_names(setup: ClientSetup, number: int, client: int) -> frozenset[str]:
    """Return the parameters that a client does not train in a round: those of the body blocks not drawn for it.

    What is no body block (embedding, tail, head) always trains and travels. Over many clients every block is trained,
    and the server averages each parameter over those who sent it.
    """
    if setup.schedule.blocks is None:
        return frozenset()
    # Labelled by round and client: what others draw, and in which order, changes nothing.
    order = torch.randperm(len(setup.body), generator=stream(setup.seed, "federated", "blocks", number, client))
    return frozenset(name for block in order[setup.schedule.blocks :].tolist() for name in setup.body[block])


def row_order(seed: int, number: int, client: int) -> torch.Generator:
    """Return the stream of a client's order of rows in a round."""
    return stream(seed, "federated", "order", number, client)


def personal_order(seed: int, number: int, client: int) -> torch.Generator:
    """Return the stream of the order of rows in which a client trains a model of its own in a round."""
    return stream(seed, "federated", "personal order", number, client)


def train(
    setup: ClientSetup, client: Client, sent: Sent, state: State, *, number: int, client_id: int,
    local_bn: Vector | None = None,
) -> ClientResult:  # fmt: skip
    """Train one client for one round (0 is the first): the step that all engines and hosts share.

    Each step: gradient of the batch's mean loss and of ``Term.loss``; ``Term.add_``; clipping; the schedule's
    optimizer, with moments from zero. The model's parameters and buffers are overwritten; torch's global generators
    (dropout) are seeded and restored. All arguments may lie elsewhere than the model: each batch moves there, the
    update comes back on the model's device, and what the client keeps in host memory.
    """
    sent, state = sent_on(sent, setup.device), placed(state, setup.device)
    received = received_model(setup, sent, placed(local_bn or {}, setup.device))
    frozen = frozen_names(setup, number, client_id)
    names = [name for name in setup.params if name not in frozen]
    load_(setup.model, received.params, received.buffers)
    reset_(setup)
    lr = rate_at(setup.schedule, number)
    with seeded(seed_number(setup.seed, "federated", "client", number, client_id)):
        term, order = setup.method.begin(received, state), row_order(setup.seed, number, client_id)
        losses = _steps(setup, client, term, names, order, lr)
    params = {name: setup.params[name].detach().clone() for name in names}
    buffers = {name: value.clone() for name, value in setup.returned(buffers_of(setup.model)).items()}
    mean = float(torch.stack(losses).double().mean())
    ditto = ditto_of(setup.method)
    if ditto is not None:
        load_(setup.model, *ditto.personal(state, received))
        reset_(setup)
        with seeded(seed_number(setup.seed, "federated", "personal", number, client_id)):
            _steps(setup, client, ditto.spring(received), names, personal_order(setup.seed, number, client_id), lr)
        own = {name: value.detach().clone() for name, value in setup.params.items()}
        counted = {name: value.clone() for name, value in setup.returned(buffers_of(setup.model)).items()}
        state = ditto.kept(state, own, counted)
    done = len(losses), lr, mean, number
    return finish_round(setup, client, received, params, buffers, state, client_id, *done, base=sent.params)


def finish_round(
    setup: ClientSetup, client: Client, received: Sent, params: Vector, buffers: Vector, state: State, client_id: int,
    steps: int, lr: float, loss: float, number: int, *, base: Vector | None = None,
) -> ClientResult:  # fmt: skip
    """Let the method finish a client's round, and gather what it leaves behind.

    ``base`` is what the server sent, where the client received other weights of its own in its place.
    """
    fresh, extras = setup.method.finish(received, params, state, steps, lr, buffers)
    weight = float(len(client)) if setup.schedule.weights == "size" else 1.0
    if isinstance(setup.method, Private | SecureSum):
        refuse_lost(buffers, received.buffers, setup.norms, setup.method.name)
    # The state keeps what the client knows; only what it sends is clipped and noised.
    sends = params
    if isinstance(setup.method, Private):
        # against the server's model, as the server counts it: a client's own weights are what it learned in all rounds
        sends = setup.method.send(received.params if base is None else base, params, number, client_id)
    update = Update(client_id, sends, weight, extras, buffers)
    local_bn = {}
    if setup.schedule.batch_norm == "local":
        local_bn = {name: value for name, value in {**params, **buffers}.items() if name in setup.norms}
    return ClientResult(update, placed(fresh, HOST), placed(local_bn, HOST), steps, loss)


def received_model(setup: ClientSetup, sent: Sent, local_bn: Vector) -> Sent:
    """What a client starts from: its own batch norm, where it keeps one, in place of the server's."""
    if not local_bn or setup.schedule.batch_norm != "local":
        return sent
    params = {name: local_bn.get(name, value) for name, value in sent.params.items()}
    buffers = {name: local_bn.get(name, value) for name, value in sent.buffers.items()}
    return replace(sent, params=params, buffers=buffers)


def _steps(
    setup: ClientSetup, client: Client, term: Term, names: Sequence[str], source: torch.Generator, lr: float
) -> list[Tensor]:
    """Make all steps of a round in place; return the losses."""
    # ``values`` share memory with the parameters: a step in place is a step of the model.
    leaves = [setup.params[name] for name in names]
    values = {name: leaf.detach() for name, leaf in zip(names, leaves, strict=True)}
    moments: Moments = {}
    losses: list[Tensor] = []
    setup.model.train()
    order = batches(len(client), setup.schedule, source, normed=bool(setup.norms))
    for at, rows in enumerate(order):
        inputs, targets = client.inputs[rows].to(setup.device), client.targets[rows].to(setup.device)
        outputs = setup.model(inputs)
        loss = setup.loss(outputs, targets)
        losses.append(loss.detach())
        extra = term.loss(setup.model, inputs, outputs)
        total = loss if extra is None else loss + extra
        found = torch.autograd.grad(total, leaves, materialize_grads=True)
        # Copied: two parameters that are added to each other have one and the same tensor as their gradient.
        grads = {name: grad.clone() for name, grad in zip(names, found, strict=True)}
        with torch.no_grad():
            term.add_(values, grads, lr)
            if setup.schedule.clip is not None:
                clip_(grads, setup.schedule.clip)
            step_(values, grads, moments, lr, setup.schedule, at)
    return losses

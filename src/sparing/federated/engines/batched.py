"""Clients with stacked parameters: one forward and one backward train all clients of a round at once.

Every parameter has a leading client dimension, the loss is the sum of the clients' batch means, and its gradient with
respect to one client's slice is that client's own. Nets of known layers run layer by layer (``engines.stacked``):
perceptrons as batched matrix products, convolutional and residual nets as grouped convolutions with batch norm by
client. Other models run under ``torch.func.vmap``, which knows no batch norm and is slower for convolutions.

Results equal the plain loop up to the order of sums inside a product or a mean; AdamW makes more of that difference
where gradients are near its ε.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.errors import UserError
from sparing.federated.client.optimizers import Moments, clip_, first_clients, step_
from sparing.federated.client.population import at_hand
from sparing.federated.client.train import (
    Client,
    ClientResult,
    ClientSetup,
    batches,
    finish_round,
    load_,
    personal_order,
    reset_,
    row_order,
)
from sparing.federated.engines.interface import Loop, RoundResults
from sparing.federated.engines.stacked import StackedNet, refill_, why_not_layered
from sparing.federated.methods.ditto import Ditto, ditto_of
from sparing.federated.methods.interface import Sent, State, Term, Vector
from sparing.federated.placement import placed, sent_on
from sparing.federated.server.faults import Fault
from sparing.federated.settings import rate_at

Forward = Callable[[Vector, Tensor, Vector, Tensor | None], Tensor]
"""Stacked parameters, inputs of shape (clients, rows, ...), stacked buffers of batch norm, which are changed in place,
and which rows are no padding, shape (clients, rows) or None -> outputs of shape (clients, rows, ...)."""

_NO_CLASS: Final = -100  # cross_entropy's own mark
_RANDOM: Final = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)


def why_not_stacked(setup: ClientSetup, clients: Sequence[Client]) -> str:
    """Return why clients cannot be stacked, empty if they can."""
    model = setup.model
    clients = at_hand(clients)
    layers = why_not_layered(model, clients[0].inputs) if setup.norms else ""
    random = [type(m).__name__ for m in model.modules() if isinstance(m, _RANDOM)]
    first = clients[0]
    shapes = {(tuple(c.inputs.shape[1:]), tuple(c.targets.shape[1:]), c.inputs.dtype, c.targets.dtype) for c in clients}
    reasons = {
        f"the model has batch norm, and {layers}": bool(layers),
        "each client has batch norm of its own, so they do not start alike": setup.schedule.batch_norm == "local"
        and bool(setup.norms),
        "batch norm that averages over all batches has counted others in clients' own models": any(
            m.momentum is None for m in model.modules() if isinstance(m, _BatchNorm)
        )
        and ditto_of(setup.method) is not None,
        f"the method {setup.method.name!r} needs the model or its features": not setup.method.stackable,
        "clients draw blocks, so they do not train the same parameters": setup.schedule.blocks is not None,
        f"{random[0] if random else ''} would draw other numbers than in the loop": bool(random),
        "only the cross-entropy of class numbers is known row by row": setup.loss is not F.cross_entropy,
        "targets are not class numbers, one a row": first.targets.ndim != 1 or first.targets.is_floating_point(),
        "clients differ in the shape or dtype of their rows": len(shapes) > 1,
        # cross_entropy takes its mean over the other rows only; a share of all rows would be smaller.
        "rows without a class (target −100) count in no mean": any(
            bool((c.targets == _NO_CLASS).any()) for c in clients
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def stacked_forward(model: nn.Module, inputs: Tensor) -> Forward:
    """Return the model as a function of stacked parameters: layer by layer where it can be, else under vmap."""
    if not why_not_layered(model, inputs):
        return StackedNet(model)

    def one(params: Vector, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, params, (inputs,))
        return outputs

    mapped = torch.func.vmap(one)
    return lambda params, inputs, buffers, real: mapped(params, inputs)


class Batched:
    """All clients of a round at once."""

    name = "batched"

    def __init__(self, setup: ClientSetup, clients: Sequence[Client]) -> None:
        """Read the model's layers."""
        if why := why_not_stacked(setup, clients):
            raise UserError("engine", got="batched", why=why, do='pass engine="workers" or "loop"')
        self._setup, self._clients = setup, clients
        self._loop = Loop(setup, clients).train_clients
        self._forward = stacked_forward(setup.model, clients[0].inputs)

    def train_clients(
        self, number: int, ids: Sequence[int], sent: Sent, states: Mapping[int, State], local_bn: Mapping[int, Vector]
    ) -> RoundResults:
        """Train clients; see ``Engine.train_clients``. If that raises, the loop finds out whose fault it is."""
        try:
            drawn = {client: self._clients[client] for client in ids}
            faults = [Fault(client, "crash", "no rows") for client in ids if not len(drawn[client])]
            rows = _Rows({client: one for client, one in drawn.items() if len(one)})
            with _unchanged(self._setup, sent):
                return (self._train_stacked(number, rows, sent, states) if rows.starts else []), faults
        except Exception:  # noqa: BLE001  # one client's error is everybody's here
            return self._loop(number, ids, sent, states, local_bn)

    def close(self) -> None:
        """Hold nothing."""

    def _train_stacked(self, number: int, rows: _Rows, sent: Sent, states: Mapping[int, State]) -> list[ClientResult]:
        """Train clients that have rows, all in one forward and one backward pass a step."""
        ids, seed, device = list(rows.starts), self._setup.seed, self._setup.device
        sent, states = sent_on(sent, device), {client: placed(states[client], device) for client in ids}
        orders = {client: self._order(client, rows, row_order(seed, number, client)) for client in ids}
        ranked = sorted(ids, key=lambda client: -len(orders[client]))
        lr = rate_at(self._setup.schedule, number)
        self._setup.model.train()
        full = {name: sent.params[name].expand(len(ids), *sent.params[name].shape).clone() for name in sent.params}
        # Batch norm's own; other buffers stay as they were sent.
        normed = {name: value for name, value in sent.buffers.items() if name in self._setup.norms}
        kept = {name: value.expand(len(ids), *value.shape).clone() for name, value in normed.items()}

        def begin(left: int) -> Term:
            inside = [states[client] for client in ranked[:left]]
            # What a client first has after its first round, no term needs.
            keys = [key for key in inside[0] if all(key in state for state in inside)]
            stacked = {key: {n: torch.stack([one[key][n] for one in inside]) for n in inside[0][key]} for key in keys}
            return self._setup.method.begin(sent, stacked)

        losses = self._steps(full, kept, rows, [orders[client] for client in ranked], begin, lr)
        ditto = ditto_of(self._setup.method)
        if ditto is not None:
            states = self._personal(ditto, number, rows, ranked, sent, states, lr)
        done = {}
        for at, client in enumerate(ranked):
            params, normed, state = _at(full, at), _at(kept, at), states[client]
            one, steps = rows.drawn[client], len(orders[client])
            done[client] = self._finish(sent, params, normed, state, one, client, steps, lr, losses[at], number)
        return [done[client] for client in ids]

    def _steps(
        self, full: Vector, kept: Vector, rows: _Rows, orders: Sequence[Sequence[Tensor]],
        begin: Callable[[int], Term], lr: float,
    ) -> Tensor:  # fmt: skip
        """Make all steps of a round in place, clients with most steps first; sums of losses, shape (clients,).

        ``begin`` gives the term of the first so many clients.
        """
        losses = torch.zeros(len(orders), dtype=torch.float64, device=self._setup.device)
        # Views of ``full``: steps in place reach it, and it keeps the last value of clients that are done.
        moments: Moments = {}
        # The longest first, so that clients who are done fall off the end of every tensor.
        for start, stop, left in _segments([len(order) for order in orders]):
            values = {name: value[:left] for name, value in full.items()}
            moments = first_clients(moments, left)
            counted = {name: value[:left] for name, value in kept.items()}
            term = begin(left)
            for step in range(start, stop):
                batch, share = _pad([order[step] for order in orders[:left]])
                found, grads = self._gradient(values, rows.inputs[batch], rows.targets[batch], share, counted)
                losses[:left] += found.double()
                with torch.no_grad():
                    term.add_(values, grads, lr)
                    if self._setup.schedule.clip is not None:
                        clip_(grads, self._setup.schedule.clip, stacked=True)
                    step_(values, grads, moments, lr, self._setup.schedule, step)
        return losses

    def _personal(
        self, ditto: Ditto, number: int, rows: _Rows, ranked: Sequence[int], sent: Sent, states: Mapping[int, State],
        lr: float,
    ) -> dict[int, State]:  # fmt: skip
        """Train the clients' own models; return the states with them."""
        starts = [ditto.personal(states[client], sent) for client in ranked]
        full = {name: torch.stack([params[name] for params, _ in starts]) for name in sent.params}
        normed = [name for name in sent.buffers if name in self._setup.norms]
        kept = {name: torch.stack([buffers[name] for _, buffers in starts]) for name in normed}
        seed = self._setup.seed
        orders = [self._order(client, rows, personal_order(seed, number, client)) for client in ranked]
        self._steps(full, kept, rows, orders, lambda left: ditto.spring(sent), lr)
        after = {}
        for at, client in enumerate(ranked):
            others = {name: value.clone() for name, value in self._setup.returned(starts[at][1]).items()}
            after[client] = ditto.kept(states[client], _at(full, at), {**others, **_at(kept, at)})
        return after

    def _finish(
        self, sent: Sent, params: Vector, normed: Vector, state: State, rows: Client, client: int, steps: int,
        lr: float, loss: Tensor, number: int,
    ) -> ClientResult:  # fmt: skip
        """What one of the stacked clients leaves behind."""
        back = self._setup.returned(sent.buffers)
        buffers = {name: normed[name] if name in normed else value.clone() for name, value in back.items()}
        mean = float(loss) / steps
        return finish_round(self._setup, rows, sent, params, buffers, state, client, steps, lr, mean, number)

    def _order(self, client: int, rows: _Rows, source: torch.Generator) -> list[Tensor]:
        """Row numbers of each step of a client, within the rows of all."""
        count = len(rows.drawn[client])
        normed = bool(self._setup.norms)
        return [rows.starts[client] + one for one in batches(count, self._setup.schedule, source, normed=normed)]

    def _gradient(
        self, values: Vector, inputs: Tensor, targets: Tensor, share: Tensor, buffers: Vector
    ) -> tuple[Tensor, Vector]:
        """Mean loss of each client's batch, shape (clients,), and the gradient of their sum."""
        inputs, targets = inputs.to(self._setup.device), targets.to(self._setup.device)
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        real = None if bool((share > 0).all()) else (share > 0).to(inputs.device)
        outputs = self._forward(leaves, inputs, buffers, real)
        each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        losses = (each.view_as(share) * share.to(each)).sum(1)
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        # Clones and hooks as in the loop; hooks keep sparse weights, and leaves made here have none of them.
        grads = {name: grad.clone() for name, grad in zip(leaves, found, strict=True)}
        return losses.detach(), {name: _call_hooks(self._setup.params[name], grad) for name, grad in grads.items()}


@contextlib.contextmanager
def _unchanged(setup: ClientSetup, sent: Sent) -> Iterator[None]:
    """Put the sent buffers into the model, and refuse a forward that changes one: it stands for all clients there."""
    load_(setup.model, {}, sent.buffers)
    reset_(setup)
    before = {name: value.clone() for name, value in setup.model.named_buffers()}
    yield
    # What each client would have made of it only the loop knows.
    if changed := refill_(setup.model, before):
        raise ValueError(f"the forward changes the buffer {changed[0]}")


class _Rows:
    """The rows of a round's clients in one tensor."""

    def __init__(self, drawn: Mapping[int, Client]) -> None:
        """Lay them end to end; clients that are unlike each other raise, and are trained by the loop."""
        self.drawn, start = drawn, 0
        self.starts: dict[int, int] = {}
        for client, one in drawn.items():
            self.starts[client] = start
            start += len(one)
        # Not all were looked at before the run where clients are made when drawn; and ``cat`` would convert dtypes.
        if len({(one.inputs.dtype, one.targets.dtype) for one in drawn.values()}) > 1:
            raise ValueError("clients differ in the dtype of their rows")
        if any(bool((one.targets == _NO_CLASS).any()) for one in drawn.values()):
            raise ValueError("rows without a class count in no mean")
        if drawn:
            self.inputs = torch.cat([one.inputs for one in drawn.values()])
            self.targets = torch.cat([one.targets for one in drawn.values()])


def _at(stacked: Vector, client: int) -> Vector:
    """One client's own, apart from the others' memory."""
    return {name: value[client].clone() for name, value in stacked.items()}


def _call_hooks(parameter: nn.Parameter, grads: Tensor) -> Tensor:
    """Show each client's gradient to the parameter's own hooks, as the loop does: such a hook keeps sparse weights."""
    for hook in (parameter._backward_hooks or {}).values():
        seen = [(grad, hook(grad)) for grad in grads]
        grads = torch.stack([before if after is None else after for before, after in seen])
    return grads


def _segments(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut falling step counts into segments in which the same clients are active: start, stop, number of clients."""
    ends = [0, *sorted(set(counts))]
    return [(a, b, sum(count >= b for count in counts)) for a, b in pairwise(ends)]


def _pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Row numbers, shape (clients, longest batch); short batches are padded with a row of weight 0."""
    longest = max(map(len, rows))
    if all(len(one) == longest for one in rows):
        return torch.stack(list(rows)), torch.full((len(rows), longest), 1 / longest, dtype=torch.float64)
    filled = torch.stack([F.pad(one, (0, longest - len(one)), value=int(one[0])) for one in rows])
    share = torch.stack([F.pad(torch.full((len(one),), 1 / len(one), dtype=torch.float64), (0, longest - len(one)))
                         for one in rows])  # fmt: skip
    return filled, share

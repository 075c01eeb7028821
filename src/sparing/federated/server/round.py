"""The server's half of a round, the same in the simulation and on Flower: which updates count, and what they become."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from sparing.errors import RunError, require
from sparing.federated.client.train import (
    Client,
    ClientResult,
    ClientSetup,
    Loss,
    buffers_of,
    client_setup,
    initial_model,
    load_,
    train,
)
from sparing.federated.methods.around import Around
from sparing.federated.methods.interface import Method, Sent, State, Update, Vector
from sparing.federated.methods.private import Private, draw_seed
from sparing.federated.methods.secure import SecureSum, moves_of, summed
from sparing.federated.packing import detached_copy
from sparing.federated.placement import update_on
from sparing.federated.secure.exchange import masked_sum
from sparing.federated.server.buffers import mix, recalibrate
from sparing.federated.server.closing import OpenRound
from sparing.federated.server.defences import with_buckets_of
from sparing.federated.server.faults import Fault, Guard, extra_names_of, filter_results, require_enough, require_finite
from sparing.federated.server.robust import Mean
from sparing.federated.server.trust import ROOT, check_root, with_root
from sparing.federated.settings import Schedule, sample_clients


@dataclass(frozen=True, slots=True, eq=False)
class RoundServer:
    """What the server of a run keeps between rounds; the model and its states are passed in and returned."""

    setup: ClientSetup
    clients: int  # all of them, K
    guard: Guard
    proxy: Tensor | None  # the server's own inputs, for batch_norm="recalibrate"
    mixture: bool  # whether running variances are those of the mixture
    extra_names: frozenset[str]  # of the vectors that travel beside the model
    root: Client | None  # the server's own rows, for FLTrust

    def draw(self, number: int) -> tuple[int, ...]:
        """Return the clients of a round (0 is the first)."""
        setup = self.setup
        return sample_clients(setup.schedule, self.clients, number, draw_seed(setup.method, setup.seed))

    def opened(self, asked: Sequence[int], absent: Collection[int] = ()) -> OpenRound:
        """Return a round that waits for the clients asked; with spare ones not for all of them."""
        schedule = self.setup.schedule
        needed = schedule.participants(self.clients) if schedule.spare else len(asked)
        return OpenRound(tuple(asked), needed, frozenset(absent))

    def accept(
        self,
        results: Sequence[ClientResult],
        sent: Sent,
        number: int,  # of the round, from 0
        weights: Mapping[int, float] | None,  # client -> what it counts, where the server knows
        faults: Sequence[Fault],  # of clients whose results are not there
    ) -> tuple[list[ClientResult], list[Fault]]:
        """Return the results that count and all faults of the round by client; too few results end the run."""
        schedule, device = self.setup.schedule, self.setup.device
        results = [replace(one, update=update_on(one.update, device)) for one in results]
        if isinstance(self.setup.method, SecureSum):
            results, beyond = _within(results, sent.params, self.setup.method.bound)
            faults = [*faults, *beyond]
        valid, found = filter_results(
            results, sent.params, self.setup.returned(sent.buffers), self.guard, partial=schedule.blocks is not None,
            extra_names=self.extra_names, weights=weights,
            # A step of AdamW is as long as its rate, whatever went before.
            momentum=schedule.momentum if schedule.optimizer == "sgd" else 0.0,
            # A client that keeps its own batch norm has counted batches since its last round, not since this one.
            rounds=number + 1 if schedule.batch_norm == "local" else 1,
            positive=self.setup.kept.positive,
        )  # fmt: skip
        every = sorted([*faults, *found], key=lambda fault: fault.client)
        # A private mean divides by a fixed number, so it needs nobody; to stop would tell who answered.
        if not isinstance(self.setup.method, Private):
            require_enough(len(valid), number, every, self.guard)
        return [replace(one, update=replace(one.update, steps=one.steps)) for one in valid], every

    def sum_masked(
        self, drawn: Sequence[int], results: Sequence[ClientResult], sent: Sent, number: int
    ) -> Summed | None:
        """Sum the results as masked integers, in this process, where the method asks for it.

        All that were drawn take part from the first exchange on: who has no result leaves before vectors are due.
        """
        method = self.setup.method
        if not isinstance(method, SecureSum):
            return None
        moves = {result.update.client: moves_of(sent.params, result.update.params) for result in results}
        size = sum(value.numel() for value in sent.params.values())
        vectors = {client: moves.get(client) for client in drawn}
        with in_round(number):
            found = masked_sum(
                method.ring, method.threshold, size, vectors, method.leaves(number), signed=method.signed
            )
        update = summed(sent.params, method.ring.decode(found.total), len(found.survivors))
        gone = [
            Fault(client, "absent", "left before it sent its vector")
            for client in moves
            if client not in found.survivors
        ]
        return Summed(update, found.survivors, gone, found.bytes_up, found.bytes_down)

    def step(self, sent: Sent, updates: Sequence[Update], state: State, number: int) -> tuple[Sent, State]:
        """Return what the server sends in the next round, and the method's next state on the server."""
        method, model = with_buckets_of(self._trusting(sent, number), number), self.setup.model
        params, state, extras = method.aggregate(sent.params, updates, state, self.clients)
        # Before the buffers: the statistics of a model that is not finite would hide which parameter broke.
        require_finite(params, number)
        buffers = method.buffers(sent.buffers, updates)
        if self.mixture:
            buffers = mix(buffers, updates, self.setup.kept.variances)
        if self.proxy is not None and self.setup.schedule.batch_norm == "recalibrate":
            load_(model, params, buffers)
            recalibrate(model, self.proxy)
            buffers = detached_copy(buffers_of(model))
        return Sent(params, extras, buffers), state

    def _trusting(self, sent: Sent, number: int) -> Method:
        """Return the method, which knows what the server's own rows make of the model, where it asks for that."""
        method = self.setup.method
        if self.root is None:
            return method
        own = train(self.setup, self.root, sent, {}, number=number, client_id=ROOT).update
        # Before it is compared: a NaN would be trust in nobody, without a word.
        require_finite(own.params, number)
        trusting: Method = with_root(method, own, sent.params)
        return trusting


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """A masked sum, and what it took."""

    update: Update  # stands for all that were summed
    survivors: tuple[int, ...]  # clients in the sum
    faults: list[Fault]  # of clients that trained and are not
    bytes_up: int
    bytes_down: int  # beside the model


@contextlib.contextmanager
def in_round(number: int) -> Iterator[None]:
    """Name the round (0 is the first) in which a run fails."""
    try:
        yield
    except RunError as error:
        raise RunError(f"round {number + 1}: {error}") from None


def _within(results: Sequence[ClientResult], params: Vector, bound: float) -> tuple[list[ClientResult], list[Fault]]:
    """Separate the results that fit into the integers of a masked sum; a client finds this out itself."""
    kept, faults = [], []
    for result in results:
        update = result.update
        sizes = [float((value.double() - params[name].double()).abs().max()) for name, value in update.params.items()
                 if name in params and value.shape == params[name].shape and value.numel()]  # fmt: skip
        size = max(sizes, default=0.0)
        if size > bound:
            faults.append(Fault(update.client, "huge", f"an element moved by {size:.3g}, beyond the bound {bound:g}"))
        else:
            kept.append(result)
    return kept, faults


def _check_inputs(method: Method, proxy: Tensor | None, root: Client | None) -> None:
    """Refuse a method around one that has to be outermost, and rows of the server's that are no tensors."""
    inner = method
    while isinstance(inner, Around):
        inner = inner.method
        why, do = (
            "clipping, noise and masks come last, and another method around it would leave them out",
            "wrap it last",
        )
        named = f"{inner.name} inside of {method.name}"
        require(not isinstance(inner, Private | SecureSum), "method", named, why, do)
    for name, rows in (("proxy", proxy), ("root", None if root is None else root.inputs)):
        fine, do = rows is None or isinstance(rows, Tensor), "pass torch.tensor(rows)"
        require(fine, name, type(rows).__name__, "rows are tensors", do)


def _check_mixture(method: Method) -> None:
    """Refuse variances of the mixture where clients' own may not count one by one."""
    why, do = "it takes every client's statistics as they are, open and unclipped", "pass mixture=False"
    require(not isinstance(method, Private | SecureSum), "mixture", f"True with {type(method).__name__}", why, do)
    while isinstance(method, Around):
        method = method.method
    rule = getattr(method, "combine", Mean())
    require(isinstance(rule, Mean), "mixture", f"True with combine={type(rule).__name__}()", why, do)


def round_server(
    make_model: Callable[[], nn.Module],
    method: Method,
    schedule: Schedule,
    clients: int,
    *,
    seed: int,
    guard: Guard | None,
    proxy: Tensor | None,
    mixture: bool,
    loss: Loss = F.cross_entropy,
    root: Client | None = None,
) -> RoundServer:
    """Make the server of a run; a method, schedule and model that do not fit together are refused."""
    named = isinstance(method, Method) and not isinstance(method, type)
    require(named, "method", repr(method), "a method is a value", "pass one such as FedAvg() or FedSign(gamma=0.01)")
    _check_inputs(method, proxy, root)
    setup = client_setup(initial_model(method, make_model, seed), method, schedule, seed=seed, loss=loss)
    lacks_rows = schedule.batch_norm == "recalibrate" and proxy is None and bool(setup.norms)
    got, why = '"recalibrate" without proxy', "the server needs rows of its own to estimate the statistics"
    require(not lacks_rows, "batch_norm", got, why, 'pass proxy=inputs, or batch_norm="average"')
    method.check(schedule)
    what = f"a {setup.kept.kind} at {setup.kept.others[0]}" if setup.kept.others else ""
    why, do = "the law of total variance holds for statistics of all rows, as batch norm has", "pass mixture=False"
    require(not (mixture and what), "mixture", f"True with {what}", why, do)
    if mixture:
        _check_mixture(method)
    check_root(method, schedule, root, detached_copy(setup.params))
    names = extra_names_of(method, detached_copy(setup.params), detached_copy(buffers_of(setup.model)))
    if isinstance(method, Private | SecureSum):
        guard = guard or Guard(huge=None, heavy=None)
        huge = guard.huge is not None
        why, do = "running statistics of clients would be lost or travel open", "take another norm, or no statistics"
        require(not what, f"{type(method).__name__} model", what, why, do)
        method.check_run(schedule, clients, normed=bool(setup.norms), extras=sorted(names), huge=huge)
    return RoundServer(setup, clients, guard or Guard(), proxy, mixture, names, root)

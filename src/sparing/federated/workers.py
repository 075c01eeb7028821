"""Clients in several processes, each on one thread: for convolutional networks, where stacking does not pay.

A process trains one client at a time by the plain loop, so the number of processes changes no bit; the loop itself
has the same bits where it runs on one thread too. Tensors travel as safetensors, not by pickle, and the rows of all
clients lie once in a file that every process maps.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.federated.engines import Answers, crash
from sparing.federated.faults import Fault
from sparing.federated.loop import Client, Loss, Visit, Workbench, buffers_of, load_, train, workbench
from sparing.federated.methods import Method, Sent, State, Update, Vector
from sparing.federated.packing import pack, unpack
from sparing.federated.settings import Schedule
from sparing.report.atomic import write_whole
from sparing.seeds import number as seed_number


def cores() -> int:
    """Return how many cores this process may use (count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Work:
    """What a process is started with; plain values only, no tensors."""

    make_model: Callable[[], nn.Module]
    method: Method
    schedule: Schedule
    loss: Loss
    seed: int
    folder: str
    dtype: torch.dtype
    precision: str
    deterministic: bool


class Workers:
    """Processes that train clients.

    ``make_model``, the method and the loss are sent by pickle, so they must be importable: defined at the top of a
    module, or values of such classes.
    """

    name = "workers"

    def __init__(
        self, bench: Workbench, clients: Sequence[Client], make_model: Callable[[], nn.Module], workers: int
    ) -> None:
        """Write the clients' rows and the model to a temporary folder; processes start with the first round."""
        require(workers >= 1, "workers", workers, "someone must do the work", "pass workers >= 1")
        self._folder = tempfile.TemporaryDirectory(prefix="sparing-clients-")
        folder = Path(self._folder.name)
        self._count = workers
        self._pool: ProcessPoolExecutor | None = None
        self._work = _Work(
            make_model,
            bench.method,
            bench.schedule,
            bench.loss,
            bench.seed,
            str(folder),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )
        try:
            _require_sendable(self._work)
            rows = {f"{at}.inputs": client.inputs.detach().clone() for at, client in enumerate(clients)}
            rows |= {f"{at}.targets": client.targets.detach().clone() for at, client in enumerate(clients)}
            save_file(rows, folder / "rows.safetensors")
            write_whole(folder / "model.safetensors", pack(_everything(bench.model)))
        except BaseException:
            self._folder.cleanup()
            raise

    def visits(
        self, number: int, ids: Sequence[int], sent: Sent, states: Mapping[int, State], own: Mapping[int, Vector]
    ) -> Answers:
        """Train clients; see ``Engine.visits``. A client whose process dies is tried once more, alone."""
        common = pack({"params": sent.params, "extras": sent.extras, "buffers": sent.buffers})
        parts = {client: pack({"state": states[client], "own": own.get(client, {})}) for client in ids}
        answers: dict[int, Visit | Fault] = {}
        asked: dict[int, Future[bytes]] = {}
        for client in ids:
            try:
                asked[client] = self._start().submit(_answer, number, client, common, parts[client])
            except BrokenProcessPool:  # a process died while others were still being asked
                break
        for client, future in asked.items():
            try:
                answers[client] = _opened(client, future.result())
            except BrokenProcessPool:
                continue
        for client in ids:
            if client not in answers:
                answers[client] = self._alone(number, client, common, parts[client])
        every = [answers[client] for client in ids]
        return [one for one in every if isinstance(one, Visit)], [one for one in every if isinstance(one, Fault)]

    def close(self) -> None:
        """End the processes and remove the temporary folder."""
        self._stop()
        self._folder.cleanup()

    def _alone(self, number: int, client: int, common: bytes, part: bytes) -> Visit | Fault:
        """Ask for one client while no other is at work, so that a death is its own."""
        try:
            return _opened(client, self._start().submit(_answer, number, client, common, part).result())
        except BrokenProcessPool:
            self._stop()
        try:  # the pool may have been broken before this client came
            return _opened(client, self._start().submit(_answer, number, client, common, part).result())
        except BrokenProcessPool:
            self._stop()
            return Fault(client, "crash", "its process died: out of memory, or killed")

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._count, _context(), initializer=_begin, initargs=(self._work,))
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _everything(model: nn.Module) -> Vector:
    return {**{name: p.detach() for name, p in named_parameters(model).items()}, **buffers_of(model)}


def _context() -> multiprocessing.context.BaseContext:
    """How processes start: from a server that has torch imported already, or anew where there is none (Windows)."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _require_sendable(work: _Work) -> None:
    try:
        pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = f"make_model, method and loss are sent to other processes by pickle ({error})"
        do = 'define make_model and loss at the top of a module, or pass engine="loop"'
        raise UserError("workers", got="something that cannot be sent", why=why, do=do) from error


_BENCH: list[tuple[Workbench, Any]] = []  # one entry: the bench of this process, a worker, and the file of rows


def _begin(work: _Work) -> None:
    """Set a worker up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends the pool
    torch.set_num_threads(1)
    torch.set_default_dtype(work.dtype)
    torch.set_float32_matmul_precision(work.precision)
    if work.deterministic != torch.are_deterministic_algorithms_enabled():  # it imports a compiler
        torch.use_deterministic_algorithms(work.deterministic)
    torch.manual_seed(seed_number(work.seed, "federated", "model"))  # as in the parent
    model = work.method.adapt(work.make_model())
    kept, _ = unpack((Path(work.folder) / "model.safetensors").read_bytes())
    load_(model, kept, {})
    bench = workbench(model, work.method, work.schedule, seed=work.seed, loss=work.loss)
    _BENCH[:] = [(bench, safe_open(Path(work.folder) / "rows.safetensors", framework="pt"))]


def _answer(number: int, client: int, common: bytes, part: bytes) -> bytes:
    """Train one client in a worker; an exception comes back as its text, for not every class survives pickling."""
    try:
        bench, rows = _BENCH[0]
        (sent, _), (mine, _) = unpack(common), unpack(part)
        data = Client(rows.get_tensor(f"{client}.inputs"), rows.get_tensor(f"{client}.targets"))
        visit = train(bench, data, Sent(**sent), mine["state"], number=number, client_id=client, own=mine["own"])
        update = visit.update
        tree = {"params": update.params, "extras": update.extras, "buffers": update.buffers}
        facts = {"weight": update.weight, "steps": visit.steps, "loss": visit.loss}
        return pack({**tree, "state": visit.state, "own": visit.own}, facts)
    except Exception as error:  # noqa: BLE001  # whatever a client raises, the round survives it
        return pack({}, {"crash": crash(client, error).detail})


def _opened(client: int, data: bytes) -> Visit | Fault:
    tree, facts = unpack(data)
    if "crash" in facts:
        return Fault(client, "crash", facts["crash"])
    update = Update(client, tree["params"], facts["weight"], tree["extras"], tree["buffers"])
    return Visit(update, tree["state"], tree["own"], facts["steps"], facts["loss"])

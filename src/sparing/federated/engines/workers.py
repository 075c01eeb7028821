"""Clients in several processes, each on one thread: for convolutional networks where `workers=` asks for them.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
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
from sparing.federated.engines.interface import RoundResults, crash_fault
from sparing.federated.methods.interface import Method, Sent, State, Update, Vector
from sparing.federated.packing import pack, unpack
from sparing.federated.placement import HOST, update_on
from sparing.federated.server.faults import Fault
from sparing.federated.settings import Schedule
from sparing.report.atomic import write_whole

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized


def cores() -> int:
    """Return how many cores this process may use (count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _WorkerSettings:
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
    devices: tuple[str, ...]  # in turn; none: where ``make_model`` puts the model


class Workers:
    """Processes that train clients.

    ``make_model``, the method and the loss are sent by pickle, so they must be importable: defined at the top of a
    module, or values of such classes.
    """

    name = "workers"

    def __init__(
        self, setup: ClientSetup, clients: Sequence[Client], make_model: Callable[[], nn.Module], workers: int,
        devices: Sequence[str | torch.device] | None = None,
    ) -> None:  # fmt: skip
        """Write the clients' rows and the model to a temporary folder; processes start with the first round."""
        require(workers >= 1, "workers", workers, "someone must do the work", "pass workers >= 1")
        require(devices is None or len(devices) > 0, "devices", "none", "a process needs one", "pass devices=None")
        self._folder = tempfile.TemporaryDirectory(prefix="sparing-clients-")
        folder = Path(self._folder.name)
        self._count = workers
        self._pool: ProcessPoolExecutor | None = None
        self._settings = _WorkerSettings(
            make_model,
            setup.method,
            setup.schedule,
            setup.loss,
            setup.seed,
            str(folder),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            tuple(map(str, devices or ())),
        )
        self._device = setup.device
        try:
            pickle.dumps(self._settings)
            # Copies: clients' rows are often views of one tensor, which the format refuses.
            rows = {f"{at}.inputs": client.inputs.detach().to(HOST, copy=True) for at, client in enumerate(clients)}
            rows |= {f"{at}.targets": client.targets.detach().to(HOST, copy=True) for at, client in enumerate(clients)}
            save_file(rows, folder / "rows.safetensors")
            # Parameters that do not train are never sent in a round, so every worker needs them once.
            everything = {**named_parameters(setup.model), **buffers_of(setup.model)}
            write_whole(folder / "model.safetensors", pack(everything))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._folder.cleanup()
            why = f"make_model, method and loss are sent to other processes by pickle ({error})"
            do = 'define make_model and loss at the top of a module, or pass engine="loop"'
            raise UserError("workers", got="something that cannot be sent", why=why, do=do) from error
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def kinds(self) -> set[str]:
        """Kinds of devices that train, such as "cuda"."""
        return {torch.device(one).type for one in self._settings.devices or (self._device,)}

    def train_clients(
        self, number: int, ids: Sequence[int], sent: Sent, states: Mapping[int, State], local_bn: Mapping[int, Vector]
    ) -> RoundResults:
        """Train clients; see ``Engine.train_clients``. A client whose process dies is retried once, alone."""
        common = pack({"params": sent.params, "extras": sent.extras, "buffers": sent.buffers})
        parts = {client: pack({"state": states[client], "own": local_bn.get(client, {})}) for client in ids}
        outcomes: dict[int, ClientResult | Fault] = {}
        pending: dict[int, Future[bytes]] = {}
        for client in ids:
            try:
                pending[client] = self._get_pool().submit(_train_in_worker, number, client, common, parts[client])
            except BrokenProcessPool:
                # A process died while others were still being asked; whoever is left is retried below.
                break
        for client, future in pending.items():
            try:
                outcomes[client] = self._result(client, future.result())
            except BrokenProcessPool:
                continue
        for client in ids:
            if client not in outcomes:
                outcomes[client] = self._retry_alone(number, client, common, parts[client])
        every = [outcomes[client] for client in ids]
        return [one for one in every if isinstance(one, ClientResult)], [one for one in every if isinstance(one, Fault)]

    def close(self) -> None:
        """End the processes and remove the temporary folder."""
        self._stop()
        self._folder.cleanup()

    def _retry_alone(self, number: int, client: int, common: bytes, part: bytes) -> ClientResult | Fault:
        """Train one client while no other is running, so that a dead process is that client's fault."""
        # Twice: the first failure may have been another client's, if the pool was broken before this one came.
        for _ in range(2):
            try:
                future = self._get_pool().submit(_train_in_worker, number, client, common, part)
                return self._result(client, future.result())
            except BrokenProcessPool:
                self._stop()
        return Fault(client, "crash", "its process died: out of memory, or killed")

    def _result(self, client: int, data: bytes) -> ClientResult | Fault:
        found = _unpack_result(client, data)
        return found if isinstance(found, Fault) else replace(found, update=update_on(found.update, self._device))

    def _get_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Forked from a server that has imported torch, or spawned where there is none (Windows).
            forks = "forkserver" in multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("forkserver" if forks else "spawn")
            if forks:
                context.set_forkserver_preload([__name__])
            told = (self._settings, context.Value("i", 0))
            self._pool = ProcessPoolExecutor(self._count, context, initializer=_init_worker, initargs=told)
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


_WORKER: list[tuple[ClientSetup, Any]] = []  # one entry: the setup of this worker process, and the file of rows


def _init_worker(settings: _WorkerSettings, started: Synchronized[int]) -> None:
    """Set a worker up; ``started`` counts those that were, which numbers them."""
    # Ctrl-C reaches the parent too, which ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One thread: sums then have the same order, and so the same bits, whatever the number of processes.
    torch.set_num_threads(1)
    torch.set_default_dtype(settings.dtype)
    torch.set_float32_matmul_precision(settings.precision)
    # Only where it differs, for the call imports a compiler.
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.deterministic)
    model = initial_model(settings.method, settings.make_model, settings.seed)
    if settings.devices:
        with started.get_lock():
            number, started.value = started.value, started.value + 1
        model = model.to(settings.devices[number % len(settings.devices)])
    kept, _ = unpack((Path(settings.folder) / "model.safetensors").read_bytes())
    load_(model, kept, {})
    setup = client_setup(model, settings.method, settings.schedule, seed=settings.seed, loss=settings.loss)
    _WORKER[:] = [(setup, safe_open(Path(settings.folder) / "rows.safetensors", framework="pt"))]


def _train_in_worker(number: int, client: int, common: bytes, part: bytes) -> bytes:
    """Train one client in a worker; an exception comes back as its text, for not every class survives pickling."""
    try:
        setup, rows = _WORKER[0]
        (sent, _), (mine, _) = unpack(common), unpack(part)
        data = Client(rows.get_tensor(f"{client}.inputs"), rows.get_tensor(f"{client}.targets"))
        result = train(setup, data, Sent(**sent), mine["state"], number=number, client_id=client, local_bn=mine["own"])
        update = result.update
        tree = {"params": update.params, "extras": update.extras, "buffers": update.buffers}
        facts = {"weight": update.weight, "steps": result.steps, "loss": result.loss}
        return pack({**tree, "state": result.state, "own": result.local_bn}, facts)
    except Exception as error:  # noqa: BLE001  # whatever a client raises, the round survives it
        return pack({}, {"crash": crash_fault(client, error).detail})


def _unpack_result(client: int, data: bytes) -> ClientResult | Fault:
    tree, facts = unpack(data)
    if "crash" in facts:
        return Fault(client, "crash", facts["crash"])
    update = Update(client, tree["params"], facts["weight"], tree["extras"], tree["buffers"])
    return ClientResult(update, tree["state"], tree["own"], facts["steps"], facts["loss"])

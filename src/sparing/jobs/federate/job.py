"""The whole job: data, split, price, every method on the same schedule, report."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

import torch
from torch import Tensor

from sparing.errors import require
from sparing.federated.client.train import Client, initial_model, load_
from sparing.federated.metrics import Accuracy
from sparing.federated.placement import HOST
from sparing.federated.splits import Split, save
from sparing.jobs.disk import refusing_to_write, save_tensors
from sparing.jobs.federate.engines import Setup, faults_of, norms_of, on_flower, run_embedded
from sparing.jobs.federate.inputs import Inputs, clients_of, load_data, root_of, split_of, subsample
from sparing.jobs.federate.methods import LABELS, NORM_MATCHED, force_of, method_of, poisoned
from sparing.jobs.federate.nets import net, on_device, sparse
from sparing.jobs.federate.page import PAGE, write_page
from sparing.jobs.federate.rows import hash_of
from sparing.jobs.federate.settings import NAMES, MethodName, Settings
from sparing.jobs.federate.tables import Price, method_row, pair_rows, price, price_rows, privacy_row, split_rows
from sparing.jobs.federate.texts import NextTokens, data_hash, load_texts, model_of, next_token_loss, save_model
from sparing.jobs.folder import CHECKPOINTS, Folder, print_page_path
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.lm.models import hash_folder
from sparing.jobs.run import Run
from sparing.jobs.torch_state import device_for
from sparing.report import Record, format_number, print_table

SPLIT, MODELS = "split.json", "models"  # names in OUT: who holds which rows, and the last global model of every method

UNITS: Final = {
    "loss": "nat", "validation_loss": "nat", "client_loss": "nat", "train_loss": "nat",
    "seconds": "s", "predicted_seconds": "s",
    "bytes_up": "B", "bytes_down": "B", "predicted": "B", "counted": "B", "if_full": "B",
}  # fmt: skip


def open_run(settings: Settings, run: Run, question: str = "", device: torch.device = HOST) -> Record:
    """Refuse the folder of another run; returns the record, empty: rounds that are done are in the methods' files."""
    record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
    if settings.model is None:
        hashes = {"data_file": None if settings.data in NAMES else hash_of(Path(settings.data))}
    else:
        hashes = {"data_file": data_hash(Path(settings.data)), "model": hash_folder(settings.model)}
    # --device auto may choose another on another machine, and the methods of one table share theirs
    run.resume(record, hashes=hashes, also={"accelerator": None if device == HOST else device.type})
    return record


def run_of(settings: Settings) -> Run:
    """A run, described."""
    data = Path(settings.data)
    reads = [path for path in (data, settings.model) if path is not None and path.exists()]
    return Run(settings, writes=(SPLIT, MODELS), reads=reads, ignore={"workers", "device"})


def run(settings: Settings) -> Record:
    """Run `sparing federate`; nothing is written before every setting is checked."""
    with run_of(settings) as run:
        device = device_for(settings.device)
        if settings.engine == "flower":
            from sparing.federated import flower

            # raises here if the extra is missing, before data are read
            _ = flower.run_in_process
        rows = subsample(_load(settings), settings)
        rows, root = root_of(rows, settings)
        split = split_of(rows, settings)
        setup = _ground(rows, split, settings, root, device)
        sizes = list(map(len, setup.clients))
        prices = {
            name: price(setup.make_model, method_of(name, settings, clients=len(sizes)), setup.schedule, sizes,
                        seed=settings.seed, root=root)
            for name in settings.methods
        }  # fmt: skip
        private = [
            privacy_row(LABELS[name], method_of(name, settings, clients=len(sizes)), settings, len(sizes))
            for name in settings.methods
        ]
        verb = "do" if len(settings.methods) > 1 else "does"
        *others, last = [LABELS[name] for name in settings.methods]
        named = f"{', '.join(others)} and {last}" if others else last
        record = open_run(settings, run, f"How well {verb} {named} train over clients that hold {rows.name}?", device)
        _describe_(record, rows, split, prices)
        for row in filter(None, private):
            record.add("privacy", **row)
        if any(private):
            print_table(record.table("privacy"), title="Privacy, before it starts", file=sys.stderr)
        # a round may last: it is dropped at a signal, and done again
        run.claim(defer_signals=False)
        with refusing_to_write("out", settings.out), _stoppable():
            save(split, run.folder.at(SPLIT))
            right = {name: _train_(record, name, setup, rows, prices[name], run.folder) for name in settings.methods}
            # McNemar's test is of rows that do not depend on each other; tokens of a text do.
            for row in pair_rows({LABELS[name]: hits for name, hits in right.items()}) if rows.classes else ():
                record.add("pairs", **row)
        return run.finish(write_page)


def _load(settings: Settings) -> Inputs:
    if settings.model is not None:
        return load_texts(settings)
    seed, share, natural = settings.seed, settings.held_out, settings.split == "natural"
    return load_data(settings.data, seed=seed, validation=share, table=settings.table, natural=natural)


def _ground(
    rows: Inputs, split: Split, settings: Settings, root: Client | None = None, device: torch.device = HOST
) -> Setup:
    proxy = rows.validation_inputs if settings.batch_norm == "recalibrate" else None
    enough = proxy is None or len(proxy) > 1
    require(enough, "held_out", settings.held_out, "statistics need two rows", "hold more rows back")
    if settings.model is not None:
        test, clients = NextTokens(rows.test_inputs, rows.test_targets), clients_of(rows, split)
        return Setup(
            settings, on_device(model_of(settings), device), clients, test, None, root, next_token_loss, device
        )
    make_model = net(settings.net, rows.shape, rows.classes)
    if settings.density < 1:
        make_model = sparse(make_model, settings.density, settings.seed)
    return Setup(
        settings=settings,
        make_model=on_device(make_model, device),
        clients=poisoned(clients_of(rows, split), settings, rows.classes),
        test=Accuracy(rows.test_inputs, rows.test_targets),
        proxy=proxy,
        root=root,
        device=device,
    )


def _describe_(record: Record, rows: Inputs, split: Split, prices: Mapping[MethodName, Price]) -> None:
    """Note and tell what is known before anything is trained."""
    sizes = list(map(len, split.clients))
    record.add(
        "data", name=rows.name, training_rows=len(rows.targets), validation_rows=len(rows.validation_targets),
        test_rows=len(rows.test_targets), classes=rows.classes, clients=len(sizes), fewest_rows=min(sizes),
        most_rows=max(sizes), parameters=next(iter(prices.values())).parameters,
    )  # fmt: skip
    for row in split_rows(split, rows):
        record.add("partition", **row)
    for name, known in prices.items():
        for row in price_rows(LABELS[name], known):
            record.add("price", **row)
    print_table(record.table("price"), title="Price, before it starts", units={"a_round": "B", "in_all": "B"},
                file=sys.stderr)  # fmt: skip


def _train_(record: Record, name: MethodName, setup: Setup, rows: Inputs, known: Price, place: Folder) -> Tensor:
    """Run a method, note its rounds and its end, and return which test rows its last model has right."""
    settings = setup.settings
    norms = []
    if name == NORM_MATCHED:
        reference = method_of("fedavg", settings, clients=len(setup.clients))
        norms = norms_of(reference, setup, place.at(CHECKPOINTS) / "fedavg-norms.safetensors")
    method = method_of(name, settings, norms, len(setup.clients))
    force = force_of(method, dict(initial_model(method, setup.make_model, settings.seed).named_parameters()))
    if force is not None:
        sys.stderr.write(f"{LABELS[name]}: mean force on an element {format_number(force)}\n")
    if settings.engine == "flower":
        outcome = on_flower(name, method, setup)
    else:
        outcome = run_embedded(name, method, setup, place.at(CHECKPOINTS) / f"{name}.safetensors")
    for row in outcome.rounds:
        record.add("rounds", method=LABELS[name], **row)
    for row in faults_of(outcome.rounds):
        record.add("faults", method=LABELS[name], **row)
    answered = [row["answered"] for row in outcome.rounds]
    if told := privacy_row(LABELS[name], method, settings, len(setup.clients), answered):
        record.add("privacy", **told)
    model = initial_model(method, setup.make_model, settings.seed)
    load_(model, outcome.params, outcome.buffers)
    validation = type(setup.test)(rows.validation_inputs, rows.validation_targets)
    held = validation(model) if len(rows.validation_targets) else {}
    record.add("methods", **method_row(LABELS[name], method, outcome, known, setup, force, held))
    right = setup.test.rows(model)[0]
    if settings.model is None:
        save_tensors(place.at(MODELS) / f"{name}.safetensors", {**outcome.params, **outcome.buffers})
    else:
        save_model(model.to(HOST), settings, place.at(MODELS) / name)
    return right


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """End the round under way at SIGINT or SIGTERM: rounds are saved whole, so the one that is lost is done again."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        yield
    except KeyboardInterrupt:
        do = "run the same command with --resume to go on"
        raise StoppedError(f"interrupted; the last whole round is saved; {do}") from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def show(record: Record) -> None:
    """Print what every method reached; the last line says where the page is."""
    PAGE.print_tables(record)
    print_page_path(record)

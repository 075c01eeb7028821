"""Rows for clients and for the server (known data, MNIST-1D made in code, a person's own file), and who holds which."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparing.data import load_images
from sparing.errors import UserError, require
from sparing.federated import Client, dirichlet
from sparing.federated.splits import Split, natural, shards
from sparing.jobs.federate.columns import Numbers, class_numbers, is_number, some
from sparing.jobs.federate.groups import Table
from sparing.jobs.federate.mnist_1d import make
from sparing.jobs.federate.rows import SUFFIXES, is_own, read
from sparing.jobs.federate.settings import NAMES, Settings
from sparing.jobs.subjects.images import digits, inputs_of
from sparing.seeds import stream

SIGNAL_ROWS: Final = 5000  # rows of MNIST-1D, four fifths to train on (count), as its authors have it

_GENERATED: Final = 0  # one MNIST-1D for all, as if it were a file: seeds vary the split and the training
_NEEDED: Final = ("inputs", "targets", "test_inputs", "test_targets")


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A data set in three parts; no row is in two of them."""

    name: str
    inputs: Tensor  # to train on: float32, shape (n, channels, …), standardised by these rows
    targets: Tensor  # their classes, int64, shape (n,)
    validation_inputs: Tensor  # training rows held out for choosing settings; may be empty
    validation_targets: Tensor
    test_inputs: Tensor  # rows to report on; never to choose anything by
    test_targets: Tensor
    classes: int  # 0 of texts, whose rows have none
    groups: tuple[int, ...] | None = None  # whose each training row is (a writer, a device), where the data says so
    owners: int = 0  # of the whole data, numbered from 0 (count)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(self.inputs.shape[1:])


def load_data(
    name: str, *, seed: int, validation: float, table: Table = Table(), natural: bool = True,  # noqa: B008 - frozen
) -> Inputs:  # fmt: skip
    """Load a data set by name, or from a file or folder; ``seed`` draws only the validation rows.

    Where the split is not ``natural``, groups in a file mean nothing, and may lose all their rows to validation.
    """
    require(0 <= validation < 1, "validation", validation, "it is a share of the rows", "pass 0 <= share < 1")
    if name not in NAMES and is_own(name):
        return _own(Path(name), seed, validation, table)
    do = f"pass a file that ends in {', '.join(SUFFIXES)}, or a folder"
    require(table == Table(), "table", f"settings of rows in files, with {name}", "they would change nothing", do)
    if name == "mnist-1d":
        signals, targets = make(SIGNAL_ROWS, seed=_GENERATED)
        cut = SIGNAL_ROWS * 4 // 5
        parts = (signals[:cut, None], targets[:cut], signals[cut:, None], targets[cut:])
        return parted(name, parts, None, seed, validation)
    if name.endswith(".safetensors"):
        return _from_file(Path(name), seed, validation, natural=natural)
    do = f"pass one of {', '.join(NAMES)}, a .safetensors, {', '.join(SUFFIXES)} file, or a folder of clients"
    require(name in NAMES, "data", name, "no such data set", do)
    train, test = digits() if name == "digits" else (load_images(name, split=part) for part in ("train", "test"))
    parts = (inputs_of(train[0]), train[1], inputs_of(test[0], like=train[0]), test[1])
    return parted(name, parts, None, seed, validation)


def subsample(rows: Inputs, settings: Settings) -> Inputs:
    """Draw as many rows as the settings ask for, in their order; test rows are the same for every seed."""
    some = _drawn(len(rows.targets), settings.train_rows, settings.seed, "rows")
    tested = _drawn(len(rows.test_targets), settings.test_rows, 0, "test rows")
    return replace(
        rows,
        inputs=rows.inputs[some],
        targets=rows.targets[some],
        test_inputs=rows.test_inputs[tested],
        test_targets=rows.test_targets[tested],
        groups=None if rows.groups is None else tuple(rows.groups[row] for row in some.tolist()),
    )


def root_of(rows: Inputs, settings: Settings) -> tuple[Inputs, Client | None]:
    """Take the server's own rows for FLTrust out of the held-out ones."""
    if settings.robust != "fltrust":
        return rows, None
    held, wanted = len(rows.validation_targets), settings.trust.rows
    why, do = f"{held} rows are held out", "pass fewer, or a larger --held-out"
    require(wanted <= held, "trust.rows", wanted, why, do)
    # Held-out rows are sorted by where they stood, and a file may be sorted by class.
    order = torch.randperm(held, generator=stream(settings.seed, "federate", "root"))
    own, rest = order[:wanted].sort().values, order[wanted:].sort().values
    root = Client(rows.validation_inputs[own], rows.validation_targets[own])
    left = replace(
        rows, validation_inputs=rows.validation_inputs[rest], validation_targets=rows.validation_targets[rest]
    )
    return left, root


def _drawn(count: int, wanted: int | None, seed: int, label: str) -> Tensor:
    if wanted is None or wanted >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=stream(seed, "federate", label))[:wanted].sort().values


def parted(
    name: str, parts: tuple[Tensor, Tensor, Tensor, Tensor], groups: Tensor | None, seed: int, validation: float,
    classes: int | None = None, *, natural: bool = True,
) -> Inputs:  # fmt: skip
    """Hold back validation rows; ``parts`` are inputs and targets to train on and to test on."""
    inputs, targets, test_inputs, test_targets = parts
    order = torch.randperm(len(targets), generator=stream(seed, "federate", "validation"))
    held = int(validation * len(targets))
    if groups is not None and natural:
        order, held = _leaving_one(order, held, groups)
    # Sorted, so that without validation rows the training part is in the data set's own order.
    out, kept = order[:held].sort().values, order[held:].sort().values
    return Inputs(
        name=name,
        inputs=inputs[kept],
        targets=targets[kept],
        validation_inputs=inputs[out],
        validation_targets=targets[out],
        test_inputs=test_inputs,
        test_targets=test_targets,
        classes=1 + int(max(targets.max(), test_targets.max())) if classes is None else classes,
        groups=None if groups is None else tuple(groups[kept].tolist()),
        owners=0 if groups is None else 1 + int(groups.max()),
    )


def _leaving_one(order: Tensor, held: int, groups: Tensor) -> tuple[Tensor, int]:
    """The order of rows and how many of them are held out, so that every client keeps one to train on."""
    kept = set(groups[order[held:]].tolist())
    # the last of those drawn comes back
    last = {int(groups[row]): at for at, row in enumerate(order[:held].tolist()) if int(groups[row]) not in kept}
    back = torch.zeros(len(order), dtype=torch.bool)
    back[list(last.values())] = True
    return torch.cat((order[:held][~back[:held]], order[back], order[held:])), held - len(last)


def _own(path: Path, seed: int, validation: float, table: Table) -> Inputs:
    """A person's own rows: classes and clients by number, and test rows drawn where the file has none."""
    found = read(path, table)
    test = found.test
    classes, named = class_numbers([*found.labels, *(test.labels if test else ())])
    inputs = _floats(found.inputs, path)
    targets = torch.tensor([classes[label] for label in found.labels])
    groups, clients = None, _ordered(found.clients or ())
    if found.clients is not None:
        groups = torch.tensor([clients.index(client) for client in found.clients])
        sys.stderr.write(f"clients of {path.name}: {some(f'{at} {name}' for at, name in enumerate(clients))}\n")
    if named:
        sys.stderr.write(f"classes of {path.name}: {some(f'{at} {name}' for name, at in classes.items())}\n")
    if test is None:
        tested = _drawn_to_test(len(targets), groups, table.test, path)
        parts = (inputs[~tested], targets[~tested], inputs[tested], targets[tested])
        groups = None if groups is None else groups[~tested]
    else:
        parts = (inputs, targets, _floats(test.inputs, path), torch.tensor([classes[label] for label in test.labels]))
    return parted(path.name, parts, groups, seed, validation, len(classes) if named else None)


def _floats(array: Numbers, path: Path) -> Tensor:
    with np.errstate(over="ignore"):
        inputs = torch.from_numpy(np.array(array, dtype=np.float32))
    why, do = "they are read as float32", "scale them"
    require(bool(inputs.isfinite().all()), f"data, {path.name}", "numbers beyond 3.4e38", why, do)
    return inputs


def _ordered(clients: Sequence[str]) -> list[str]:
    """Names of clients, each once; numbers by size."""
    names = sorted(set(clients))
    return sorted(names, key=float) if all(map(is_number, names)) else names


def _drawn_to_test(count: int, groups: Tensor | None, share: float, path: Path) -> Tensor:
    """Which rows test, bool, shape (n,), the same for every seed; a client keeps one row at least."""
    order = torch.randperm(count, generator=stream(0, "federate", "own test rows"))
    tested = torch.zeros(count, dtype=torch.bool)
    whose = torch.zeros(count, dtype=torch.long) if groups is None else groups
    for client in sorted(set(whose.tolist())):
        mine = order[whose[order] == client]
        tested[mine[: min(max(1, int(share * len(mine))), len(mine) - 1)]] = True
    got = f"{count} rows in {path.name}"
    require(bool(tested.any()), "data", got, "no row is left to test on", "write two rows for some client")
    return tested


def _from_file(path: Path, seed: int, validation: float, *, natural: bool) -> Inputs:
    """Read the user's own rows; safetensors, so that no code in the file can run."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
        raise UserError("data", got=path, why=why, do=f"save {', '.join(_NEEDED)} with safetensors") from None
    missing = [part for part in _NEEDED if part not in tensors]
    do = "save these with safetensors, and groups for a natural split"
    require(not missing, "data", path, f"it lacks {', '.join(missing)}", do)
    groups = tensors.get("groups")
    for part in ("", "test_"):
        _check_rows(path, part, tensors[f"{part}inputs"], tensors[f"{part}targets"])
    one, other = (tuple(tensors[part].shape[1:]) for part in ("inputs", "test_inputs"))
    require(one == other, "data", f"rows of {one} and test rows of {other} in {path.name}", "they differ", "save alike")
    alone = groups is None or (groups.shape == tensors["targets"].shape and not groups.is_floating_point())
    require(alone, "data", path, "groups needs one whole number a training row", "save it so")
    found = [tensors[part] for part in _NEEDED]
    parts = (found[0].float(), found[1].long(), found[2].float(), found[3].long())
    # whatever whole numbers they have there: clients are counted from 0
    numbers = None if groups is None else torch.unique(groups, return_inverse=True)[1]
    return parted(path.name, parts, numbers, seed, validation, natural=natural)


def _check_rows(path: Path, part: str, inputs: Tensor, targets: Tensor) -> None:
    fine = inputs.ndim >= 2 and targets.ndim == 1 and len(inputs) == len(targets) > 0 < inputs.numel()
    got = f"{part}inputs {tuple(inputs.shape)} and {part}targets {tuple(targets.shape)} in {path.name}"
    require(fine, "data", got, "each row needs numbers and one class", "save shapes (n, …) and (n,)")
    real = not inputs.is_complex()
    require(real, "data", f"{part}inputs in {path.name}", "they are complex numbers", "save real and imaginary parts")
    whole = not (targets.is_floating_point() or targets.is_complex()) and int(targets.long().min()) >= 0
    require(whole, "data", f"{part}targets in {path.name}", "classes are counted from 0", "save integers >= 0")
    finite = bool(inputs.float().isfinite().all())
    require(finite, "data", f"{part}inputs in {path.name}", "some are not finite", "save finite numbers")


def split_of(rows: Inputs, settings: Settings) -> Split:
    """Partition the training rows; no client is empty."""
    seed, clients = settings.seed, settings.clients
    enough = len(rows.targets) >= rows.classes
    got = f"{len(rows.targets)} training rows of {rows.classes} classes"
    require(enough, "data", got, "there are more classes than rows", "pass more --train-rows, or less --held-out")
    if settings.split == "natural":
        if rows.groups is None:
            why, do = (
                f"the rows of {rows.name} belong to nobody",
                "pass a folder of clients, a file with groups, --table.client, or dirichlet",
            )
            raise UserError("split", got="natural", why=why, do=do)
        lost = sorted(set(range(rows.owners)) - set(rows.groups))
        got = f"{settings.train_rows} rows, and client {lost[0] if lost else ''} has none of them"
        do = "pass more, or leave the client out"
        require(not lost, "train_rows", got, "a client without rows cannot train", do)
        split = natural(rows.groups)
        # clients have the numbers that the data gives them, not those of their first rows
        numbered = sorted(zip(dict.fromkeys(rows.groups), split.clients, strict=True))
        return replace(split, clients=tuple(part for _, part in numbered))
    require(clients <= len(rows.targets), "clients", clients, f"there are only {len(rows.targets)} rows", "pass fewer")
    if settings.split == "iid":
        # Sorted within a client: which rows it holds is random, their order is that of the data set.
        order = torch.randperm(len(rows.targets), generator=stream(seed, "federate", "iid"))
        return Split(tuple(tuple(sorted(part.tolist())) for part in order.tensor_split(clients)), "iid", None, seed)
    if settings.split == "shards":
        return shards(rows.targets, clients, per_client=settings.shards.per_client, seed=seed)
    return dirichlet(rows.targets, clients, settings.dirichlet.alpha, rule=settings.dirichlet.rule, seed=seed)


def clients_of(rows: Inputs, split: Split) -> list[Client]:
    """The clients of a split."""
    return [Client(rows.inputs[list(part)], rows.targets[list(part)]) for part in split.clients]

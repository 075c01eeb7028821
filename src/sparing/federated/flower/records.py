"""Vectors as Flower's records and back, with the dtypes of the model: integer counters stay integers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from sparing.errors import UserError, require
from sparing.federated.methods.interface import State, Vector

ARRAYS = "arrays"
"""Record of the model, parameters and buffers, under the names of its state dictionary."""

CONFIG = "config"
"""Record of the server's settings of the round."""

METRICS = "metrics"
"""Record of what the client measured."""

_EXTRA = "extra/"  # before the name of a vector that travels beside the model
_BY_NUMPY = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
})  # fmt: skip


def record_of(vector: Mapping[str, Tensor]) -> ArrayRecord:
    """Serialise tensors by name; dtypes that NumPy lacks, such as bfloat16, travel as float32, exactly."""
    plain = {name: value.detach().cpu() for name, value in vector.items()}
    return ArrayRecord({n: Array((x if x.dtype in _BY_NUMPY else x.float()).numpy()) for n, x in plain.items()})


def vector_of(record: ArrayRecord, template: Mapping[str, Tensor]) -> Vector:
    """Read tensors by name, in the order, on the devices and with the dtypes of a template; other names are skipped."""
    try:
        read = {name: torch.from_numpy(record[name].numpy()) for name in template if name in record}
    except (TypeError, ValueError) as error:
        why, do = "they cannot be read", "send arrays in NumPy's format"
        raise UserError("Flower arrays", got=str(error), why=why, do=do) from error
    # A cast would drop the imaginary part with a warning.
    complex_names = [name for name, value in read.items() if value.is_complex() and not template[name].is_complex()]
    what = f"Flower array {complex_names[:1]}"
    require(not complex_names, what, "complex", "the model's is real", "send its real part")
    return {name: value.to(template[name].device, template[name].dtype) for name, value in read.items()}


def put_state(records: RecordDict, state: State, prefix: str = _EXTRA) -> None:
    """Replace the records under ``prefix`` by these vectors, a record each."""
    for key in [key for key in records if key.startswith(prefix)]:
        del records[key]
    for name, vector in state.items():
        records[f"{prefix}{name}"] = record_of(vector)


def get_state(records: RecordDict, template: Mapping[str, Tensor], prefix: str = _EXTRA) -> State:
    """Read the vectors that ``put_state`` added; names and dtypes come from ``template``."""
    kept = records.array_records
    return {key.removeprefix(prefix): vector_of(kept[key], template) for key in kept if key.startswith(prefix)}


def config_of(records: RecordDict, key: str = CONFIG) -> ConfigRecord:
    """Return the configuration that a message has, empty if it has none."""
    return records.config_records.get(key, ConfigRecord())


def config_int(config: ConfigRecord, name: str, default: int | None = None) -> int:
    """Return an integer of a configuration; refuse one that is missing without a default."""
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        why, do = "the client rule needs it", "run the app with sparing's strategy"
        raise UserError(f"Flower configuration {name!r}", got=repr(value), why=why, do=do)
    return value

"""What a Flower client and its server have to agree on: the settings that a client reads, sent with every message.

Each side has a method and a schedule of its own. Where they differ, a client would train in another way than the run
says, and its update would count like any other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from sparing.errors import UserError
from sparing.federated.methods.interface import Method
from sparing.federated.settings import Schedule

SETTINGS = "settings"
"""Record of the server's settings in a message: text by field."""

# Who is drawn and how much an update counts is the server's business alone.
_SCHEDULE_AT_SERVER = frozenset({"participation", "sampling", "spare", "weights"})
# So is what it makes of the updates; and a seed may be that of a noise which nobody else may know.
_METHOD_AT_SERVER = frozenset({"server", "combine", "norms", "seed"})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def client_settings(method: Method, schedule: Schedule) -> dict[str, str]:
    """Return what a client reads of both, as text by field.

    Example:
        >>> from sparing.federated.methods.fedprox import FedProx
        >>> found = client_settings(FedProx(mu=0.1), Schedule(lr=0.5))
        >>> found["method"], found["FedProx.mu"], found["Schedule.lr"], "Schedule.rounds" in found
        ('FedProx', '0.1', '0.5', False)
    """
    # A run is prolonged without a word to the clients, unless the rate depends on how long it is.
    skipped = _SCHEDULE_AT_SERVER if schedule.decay == "cosine" else _SCHEDULE_AT_SERVER | {"rounds"}
    # Who signs a masked sum counts on how many were asked.
    skipped -= {"participation", "spare"} if getattr(method, "signed", False) else set()
    rows = {f"Schedule.{f.name}": getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
    found = {name: _text(value) for name, value in rows.items() if name.removeprefix("Schedule.") not in skipped}
    return {**found, **dict(_method_fields("method", method))}


def require_agreement(ours: Mapping[str, str], servers: Mapping[str, object]) -> None:
    """Refuse to train by other settings than the server's; the line names the fields that differ."""
    names = sorted(ours.keys() | servers.keys())
    differ = [name for name in names if ours.get(name) != servers.get(name)]
    if differ and not servers:
        why, do = "nobody knows whether it trains in the same way", "run the same version of sparing on both sides"
        raise UserError("server's settings", got="none with the message", why=why, do=do)
    if differ:
        pairs = [f"{name} {ours.get(name, 'unset')} (server: {servers.get(name, 'unset')})" for name in differ]
        why = "this client would train in another way than the run says"
        do = "pass client_app and strategy the same method and Schedule"
        raise UserError("settings", got=", ".join(pairs), why=why, do=do)


def _method_fields(name: str, method: object) -> Iterator[tuple[str, str]]:
    """Fields of a method, and of the method that it may be around."""
    kind = type(method).__name__
    yield name, kind
    for field in dataclasses.fields(method) if dataclasses.is_dataclass(method) else ():
        value = getattr(method, field.name)
        if field.name == "method":
            yield from _method_fields(f"{kind}.method", value)
        elif field.name not in _METHOD_AT_SERVER:
            yield f"{kind}.{field.name}", _text(value)


def _text(value: object) -> str:
    """The same text for equal values in two processes: 1 is 1.0, a list is a tuple, and addresses do not count."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return _ADDRESS.sub("", str(getattr(value, "__qualname__", value)))

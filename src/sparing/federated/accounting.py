"""How much a run with clipped updates and noise tells about one client: ε at a given δ."""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sparing.errors import UserError, require
from sparing.federated.settings import Sampling


def epsilon(multipliers: Sequence[float], *, clients: int, drawn: int, sampling: Sampling, delta: float) -> float:
    """Return ε of rounds whose noise is ``multipliers`` times the clipping norm; infinite where a round has no noise.

    Poisson sampling: one client more or less (add or remove one), by privacy loss distributions. A fixed number: one
    client in place of another (replace one), which moves the sum by twice the clipping norm; by privacy loss
    distributions if all take part, else by Rényi divergences (Wang, Balle & Kasiviswanathan 2019, arXiv:1808.00087,
    Theorem 27). Both hold for whoever sees all global models but not who was drawn.
    """
    require(0 < delta < 1, "delta", delta, "it is a probability", "pass 0 < δ < 1, well below 1/clients")
    require(0 < drawn <= clients, "drawn", drawn, f"there are {clients} clients", f"pass 1 to {clients}")
    if not multipliers:
        return 0.0
    if min(multipliers) <= 0:
        return math.inf
    return _compose(frozenset(Counter(multipliers).items()), clients, drawn, sampling, delta)


@functools.cache
def _compose(rounds: frozenset[tuple[float, int]], clients: int, drawn: int, sampling: Sampling, delta: float) -> float:
    """Return ε of rounds by noise multiplier."""
    dp, share = _library(), drawn / clients
    by_loss = sampling == "poisson" or drawn == clients
    if by_loss:
        accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    else:
        accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for multiplier, count in sorted(rounds):
        # Halved, for in place of another a client moves the sum by 2C. Not by the library's replace-one relation with
        # loss distributions, which doubles the distance itself; its Rényi accountant does not.
        event = dp.GaussianDpEvent(multiplier if sampling == "poisson" else multiplier / 2)
        if sampling == "poisson":
            event = dp.PoissonSampledDpEvent(share, event)
        elif not by_loss:
            event = dp.SampledWithoutReplacementDpEvent(clients, drawn, event)
        accountant.compose(dp.SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(delta))


def _library() -> Any:
    """Import the accountant."""
    try:
        library = importlib.import_module("dp_accounting")
        for part in ("pld", "rdp"):
            importlib.import_module(f"dp_accounting.{part}")
    except ImportError as error:
        why = "dp-accounting is an extra of sparing"
        raise UserError("privacy", got=str(error), why=why, do="pip install 'sparing[privacy]'") from error
    return library

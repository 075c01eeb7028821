"""Where a run on Flower starts and how far it goes: a warm start, a resumed run, the rounds of the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from federated.test_flower import CLIENTS, ROWS, SCHEDULE, host, make_model, require_same
from refusals import refused
from sparing.federated import flower
from sparing.federated.embedded import simulate
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.moon import MOON

pytest.importorskip("flwr", reason="needs the extra [flower]")


def test_start_makes_the_rounds_that_the_schedule_has_left(tmp_path):
    for rounds, done in ((2, 2), (None, 3), (None, 3)):
        grid, server = host(schedule=SCHEDULE, checkpoint=tmp_path / "server", resume=True)
        server.start(grid, server.initial_arrays(), rounds)
        assert len(server.rounds) == done
    why = "num_rounds: got 1; 0 of the schedule's 3 rounds are left; pass server.left, or a longer Schedule"
    refused(why, server.start, grid, server.initial_arrays(), 1)


def warm_model():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make_model()


@pytest.mark.parametrize("method", [MOON(), Ditto()], ids=lambda one: one.name)
def test_clients_drawn_late_start_from_the_arrays_of_a_warm_start(method, tmp_path):
    """Also where another ServerApp goes on, which was not given them."""
    schedule = replace(SCHEDULE, rounds=5)
    host_of = lambda: host(method, schedule, checkpoint=tmp_path / "server", resume=True, memory=tmp_path / "memory")  # noqa: E731
    grid, server = host_of()
    server.start(grid, flower.strategy(method, schedule, warm_model, CLIENTS).initial_arrays(), 1)
    grid, server = host_of()
    server.start(grid, server.initial_arrays())
    assert {client for one in server.rounds[1:] for client in one.drawn} - set(server.rounds[0].drawn)
    same = simulate(warm_model, ROWS, method, schedule, engine="loop")
    require_same(server.params, same.params)
    # of Ditto's own models the global one knows nothing
    (key,) = method.client_state(server.initial)
    for client in {client for one in server.rounds[1:] for client in one.received}:
        records = grid.contexts[client + 1].state.array_records
        found = next(
            records[name] for when in ("pending", "kept") if (name := f"sparing/{when}/state/{key}") in records
        )
        require_same(dict(found.to_torch_state_dict()), same.state.clients[client][key])

"""Flower's engine against the plain loop, bit for bit, and against clients that fail, leave and come back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import RunError, UserError
from sparing.federated import flower
from sparing.federated.client.train import Client, buffers_of, client_setup, train
from sparing.federated.embedded import simulate
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.interface import Sent
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.server.faults import Guard
from sparing.federated.settings import Schedule, sample_clients
from sparing.seeds import stream

pytest.importorskip("flwr", reason="needs the extra [flower]")

SCHEDULE = Schedule(rounds=3, participation=0.5, local_epochs=1, batch_size=8, momentum=0.0)
CLIENTS = 4


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def rows(client):
    draw = stream(1, "rows", client)
    count = 16 + 4 * client
    return Client(torch.randn(count, 4, generator=draw), torch.randint(3, (count,), generator=draw))


ROWS = [rows(client) for client in range(CLIENTS)]


def require_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (FedAvg(), {}),
        (FedSign(gamma=0.1), {}),
        (FedSign(gamma=0.1), {"batch_norm": "local", "rounds": 5}),
        (FedAvg(), {"weights": "size"}),
        (FedAvg(), {"batch_norm": "recalibrate"}),
        (FedPAN(), {}),
        (FedAvg(), {"optimizer": "adamw", "lr": 0.01, "momentum": 0.9}),
        # Methods with a memory: five rounds at one half, so that clients come again, and new ones come late.
        (FedDyn(alpha=0.1), {"rounds": 5}),
        (SCAFFOLD(), {"rounds": 5}),
        (MOON(), {"rounds": 5}),
        (FedNova(), {}),
        (Ditto(), {"rounds": 5}),
    ],
)
def test_flower_gives_the_bits_of_the_plain_loop(method, changes):
    schedule = Schedule(**{name: getattr(SCHEDULE, name) for name in SCHEDULE.__dataclass_fields__} | changes)
    inputs = torch.cat([client.inputs for client in ROWS])
    found = flower.run_in_process(make_model, ROWS, method, schedule, seed=5, proxy=inputs)
    same = simulate(make_model, ROWS, method, schedule, seed=5, engine="loop", proxy=inputs)
    require_same(found.params, same.params)
    require_same(found.buffers, same.buffers)
    assert found.state.keys() == same.state.server.keys()
    for name, vector in same.state.server.items():
        require_same(found.state[name], vector)


def host(method=None, schedule=SCHEDULE, clients=CLIENTS, data_of=lambda number: ROWS[number], mods=(), memory=None,
         **says):  # fmt: skip
    method = method or FedAvg()
    app = flower.client_app(method, make_model, data_of, schedule, mods=mods, memory=memory)
    server = flower.strategy(method, schedule, make_model, clients, patience=0.0, **says)
    return flower.InProcessGrid(app, clients), server


def one_round(grid, server, number):
    from flwr.app import ConfigRecord

    messages = server.configure_train(number, server.initial_arrays(), ConfigRecord(), grid)
    return server.aggregate_train(number, grid.send_and_receive(messages))


EVERYBODY = Schedule(rounds=3, participation=1.0, local_epochs=1, batch_size=8, momentum=0.0)


def test_a_client_cannot_stretch_its_update_by_a_claim_of_few_steps():
    refused("rows: got None with FedNova", flower.strategy, FedNova(), EVERYBODY, make_model, CLIENTS)


def test_state_lives_in_the_context_of_its_node():
    grid, server = host(FedDyn(alpha=0.1), EVERYBODY)
    one_round(grid, server, 1)
    pending = [key for key in grid.contexts[1].state if key.startswith("sparing/pending/state/")]
    assert pending
    kept = grid.contexts[1].state.array_records[pending[0]].to_torch_state_dict()
    params, method, model = dict(server.initial), FedDyn(alpha=0.1), make_model()
    sent, state = Sent(params, {}, buffers_of(model)), method.client_state(params)
    setup = client_setup(model, method, EVERYBODY, seed=0)
    result = train(setup, ROWS[0], sent, state, number=0, client_id=0)
    require_same(dict(kept), result.state[pending[0].rsplit("/", 1)[1]])


def test_state_of_an_update_that_never_arrived_is_not_used():
    """The reply of round 2 is lost: in round 3 the client goes on from round 1, as if it had not been drawn."""
    from flwr.app import ConfigRecord

    grid, server = host(FedDyn(alpha=0.1), EVERYBODY)
    one_round(grid, server, 1)
    before = {key: value for key, value in grid.contexts[1].state.array_records.items() if "pending" in key}
    replies = grid.send_and_receive(server.configure_train(2, server.initial_arrays(), ConfigRecord(), grid))
    server.aggregate_train(2, [reply for reply in replies if reply.metadata.src_node_id != 1])
    assert [str(fault) for fault in server.rounds[-1].faults] == ["client 0: absent (no answer)"]
    grid.send_and_receive(server.configure_train(3, server.initial_arrays(), ConfigRecord(), grid))
    for key, record in before.items():
        kept = grid.contexts[1].state.array_records[key.replace("pending", "kept")]
        require_same(dict(kept.to_torch_state_dict()), dict(record.to_torch_state_dict()))


def test_a_node_that_lost_its_state_is_named_and_left_out():
    grid, server = host(FedDyn(alpha=0.1), EVERYBODY)
    one_round(grid, server, 1)
    grid.leave(1)
    grid.join(0)
    one_round(grid, server, 2)
    assert server.rounds[-1].received == (1, 2, 3)
    fault = server.rounds[-1].faults[0]
    assert fault.client == 0
    assert "client state of round 1: not at this node" in fault.detail


def test_a_client_that_leaves_and_returns_is_counted_once():
    grid, server = host(schedule=EVERYBODY)
    one_round(grid, server, 1)
    grid.leave(1)
    one_round(grid, server, 2)
    assert server.rounds[-1].received == (1, 2, 3)
    assert str(server.rounds[-1].faults[0]) == "client 0: absent (no answer)"
    # It returns under its old name and under a new one at once; whose node is online is not taken over by another.
    grid.come_back(1)
    new = grid.join(0)
    one_round(grid, server, 3)
    assert server.rounds[-1].received == (0, 1, 2, 3)
    assert server.rounds[-1].faults == ()
    assert server.rounds[-1].refused == (f"node {new}: says it is client 0, which node 1 is; check its partition-id",)
    grid.leave(1)
    one_round(grid, server, 4)
    assert server.rounds[-1].received == (0, 1, 2, 3)
    assert server._registry.client_of[new] == 0


def test_a_reply_that_comes_twice_counts_once():
    from flwr.app import ConfigRecord

    grid, server = host(schedule=EVERYBODY)
    replies = list(grid.send_and_receive(server.configure_train(1, server.initial_arrays(), ConfigRecord(), grid)))
    server.aggregate_train(1, [*replies, replies[0], replies[0]])
    once = server.params
    grid, server = host(schedule=EVERYBODY)
    one_round(grid, server, 1)
    require_same(once, server.params)


def test_clients_that_fail_are_named_and_the_round_survives():
    def data_of(number):
        if number == 2:
            raise RuntimeError("disk on fire")
        return ROWS[number]

    grid, server = host(schedule=EVERYBODY, data_of=data_of)
    one_round(grid, server, 1)
    assert server.rounds[-1].received == (0, 1, 3)
    assert str(server.rounds[-1].faults[0]) == "client 2: crash (RuntimeError: disk on fire)"


def broken(change):
    """A mod that spoils what client 1 sends."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 1 and reply.content.array_records:
            change(reply.content)
        return reply

    return mod


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda content: content.array_records["arrays"].pop("0.weight"), "wrong shape"),
        (lambda content: content.array_records["arrays"].update(more=content["arrays"]["0.bias"]), "wrong shape"),
        (lambda content: content["arrays"].update({"0.bias": content["arrays"]["3.bias"]}), "wrong shape"),
        (lambda content: content["metrics"].update({"one": math.nan}), "not finite"),
        (lambda content: content.pop("arrays"), "wrong shape"),
        (lambda content: content.update({"extra/more": content["arrays"]}), "wrong shape"),
    ],
)
def test_replies_that_do_not_fit_are_named_and_left_out(change, kind):
    grid, server = host(schedule=EVERYBODY, mods=[broken(change)])
    one_round(grid, server, 1)
    assert server.rounds[-1].received == (0, 2, 3)
    assert [(fault.client, fault.kind) for fault in server.rounds[-1].faults] == [(1, kind)]


def test_nobody_there_is_an_error():
    grid, server = host(schedule=EVERYBODY)
    for node in range(1, CLIENTS + 1):
        grid.leave(node)
    with pytest.raises(RunError, match=r"round 1: 0 clients left of the 1 that it needs; client 0: absent"):
        one_round(grid, server, 1)


def test_a_node_that_is_no_client_takes_no_part_and_is_named():
    grid, server = host(schedule=EVERYBODY)
    grid.join(7)
    one_round(grid, server, 1)
    assert server.rounds[-1].received == (0, 1, 2, 3)
    assert server.rounds[-1].refused == ("node 5: says it is client 7 of 4; check its partition-id",)
    plain, other = host(schedule=EVERYBODY)
    one_round(plain, other, 1)
    require_same(server.params, other.params)


def test_keys_that_are_bound_decide_who_is_who():
    """Node 1 says that it is client 0, and the server knows it as client 1: it fails by itself, and is named."""
    bound = {1: 1, 2: 0, 3: 2, 4: 3}
    grid, server = host(schedule=EVERYBODY, nodes=bound)
    stranger = grid.join(3)
    one_round(grid, server, 1)
    last = server.rounds[-1]
    assert last.received == (2, 3)
    assert [fault.client for fault in last.faults] == [0, 1]
    assert "the server knows this node as client 1; start the SuperNode with" in last.faults[1].detail
    assert last.refused == (f"node {stranger}: its key is registered for no client",)
    refused(r"nodes: got client \[9\]; there are 4", host, nodes={1: 9})


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(), FedDyn(alpha=0.1)], ids=lambda one: one.name)
def test_a_server_that_dies_is_taken_up_to_the_same_bits(method, tmp_path):
    schedule = Schedule(rounds=4, participation=0.5, local_epochs=1, batch_size=8, momentum=0.0)
    whole = flower.run_in_process(make_model, ROWS, method, schedule)
    file = tmp_path / "server.safetensors"
    for rounds in (2, 2):  # the nodes forget all but their folders, as with every new run of Flower
        grid, server = host(method, schedule, checkpoint=file, resume=True, memory=tmp_path / "memory")
        assert server.left == schedule.rounds - len(server.rounds)
        found = server.start(grid, server.initial_arrays(), rounds)
    assert set(found.train_metrics_clientapp) == {3, 4}
    require_same(server.params, whole.params)
    assert [one.number for one in server.rounds] == [1, 2, 3, 4]
    assert [one.drawn for one in server.rounds] == [one.drawn for one in whole.rounds]
    for name, vector in whole.state.items():
        require_same(server.state[name], vector)
    with pytest.raises(UserError, match=r"server\.safetensors of another run; it differs in schedule"):
        host(method, Schedule(rounds=4, lr=0.5, momentum=0.0), checkpoint=file, resume=True)


def test_a_new_server_without_the_clients_memory_says_so(tmp_path):
    schedule = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=8, momentum=0.0)
    for _ in range(2):
        grid, server = host(SCAFFOLD(), schedule, checkpoint=tmp_path / "server", resume=True)
        if server.left == 1:
            with pytest.raises(RunError, match="client state of round 1: not at this node, which has 0; scaffold"):
                server.start(grid, server.initial_arrays(), 1)
        else:
            server.start(grid, server.initial_arrays(), 1)


@pytest.mark.parametrize(
    ("weights", "rows", "says"),
    [
        ("uniform", None, "weight (claims 1e+12 and counts 1)"),
        ("size", [len(one) for one in ROWS], "weight (claims 1e+12 and counts"),
        ("size", None, "weight (claims "),
    ],
)
def test_a_client_does_not_say_how_much_it_counts(weights, rows, says):
    schedule = Schedule(rounds=1, participation=1.0, local_epochs=1, batch_size=8, weights=weights)
    claim = broken(lambda content: content["metrics"].update({"one": 1e12, "num-examples": 10**12}))
    grid, server = host(schedule=schedule, mods=[claim], rows=rows)
    one_round(grid, server, 1)
    assert server.rounds[-1].received == (0, 2, 3)
    assert says in str(server.rounds[-1].faults[0])


def test_a_claim_of_many_steps_counts_for_ten_medians():
    from flwr.app import MetricRecord, RecordDict

    from sparing.federated.flower.rounds import local_steps

    says = {0: 4, 1: 4, 2: 10**9, 5: [1, 1], 6: -3, 7: 6, 8: 4}
    contents = {client: RecordDict({"metrics": MetricRecord({"steps": made})}) for client, made in says.items()}
    assert local_steps(contents, None, Guard()) == {0: 4, 1: 4, 2: 40, 5: 0, 6: 0, 7: 6, 8: 4}
    assert local_steps(contents, None, Guard(heavy=None))[2] == 40
    assert local_steps(contents, None, Guard(heavy=2.0))[2] == 8
    assert local_steps(contents, list(range(9)), Guard()) == {0: 0, 1: 1, 2: 2, 5: 5, 6: 6, 7: 7, 8: 8}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("metrics"),
        lambda content: content["metrics"].update({"one": [1.0, 1.0]}),
        lambda content: content["arrays"].update({"0.weight": b"nothing"}),
    ],
)
def test_a_reply_that_nobody_can_read_does_not_end_the_run(change):
    def spoil(content):
        try:
            change(content)
        except (TypeError, ValueError):  # Flower itself refuses some
            content.pop("arrays")

    grid, server = host(schedule=EVERYBODY, mods=[broken(spoil)])
    one_round(grid, server, 1)
    assert server.rounds[-1].received == (0, 2, 3)


def test_metrics_that_differ_in_kind_are_left_out_of_the_means():
    odd = broken(lambda content: content["metrics"].update({"train-loss": [1.0, 2.0], "steps": math.inf}))
    grid, server = host(schedule=EVERYBODY, mods=[odd])
    one_round(grid, server, 1)
    assert server.rounds[-1].received == (0, 1, 2, 3)


def test_what_the_server_and_the_clients_measured_is_kept_by_round():
    found = flower.run_in_process(
        make_model, ROWS, FedAvg(), SCHEDULE, evaluate=lambda model: {"bias": float(model[3].bias.detach()[0])},
        mods=[flower.sign_telemetry],
    )  # fmt: skip
    assert found.metrics[3]["bias"] == float(found.params["3.bias"][0])
    assert 0.5 < found.metrics[1]["ssr"] <= 1
    assert found.rounds[0].drawn == found.rounds[0].received == sample_clients(SCHEDULE, CLIENTS, 0, 0)


def test_bytes_are_those_of_the_arrays():
    found = flower.run_in_process(make_model, ROWS, FedAvg(), EVERYBODY).rounds[0]
    model = make_model()
    payload = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    header = 128 * len(model.state_dict())  # of NumPy's format, one for each array
    assert found.bytes_down == found.bytes_up == CLIENTS * (payload + header)


def test_only_drawn_blocks_travel_up():
    def deep():
        layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*layers), nn.Linear(4, 3))

    schedule = Schedule(rounds=1, participation=1.0, local_epochs=1, batch_size=8, momentum=0.0, blocks=1)
    found = flower.run_in_process(deep, ROWS, FedAvg(), schedule).rounds[0]
    assert found.faults == ()
    assert found.bytes_up < found.bytes_down


def test_a_missing_extra_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "flwr.clientapp", None)
    with pytest.raises(UserError, match=r"pip install 'sparing\[flower\]'"):
        _ = flower.strategy
    with pytest.raises(AttributeError, match="nothing"):
        _ = flower.nothing


def test_another_version_of_flower_is_refused(monkeypatch):
    import flwr

    app = flower.client_app(FedAvg(), make_model, lambda number: ROWS[number], SCHEDULE)
    monkeypatch.setattr(flwr, "__version__", "2.0.0")
    refused(r"Flower: got 2\.0\.0", flower.InProcessGrid, app, 1)

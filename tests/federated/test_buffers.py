"""Statistics of the global model against those of all rows together, and counters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.federated.methods.controls import NormMatched
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import Update
from sparing.federated.methods.private import Private
from sparing.federated.methods.secure import SecureSum
from sparing.federated.server.buffers import average, mix, mixture, recalibrate
from sparing.federated.server.robust import Median
from sparing.federated.server.round import round_server
from sparing.federated.settings import Schedule
from sparing.seeds import stream

NAMES = ("n.running_mean", "n.running_var", "n.num_batches_tracked", "n.flag")


def statistics(rows):
    values = (rows.mean(0), rows.var(0, correction=0), torch.tensor(len(rows)), torch.tensor([len(rows) > 5, False]))
    return dict(zip(NAMES, values, strict=True))


def groups():
    source = stream(2, "groups")
    return [torch.randn(n, 3, generator=source, dtype=torch.float64) * n + n for n in (4, 6, 10)]


@pytest.mark.parametrize(
    "method",
    [
        Private(FedAvg(), noise=1.0, clip=1.0, per_round=2), SecureSum(FedAvg()), FedAvg(combine=Median()),
        NormMatched(FedAvg(combine=Median()), [{}]),
    ],
    ids=lambda method: method.name,
)  # fmt: skip
def test_variances_of_single_clients_go_round_no_defence(method):
    """The mixture is of raw statistics, so it is refused where these must not count one by one."""
    schedule = Schedule(rounds=1, participation=0.5, weights="uniform", batch_norm="local")
    how = {"seed": 0, "guard": None, "proxy": None}
    make = lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))  # noqa: E731
    refused("mixture: got True with", round_server, make, method, schedule, 4, **how, mixture=True)


def test_average_by_hand():
    a = {"x": torch.tensor([1.0, 2.0], dtype=torch.float16), "k": torch.tensor(9), "f": torch.tensor([True, False])}
    b = {"x": torch.tensor([4.0, 8.0], dtype=torch.float16), "k": torch.tensor(7), "f": torch.tensor([False, False])}
    found = average([a, b], [1.0, 2.0])
    assert found["x"].tolist() == [3.0, 6.0]
    assert (found["x"].dtype, found["k"].dtype, found["f"].dtype) == (torch.float16, torch.int64, torch.bool)
    assert int(found["k"]) == 9
    assert found["f"].tolist() == [True, False]


def test_mixture_is_the_statistics_of_all_rows():
    parts = groups()
    whole = statistics(torch.cat(parts))
    sizes = [float(len(part)) for part in parts]
    found = mixture([statistics(part) for part in parts], sizes, NAMES[1:2])
    for name in NAMES[:2]:  # ten roundings of float64 on values of order 100
        torch.testing.assert_close(found[name], whole[name], rtol=1e-13, atol=1e-12)
    plain = average([statistics(part) for part in parts], sizes)
    assert (plain["n.running_var"] < 0.95 * whole["n.running_var"]).all()
    assert torch.equal(plain["n.running_mean"], found["n.running_mean"])
    assert int(found["n.num_batches_tracked"]) == 10


def test_a_variance_without_a_mean_is_averaged():
    found = mixture(
        [{"running_var": torch.tensor([1.0])}, {"running_var": torch.tensor([3.0])}], [1.0, 1.0], ["running_var"]
    )
    assert found["running_var"].tolist() == [2.0]


def test_mix_changes_variances_alone():
    updates = [Update(at, {}, float(len(part)), {}, statistics(part)) for at, part in enumerate(groups())]
    merged = {name: torch.zeros(1) for name in NAMES}
    found = mix(merged, updates, NAMES[1:2])
    assert [name for name in NAMES if not torch.equal(found[name], merged[name])] == ["n.running_var"]


def test_recalibrate_gives_the_mean_statistics_of_batches_and_leaves_the_rest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.5), nn.BatchNorm1d(3)).double()
    model[0].eval()
    rows = torch.cat(groups())
    recalibrate(model, rows, batch=10)
    pieces = rows.split(10)
    torch.testing.assert_close(model[0].running_mean, torch.stack([p.mean(0) for p in pieces]).mean(0))
    torch.testing.assert_close(model[0].running_var, torch.stack([p.var(0) for p in pieces]).mean(0))
    # Without dropout the second layer sees normalised rows: mean 0.
    assert model[2].running_mean.abs().max() < 1e-12
    assert (model[0].momentum, model[0].training, model[1].training, model[2].training) == (0.3, False, True, True)


def test_bad_input():
    refused("nothing to average", average, [], [])
    refused("only some clients", average, [{"a": torch.ones(1)}, {}], [1.0, 1.0])
    refused("two rows", recalibrate, nn.BatchNorm1d(3), torch.ones(1, 3))

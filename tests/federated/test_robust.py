"""Robust means by hand, and against clients that send what they like."""

from __future__ import annotations

import pytest
import torch

from refusals import refused
from sparing.errors import UserError
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import Update
from sparing.federated.server.robust import Clipped, Combine, Krum, Mean, Median, TrimmedMean
from sparing.seeds import stream


def updates(*values: list[float]) -> list[Update]:
    rows = [torch.tensor(value, dtype=torch.float32) for value in values]
    return [Update(k, {"x": row}, buffers={"m": row}) for k, row in enumerate(rows)]


def combined(rule: Combine, sent: list[Update]) -> list[float]:
    return rule.params({"x": torch.zeros_like(sent[0].params["x"])}, sent)["x"].tolist()


def test_median_by_hand():
    assert combined(Median(), updates([1, 9], [5, 2], [3, 4])) == [3, 4]
    assert combined(Median(), updates([1, 9], [5, 2], [3, 4], [100, -7])) == [4, 3]
    assert combined(Median(), updates([1.5])) == [1.5]


def test_trimmed_mean_by_hand():
    sent = updates([1], [2], [4], [6], [100])
    assert combined(TrimmedMean(0.2), sent) == [4]  # without 1 and 100
    assert combined(TrimmedMean(0.1), sent) == [4]  # half a client is rounded up to one
    assert combined(TrimmedMean(0.4), sent) == [4]
    assert combined(TrimmedMean(0.0), sent) == pytest.approx([22.6])
    assert combined(TrimmedMean(0.45), updates([1], [3])) == [2]  # never all
    many = updates(*[[float(k**2)] for k in range(25)])  # 0.28 · 25 leaves out seven at each end, not eight
    assert combined(TrimmedMean(0.28), many) == pytest.approx([sum(k**2 for k in range(7, 18)) / 11])


def test_krum_by_hand():
    """Six, f = 1: the three nearest others. The scores of 0, 1, 2, 4, 9, 50 are 1+4+16, 1+1+9, 1+4+4, 4+9+16, 25+49+64
    and more: the third wins, then the second."""
    sent = updates([0], [1], [2], [4], [9], [50])
    assert combined(Krum(hostile=1), sent) == [2]
    assert combined(Krum(hostile=1, keep=2), sent) == [1.5]
    assert Krum(hostile=1).buffers({"m": torch.zeros(1)}, sent)["m"].tolist() == [2]  # those of the same client
    assert combined(Krum(hostile=0), updates([0], [3], [2])) == [3]


def test_krum_gives_equal_scores_to_the_lower_number():
    sent = updates([0, 0], [0, 0], [0, 1], [0, 1], [9, 9])
    assert combined(Krum(), sent) == combined(Krum(), sent[::-1]) == [0, 0]


def test_krum_weighs_all_tensors_of_a_model():
    """The fifth is among the others in x, and far away in y."""
    values = [(0.0, 0.0), (2.0, 0.1), (-2.0, 0.2), (1.5, 0.0), (0.1, 90.0)]
    sent = [Update(k, {"x": torch.tensor([x]), "y": torch.tensor([y])}) for k, (x, y) in enumerate(values)]
    found = Krum(hostile=1, keep=4).params({"x": torch.zeros(1), "y": torch.zeros(1)}, sent)
    assert found["y"].item() == pytest.approx(0.075)


def test_clipping_by_hand():
    """From g = (1, 1), an update of norm 5 over two tensors is shortened to 1, one of norm 0.5 stays."""
    g = {"x": torch.ones(1), "y": torch.ones(1)}
    sent = [
        Update(0, {"x": torch.tensor([4.0]), "y": torch.tensor([5.0])}),
        Update(1, {"x": torch.tensor([1.3]), "y": torch.tensor([1.4])}),
    ]
    found = Clipped(1.0).params(g, sent)
    assert [found["x"].item(), found["y"].item()] == pytest.approx([1 + (0.6 + 0.3) / 2, 1 + (0.8 + 0.4) / 2])
    assert Clipped(5.0, Median()).params(g, sent)["x"].item() == pytest.approx(2.65)
    assert torch.equal(Clipped(0.6).params(g, sent[1:])["x"], sent[1].params["x"])
    assert Clipped(1.0).buffers({"m": torch.zeros(1)}, updates([9.0], [1.0]))["m"].tolist() == [5]


@pytest.mark.parametrize("attack", ["huge", "flipped", "constant"])
@pytest.mark.parametrize(
    "rule",
    [Median(), TrimmedMean(0.3), Krum(hostile=3), Clipped(8.0, Median()), Clipped(3.0)],
    ids=lambda r: repr(r)[:14],
)
def test_hostile_clients_do_not_move_the_model_far(rule: Combine, attack: str):
    """Seven honest clients near 1 and three hostile ones: robust rules stay among the honest."""
    generator = stream(0, "hostile")
    honest = [1 + 0.1 * torch.randn(50, generator=generator) for _ in range(7)]
    wrong = {"huge": torch.full((50,), 1e30), "flipped": -honest[0], "constant": torch.full((50,), -5.0)}[attack]
    sent = [Update(k, {"x": x}) for k, x in enumerate([*honest, wrong, wrong, wrong])]
    found = FedAvg(combine=rule).aggregate({"x": torch.zeros(50)}, sent, {}, 10)[0]["x"]
    plain = FedAvg().aggregate({"x": torch.zeros(50)}, sent, {}, 10)[0]["x"]
    assert (found - 1).abs().mean() < (1.0 if rule == Clipped(3.0) else 0.15)
    assert (plain - 1).abs().mean() > 0.5


def test_a_mean_in_half_precision_is_summed_in_double():
    """4096 ones in half precision: added up there they stop at 2048."""
    sent = [Update(k, {"x": torch.ones(1, dtype=torch.float16)}) for k in range(4096)]
    assert Mean().params({"x": torch.zeros(1, dtype=torch.float16)}, sent)["x"].item() == 1


def test_what_cannot_work_is_refused():
    refused("pass 0 <= share", TrimmedMean, 0.5)
    with pytest.raises(UserError, match="Krum: got 4 models; to outvote 1 hostile models Krum needs 5"):
        combined(Krum(), updates([1], [2], [3], [4]))
    refused("to keep 5", combined, Krum(keep=5), updates([1], [2], [3], [4], [5]))
    refused("partial models", combined, Krum(), [*updates([1], [2], [3], [4]), Update(9, {})])
    for wrong in (lambda: Krum(hostile=-1), lambda: Krum(keep=0), lambda: Clipped(0)):
        with pytest.raises(UserError):
            wrong()

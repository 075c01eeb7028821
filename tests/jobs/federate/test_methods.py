"""Names on the command line and the values that they stand for."""

from __future__ import annotations

import pytest
import torch

from sparing.federated import Client, FedSign
from sparing.federated.methods.controls import Hinge, NormMatched, OwnSign
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.server.collusion import Collusion
from sparing.federated.server.defences import Bucketing, Bulyan, CenteredClipping, GeometricMedian
from sparing.federated.server.faults import Sabotage
from sparing.federated.server.optimizers import FedAdam, FedAvgM, FedYogi, Replace
from sparing.federated.server.robust import Clipped, Krum, Median, TrimmedMean
from sparing.federated.server.trust import FLTrust
from sparing.jobs.federate import settings as groups
from sparing.jobs.federate.methods import LABELS, force_of, method_of, poisoned, roles_of, sabotage_of
from sparing.jobs.federate.settings import Settings

VALUES = {
    "fedavg": FedAvg(),
    "fedprox": FedProx(mu=0.5),
    "moon": MOON(mu=0.5, temperature=0.2),
    "feddyn": FedDyn(alpha=0.3),
    "fedpan": FedPAN(periods=4.0, amplitude=0.1),
    "scaffold": SCAFFOLD(momentum=0.7),
    "fednova": FedNova(momentum=0.7),
    "fedsign": FedSign(gamma=0.2, reduction="mean", temperature="scale-aware"),
    "own-sign": OwnSign(gamma=0.2, reduction="mean", temperature="scale-aware"),
    "hinge": Hinge(gamma=0.2, reduction="mean"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_name_is_its_value(name):
    settings = Settings(
        fedprox=groups.FedProx(mu=0.5), moon=groups.Moon(mu=0.5, temperature=0.2), feddyn=groups.FedDyn(alpha=0.3),
        fedpan=groups.FedPan(periods=4.0, amplitude=0.1), momentum=0.7,
        fedsign=groups.FedSign(gamma=0.2, reduction="mean", temperature="scale-aware"),
    )  # fmt: skip
    assert method_of(name, settings) == VALUES[name]


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adamw", 0.001)])
def test_a_rate_that_is_not_given_is_that_of_the_optimizer(optimizer, lr):
    assert Settings(optimizer=optimizer).training().lr == lr
    assert Settings(optimizer=optimizer, lr=0.02).training().lr == 0.02


def test_strengths_that_are_not_given_are_those_of_the_method():
    assert method_of("moon", Settings()) == MOON()
    assert method_of("fedprox", Settings()) == FedProx()
    assert method_of("norm-matched", Settings(), [{"w": 1.0}]) == NormMatched(FedSign(), [{"w": 1.0}])


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"server": "fedadam"}, FedAvg(server=FedAdam(lr=0.01))),
        ({"server": "fedyogi"}, FedAvg(server=FedYogi(lr=0.01))),
        ({"server": "fedavgm", "server_lr": 0.5}, FedAvg(server=FedAvgM(lr=0.5))),
        ({"server_lr": 0.5}, FedAvg(server=Replace(0.5))),
        ({"robust": "median"}, FedAvg(combine=Median())),
        ({"robust": "trimmed", "trimmed": groups.Trimmed(share=0.3)}, FedAvg(combine=TrimmedMean(0.3))),
        ({"robust": "krum", "krum": groups.Krum(hostile=2)}, FedAvg(combine=Krum(2, None))),
        ({"robust": "bulyan", "krum": groups.Krum(hostile=2)}, FedAvg(combine=Bulyan(2))),
        ({"robust": "geometric", "bucket": 2}, FedAvg(combine=Bucketing(GeometricMedian(), 2))),
        ({"robust": "centered", "robust_clip": groups.RobustClip(norm=3.0)}, FedAvg(combine=CenteredClipping(3.0))),
        ({"robust": "clip", "robust_clip": groups.RobustClip(norm=3.0)}, FedAvg(combine=Clipped(3.0))),
        ({"robust": "fltrust"}, FedAvg(combine=FLTrust())),
    ],
)
def test_servers_and_robust_means(changes, method):
    assert method_of("fedavg", Settings(**changes)) == method


def test_the_force_is_told_for_pushes_alone():
    params = {"w": torch.ones(3), "b": torch.zeros(1)}
    settings = Settings(fedsign=groups.FedSign(gamma=0.1))
    forces = {name: force_of(method_of(name, settings), params) for name in ("fedavg", "fedsign", "own-sign", "hinge")}
    assert forces == {"fedavg": None, "fedsign": 0.1 / 8, "own-sign": 0.1 / 8, "hinge": 0.1 / 2}


def test_no_two_methods_of_a_page_look_alike():
    names = list(LABELS)
    assert len(set(roles_of(names[:8]).values())) == 8
    assert roles_of(["fedavg", "fedsign"]) == {"FedAvg": "baseline", "FedSign": "ours"}


def test_an_attack_is_its_value():
    assert sabotage_of(Settings()) is None
    assert sabotage_of(Settings(attack="nan", seed=3)) == Sabotage(kind="not finite", share=0.2, seed=3)
    assert sabotage_of(Settings(attack="alie", attacked=0.3)) == Collusion(kind="alie", share=0.3)
    clients = [Client(torch.zeros(2, 1), torch.tensor([0, 2])) for _ in range(20)]
    assert poisoned(clients, Settings(), 3) is clients
    wrong = poisoned(clients, Settings(attack="labels", attacked=0.5), 3)
    assert {tuple(one.targets.tolist()) for one in wrong} == {(0, 2), (2, 0)}
    assert sabotage_of(Settings(attack="labels")) is None

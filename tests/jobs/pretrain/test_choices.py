"""Words of the command line become values of the scaling room."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from sparing.errors import UserError
from sparing.jobs.pretrain import Pretrain
from sparing.jobs.pretrain.choices import dynamic_of, law_of, planned_density, rule_of, shares_of
from sparing.jobs.pretrain.settings import LawName, RuleName, Updates
from sparing.scaling.masks.density import ER, ERK
from sparing.scaling.masks.dynamic import GMP, SET, RigL
from sparing.scaling.masks.laws import Bernoulli, Blocks, ConstantFanIn, ExactCount, NofM
from sparing.scaling.rules import RULES, SP, CompleteP, SuPar


def test_densities():
    assert shares_of(0.25) == shares_of("1/4") == shares_of("0.25") == 0.25
    assert shares_of("erk:1/10") == ERK(total=0.1)
    assert shares_of("er:20") == ER(epsilon=20.0)
    with pytest.raises(UserError, match="of ERK the share"):
        shares_of("erk")
    assert shares_of("*.mlp.*=1/8,*.attn.*=0.5") == {"*.mlp.*": 0.125, "*.attn.*": 0.5}


def test_every_rule_has_a_word():
    assert {type(rule_of(Pretrain(rule=name))) for name in get_args(RuleName)} == set(RULES)
    assert rule_of(Pretrain(rule="sp")) == SP()


def test_a_rule_takes_what_was_chosen():
    settings = Pretrain(decay="sqrt", form="shifted", base_layers=2, input_scale=3.0, output_scale=4.0)
    expected = SuPar(decay="sqrt", form="shifted", depth=CompleteP(base_layers=2), input=3.0, output=4.0)
    assert rule_of(settings) == expected


def test_every_law_has_a_word():
    found = [law_of(name) for name in get_args(LawName)]
    expected = [Bernoulli(), ExactCount(), ConstantFanIn(), ConstantFanIn(balanced=True), Blocks(), NofM(n=2, m=4)]
    assert found == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", None),
        ("rigl", RigL(share=0.2, every=7, until=0.5)),
        ("set", SET(share=0.2, every=7, until=0.5)),
        ("gmp", GMP(final=0.125, every=7, until=0.5)),
    ],
)
def test_methods(name: str, expected: object):
    settings = Pretrain(dynamic=name, mask_updates=Updates(share=0.2, every=7, until=0.5), density="1/8")
    assert dynamic_of(settings) == expected


def test_what_is_pruned_later_begins_dense():
    settings = Pretrain(density="1/8")
    assert planned_density(settings) == 0.125
    assert planned_density(replace(settings, dynamic="gmp")) == 1.0

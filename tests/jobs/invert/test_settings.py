import pytest

from sparing.errors import UserError
from sparing.jobs.invert.settings import Numerical, Pinn, Settings


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"grid": 63}, "grid"),
        ({"grid": 0}, "grid"),
        ({"steps": 0}, "steps"),
        ({"outer_lr": 0.0}, "outer_lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"noise": -1.0}, "noise"),
        ({"observe": (0, 8)}, "observe"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"equation": "kdv", "field": 64}, "field"),
        ({"method": "pinn", "field": 64}, "field"),
        ({"field": 65}, "field"),
        ({"penalty": -1.0}, "penalty"),
        ({"penalty": float("nan")}, "penalty"),
        ({"smoothness": 0}, "smoothness"),
        ({"smoothness": 5}, "smoothness"),
        ({"method": "numerical", "starts": 2}, "starts"),
        ({"field": 64, "grid": 32}, "field"),
        ({"field": 64, "numerical": Numerical(law="orthonormal", directions=65)}, "directions"),
        ({"field": 40, "numerical": Numerical(law="hadamard", directions=65)}, "directions"),
    ],
)
def test_what_cannot_be_solved_is_refused(changes, word):
    with pytest.raises(UserError, match=word):
        Settings(**changes)


def test_a_difference_needs_a_step():
    with pytest.raises(UserError, match=r"numerical\.probe"):
        Numerical(probe=-1.0)


@pytest.mark.parametrize("changes", [{"depth": 1}, {"width": 0}, {"steps": 0}, {"lr": 0.0}, {"batch": 0}])
def test_a_network_that_is_none_is_refused(changes):
    with pytest.raises(UserError, match=r"pinn\."):
        Pinn(**changes)


def test_defaults_depend_on_what_is_sought():
    assert [Settings(equation=name).points for name in ("burgers", "allen-cahn", "kdv")] == [512, 256, 128]
    number, field = Settings(), Settings(field=64)
    assert [Settings(equation=name).guesses for name in ("burgers", "kdv")] == [1, 5]
    assert Settings(equation="kdv", method="numerical").guesses == 1
    assert (field.weight, Settings(penalty=0.1).weight) == (1e-6, 0.1)
    assert (number.drawn, field.drawn) == (1, 16)
    assert (number.observed, field.observed) == ((8, 8), (32, 64))
    assert (number.memory, field.memory) == ((0.5, 0.5), (0.9, 0.99))
    assert (number.rate, field.rate, Settings(outer_lr=0.2).rate) == (0.5, 0.1, 0.2)

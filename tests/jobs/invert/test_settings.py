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
        ({"outer_lr": 0.2}, "outer_lr: got 0.2; it belongs to Adam; omit it, or pass --method numerical or pinn"),
        ({"betas": (0.5, 0.9)}, "betas: .*belongs to Adam"),
        ({"patience": 3}, "patience: .*belongs to Adam"),
        ({"still": 1e-3}, "still: .*belongs to Adam"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"tolerance": 1e-2}, "tolerance: got 0.01; least squares would stop .*; pass 1e-4 or less"),
        ({"noise": -1.0}, "noise"),
        ({"observe": (0, 8)}, "observe"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"equation": "kdv", "field": 64}, "field"),
        ({"method": "pinn", "field": 64}, "field"),
        ({"field": 65}, "field"),
        ({"penalty": -1.0}, "penalty"),
        ({"penalty": float("nan")}, "penalty"),
        ({"field": 8, "observe": (2, 4), "penalty": "discrepancy"}, "discrepancy with 8 observations of 8 unknowns"),
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


@pytest.mark.parametrize("probe", [-1.0, 1e-20, 9.0])
def test_a_difference_needs_a_step(probe):
    with pytest.raises(UserError, match=r"numerical\.probe"):
        Numerical(probe=probe)


def test_settings_of_another_method_are_let_be():
    """What Adam takes stays Adam's, and a rule for the noise is least squares' alone."""
    Settings(method="numerical", outer_lr=0.2, betas=(0.5, 0.9), patience=3, still=1e-3)
    Settings(method="numerical", field=8, observe=(2, 2), penalty="discrepancy")
    Settings(field=8, observe=(3, 3), penalty="discrepancy", tolerance=1e-4)


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
    assert (number.rate, field.rate, Settings(outer_lr=0.2, method="pinn").rate) == (0.5, 0.1, 0.2)

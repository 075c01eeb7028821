from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.merge.settings import Settings, letter, named

TWO = (Path("a"), Path("b"))
FILES = (Path("a.safetensors"), Path("b.safetensors"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": (Path("a"),)}, "models: got 1"),
        ({"how": "ties"}, "base: got none"),
        ({"how": "greedy"}, "data: got none"),
        ({"how": "soup", "scale": 0.5}, "scale: got 0.5 with --how soup"),
        ({"how": "task", "base": Path("c"), "scale": 0.0}, "scale"),
        ({"how": "linear"}, "weights: got none"),
        ({"weights": (1.0, 1.0)}, "weights: got some with --how auto"),
        ({"how": "linear", "weights": (1.0,)}, "there are 2 models"),
        ({"how": "linear", "weights": (1.0, -1.0)}, "weights"),
        ({"how": "linear", "weights": (0.0, 0.0)}, "weights"),
        ({"how": "linear", "weights": (1.0, float("nan"))}, "weights"),
        ({"keep": 0.0}, "keep"),
        ({"keep": float("nan")}, "keep"),
        ({"drop": 1.0}, "drop"),
        ({"points": 10}, "points"),
        ({"points": 1}, "points"),
        ({"rows": 0}, "rows"),
        ({"length": 1}, "length"),
        ({"net": "nets:make"}, "net"),
        ({"models": FILES, "data": "digits"}, "--net"),
        ({"resume": True, "overwrite": True}, "resume"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, said):
    with pytest.raises(UserError) as caught:
        Settings(**({"models": TWO} | changes))
    assert said in str(caught.value)


def test_models_are_called_by_letter_and_name():
    settings = Settings(models=(Path("x/left"), Path("run/model"), FILES[0]))
    assert settings.labels == ("A (left)", "B (run)", "C (a.safetensors)")
    assert [letter(at) for at in (0, 25, 26, 53)] == ["A", "Z", "A2", "B3"]
    assert named(Path("model.safetensors")) == "model.safetensors"

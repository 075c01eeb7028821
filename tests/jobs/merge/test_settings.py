from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.merge.settings import Dare, Della, Settings, Ties, letter, named

TWO = (Path("a"), Path("b"))
FILES = (Path("a.safetensors"), Path("b.safetensors"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": (Path("a"),)}, "models: got 1"),
        ({"method": "ties"}, "base: got none"),
        ({"method": "greedy"}, "data: got none"),
        ({"method": "regmean"}, "data: got none; regmean weighs models by what it measures"),
        ({"method": "soup", "factor": 0.5}, "factor: got 0.5 with --method soup"),
        ({"method": "task", "base": Path("c"), "factor": 0.0}, "factor"),
        ({"method": "linear"}, "weights: got none"),
        ({"model_weights": (1.0, 1.0)}, "weights: got some with --method auto"),
        ({"method": "sce", "base": Path("c"), "model_weights": (1.0, 1.0)}, "weights: got some with --method sce"),
        ({"method": "linear", "model_weights": (1.0,)}, "there are 2 models"),
        ({"method": "linear", "model_weights": (1.0, -1.0)}, "weights"),
        ({"method": "linear", "model_weights": (0.0, 0.0)}, "weights"),
        ({"method": "linear", "model_weights": (1.0, float("nan"))}, "weights"),
        ({"method": "ties", "base": Path("c"), "model_weights": (1.0, -1.0)}, "weights"),
        ({"method": "model-stock"}, "base: got none"),
        ({"method": "model-stock", "base": Path("c"), "factor": 0.5}, "factor"),
        ({"method": "slerp", "models": (*TWO, Path("c"))}, "models: got 3"),
        ({"points": 10}, "points"),
        ({"points": 1}, "points"),
        ({"rows": 0}, "rows"),
        ({"length": 1}, "length"),
        ({"entry": "nets:make"}, "entry"),
        ({"models": FILES, "data": "digits"}, "--entry"),
        ({"data": ("alice", "alice")}, "data: got alice alice"),
        ({"resume": True, "overwrite": True}, "resume"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, said):
    with pytest.raises(UserError) as caught:
        Settings(**({"models": TWO} | changes))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("group", "share"),
    [(Ties, {"keep": 0.0}), (Ties, {"keep": float("nan")}), (Dare, {"drop": 1.0}), (Della, {"spread": 0.3})],
)
def test_shares_of_changes_are_shares(group, share):
    with pytest.raises(UserError, match=f"{group.name}.{next(iter(share))}: got"):
        group(**share)


def test_models_are_called_by_letter_and_name():
    settings = Settings(models=(Path("x/left"), Path("run/model"), FILES[0]))
    assert settings.labels == ("A (left)", "B (run)", "C (a.safetensors)")
    assert [letter(at) for at in (0, 25, 26, 53)] == ["A", "Z", "A2", "B3"]
    assert named(Path("model.safetensors")) == "model.safetensors"

"""Every mistake in the settings is one line that says what, got, why and what to do."""

from __future__ import annotations

import pytest

from sparing.errors import UserError
from sparing.jobs.pretrain import Pretrain
from sparing.jobs.pretrain.settings import Updates


def test_the_defaults_work():
    settings = Pretrain()
    assert settings.width % settings.head_dim == 0
    assert settings.base_width == settings.width


def test_a_share_of_the_run_is_a_share():
    with pytest.raises(UserError, match=r"mask_updates\.until: got 2\.0"):
        Updates(until=2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 100}, "width: got 100; heads have 32 dimensions"),
        ({"layers": 0}, "layers: got 0"),
        ({"kv_heads": 3}, "kv_heads: got 3; there are 4 heads"),
        ({"kv_heads": 2, "family": "gpt2"}, "kv_heads: got 2; GPT-2 has no shared"),
        ({"length": 1}, "length: got 1"),
        ({"vocabulary": 100}, "vocabulary: got 100"),
        ({"data": ()}, "data: got"),
        ({"held_out": 0.0}, "held_out: got 0.0"),
        ({"held_out": 1.0}, "held_out: got 1.0"),
        ({"density": 0}, "density: got 0.0"),
        ({"density": 1.5}, "density: got 1.5"),
        ({"density": "half"}, "density: got half; 'half' is no number"),
        ({"density": "1/0"}, "density: got 1/0"),
        ({"density": "erk:2"}, "ERK.total: got 2.0"),
        ({"density": "*.mlp.*=2"}, "density: got 2.0"),
        ({"rule": "sp", "form": "shifted"}, "form: got shifted; the standard"),
        ({"rule": "sp", "base_layers": 2}, "base_layers: got 2; the standard"),
        ({"input_scale": 0.0}, "input_scale: got 0.0"),
        ({"dynamic": "gmp", "density": "erk:0.1"}, "density: got erk:0.1; gmp prunes"),
        ({"dynamic": "gmp", "backend": "csr"}, "backend: got csr; gmp begins dense"),
        ({"dynamic": "rigl", "mask_updates": Updates(share=0.0)}, "got 0.0"),
        ({"optimizer": "muon", "backend": "csr"}, "backend: got csr; muon"),
        ({"optimizer": "muon", "dynamic": "gmp"}, "dynamic: got gmp; factors"),
        ({"optimizer": "muon", "dynamic": "set", "follow": "energy"}, "dynamic: got set; factors"),
        ({"lr": 0.0}, "lr: got 0.0"),
        ({"lr": float("nan")}, "lr: got nan"),
        ({"betas": (0.9, 1.0)}, "betas: got 1.0"),
        ({"warmup": 5, "steps": 5}, "warmup: got 5; the run has 5 steps"),
        ({"resume": True, "overwrite": True}, "resume: got and overwrite"),
        ({"base_width": 0}, "base_width: got 0"),
        ({"batch": 0}, "batch: got 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changes: dict, words: str):
    with pytest.raises(UserError) as caught:
        Pretrain(**changes)
    assert str(caught.value).startswith(words) or words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line_reads_every_form_of_density():
    import tyro

    for word, value in (("0.25", 0.25), ("1/8", "1/8"), ("erk:0.1", "erk:0.1"), ("*.mlp.*=1/8", "*.mlp.*=1/8")):
        assert tyro.cli(Pretrain, args=["--density", word]).density == value

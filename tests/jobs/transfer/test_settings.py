"""Settings that cannot work are refused in one line, before anything is written."""

from __future__ import annotations

import pytest

from sparing.errors import UserError
from sparing.jobs.transfer import Transfer
from sparing.jobs.transfer.settings import Updates, cells, lines, omitted


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"densities": (1.0, 1.5)}, "live share"),
        ({"densities": (0.001,)}, "live inputs"),
        ({"densities": (1.0, 1.0)}, "twice"),
        ({"log2_rates": ()}, "empty"),
        ({"log2_rates": (0.001, 99.0)}, "logarithms"),
        ({"pairs": ("128x0.5",)}, "width:density"),
        ({"pairs": ("128:0.5.5",)}, "no number"),
        ({"pairs": ("128:0.01",)}, "live inputs"),
        ({"family": "gpt2", "widths": (100,)}, "heads"),
        ({"family": "gpt2", "base_width": 100}, "heads"),
        ({"steps": 5}, "last tenth"),
        ({"warmup_share": 1.5}, "share"),
        ({"follow": "energy"}, "fixed masks"),
        ({"dynamic": "rigl", "mask_updates": Updates(every=500)}, "fewer"),
        ({"resume": True, "overwrite": True}, "deletes"),
        ({"weight_decay": -1.0}, "finite"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(wrong, word):
    with pytest.raises(UserError, match=word) as caught:
        Transfer(**wrong)
    assert "\n" not in str(caught.value)


def test_every_run_stands_once_seed_by_seed():
    settings = Transfer(
        widths=(64, 128), densities=(1.0, 0.25), log2_rates=(-8, -7), seeds=(3, 4), rules=("sp", "supar")
    )

    found = cells(settings)

    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2 * 2
    assert [cell.seed for cell in found] == [3] * 16 + [4] * 16


def test_too_sparse_places_are_left_out_and_named():
    settings = Transfer(widths=(64, 128), densities=(1.0, 1 / 16), least_live=8)
    assert omitted(settings) == [(64, 1 / 16)]
    assert {(cell.width, cell.density) for cell in cells(settings)} == {(64, 1.0), (128, 1.0), (128, 1 / 16)}


def test_lines_begin_with_the_densest_and_the_narrowest():
    settings = Transfer(widths=(128, 64), densities=(0.25, 1.0), rules=("supar",))

    found = {(line.along, line.name): line.places for line in lines(settings)}

    assert found == {
        ("density", "width 128"): ((128, 1.0), (128, 0.25)),
        ("density", "width 64"): ((64, 1.0), (64, 0.25)),
        ("width", "density 1"): ((64, 1.0), (128, 1.0)),
    }


def test_pairs_replace_the_grid():
    settings = Transfer(pairs=("128:1", "181:0.5", "256:2.5e-1"), rules=("sp",))
    (line,) = lines(settings)
    assert line.along == "pairs"
    assert line.places == ((128, 1.0), (181, 0.5), (256, 0.25))

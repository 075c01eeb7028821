"""Pictures and words of a run say what its rows say."""

from __future__ import annotations

import pytest
import torch

from snapshots import check_page
from sparing.jobs.condense import page as pictures
from sparing.jobs.condense.loop import UNITS
from sparing.jobs.condense.page import PAGE, answer, caveats, paper_figure, write_page
from sparing.report import Record

CLASSES = ("up", "down")
REAL = "one real image a class"


def record(**changes) -> Record:
    settings = {"data": "mnist", "per_class": 1, "judge": "test", "width": 16, "unroll": 100, "held_out_images": 5000}
    settings |= {"shift": 1}
    settings |= changes
    made = Record(question="Q?", settings=settings, seed=0, units=dict(UNITS), environment={})
    for step, accuracy in ((0, 12.5), (40, 61.25)):
        made.add("curve", method="truncated", step=step, seconds=float(step), accuracy=accuracy)
    made.add("memory", method="truncated", setting="truncated 3", peak=3 * 2**20)
    for step in range(1, 4):
        made.add("train", method="truncated", step=step, warning="beware" if step > 1 else "")
    made.add(
        "methods", method="truncated", accuracy=60.0, accuracy_low=58.0, accuracy_high=61.0, n=5, steps=40,
        seconds=40.0, seconds_per_step=1.0, outer_lr=0.1,
    )  # fmt: skip
    made.add(
        "control", what="one real image a class", accuracy=41.5, accuracy_low=35.0, accuracy_high=47.0, n=5, lr=0.02,
        inner_steps=300,
    )  # fmt: skip
    return made


def test_snapshot() -> None:
    check_page(PAGE.of(record()), __file__)


def test_the_answer_names_what_judged() -> None:
    assert "held-out images of cifar10" in answer(record(data="cifar10", judge="held-out"))


def test_the_answer_names_as_many_real_images() -> None:
    assert "on as many real images they get **41.5 %** (35.0 % to 47.0 % over 5 draws)" in answer(record())


def test_a_control_that_nothing_was_held_out_for_is_not_called_tuned() -> None:
    texts = {count: PAGE.of(record(held_out_images=count)).sections[1].text for count in (0, 5000)}
    assert "did best on held-out images" in texts[5000]
    assert "no images were held out" in texts[0]
    assert "did best" not in texts[0]


def test_caveats_name_nets_that_diverged() -> None:
    made = record()
    for what, accuracy in (("truncated", 60.0), (REAL, 0.0), (REAL, 41.5)):
        made.add("nets", what=what, accuracy=accuracy)
    said = [note for note in caveats(made) if "diverge" in note]
    assert said == ["1 of 2 nets (one real image a class) got 0 %, which is what a net that diverges counts as."]


def test_caveats_say_what_is_smaller_and_what_was_warned_of() -> None:
    said = " ".join(caveats(record()))
    assert "width 16 (paper 128), steps 40 (paper 10,000)" in said
    assert "unroll" not in said
    assert "moved alike, by up to one pixel to each side" in said
    assert "by up to 2 pixels" in " ".join(caveats(record(shift=2)))
    assert "moved" not in " ".join(caveats(record(shift=0)))
    assert "In 2 of 40 outer steps the method warned: beware." in said
    assert "test images were not touched" in " ".join(caveats(record(judge="held-out")))


@pytest.mark.parametrize("changes", [{"data": "fashion-mnist"}, {"judge": "held-out"}])
def test_the_papers_figures_stand_beside_runs_that_are_judged_as_it_does(changes) -> None:
    assert paper_figure(record(**changes)) is None
    assert "(Shen et al. 2024, Table 1)" in paper_figure(record()).svg()


@pytest.mark.parametrize("each", [1, 2])
def test_images_come_first(tmp_path, each: int) -> None:
    kept = {step: torch.rand(2 * each, 3, 4, 4) for step in (0, 40)}
    page = write_page(record(per_class=each), tmp_path / "page.html", kept, CLASSES).read_text()
    assert page.index("outer step 40") < page.index("accuracy goes from")
    assert ("image 2" in page) == (each == 2)


def test_images_keep_class_order_and_channels() -> None:
    images = torch.rand(6, 3, 4, 4)
    assert torch.equal(pictures.firsts(images, 2), images[[0, 3]])
    colour, grey = pictures.pixels(images), pictures.pixels(images[:, :1])
    assert colour[1].shape == (4, 4, 3)
    assert grey[1].shape == (4, 4)
    assert (colour[1][..., 2] == images[1, 2].numpy()).all()


def test_a_gallery_has_one_column_a_class(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(pictures.plots, "images", lambda rows, **_: seen.extend(rows))
    images = torch.arange(6.0).view(6, 1, 1, 1)
    pictures.gallery(images, CLASSES, title="T")
    assert [(name, [float(image[0, 0]) for image in row]) for name, row in seen] == [
        ("image 1", [0, 3]), ("image 2", [1, 4]), ("image 3", [2, 5]),
    ]  # fmt: skip


def test_our_bars_are_solid_and_the_papers_open() -> None:
    bars = pictures.paper_bars("mnist", 1)
    assert {bar.label: bar.value for bar in bars}["(FG)²U"] == 82.44
    assert all(bar.source for bar in bars)
    assert pictures.paper_bars("mnist", 7) == []

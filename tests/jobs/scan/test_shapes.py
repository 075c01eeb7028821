"""Lines, planes, surfaces, curvature and sharpness through the command's job: numbers of the library, and a page."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from safetensors.torch import save_file

from refusals import refused
from sparing.cli import main
from sparing.jobs.scan import run
from sparing.jobs.scan.shape_figures import curvature_verdict, plane_figure, surface_figure
from sparing.report import Record
from sparing.valley.scans.curvature import top_eigenpairs
from sparing.valley.scans.interpolate import interpolate
from sparing.valley.scans.sharpness import sharpness


@pytest.fixture
def others(entry, tmp_path, monkeypatch):
    """The subject with its measure, and three other models in files."""
    monkeypatch.syspath_prepend(tmp_path)
    import tiny_entry

    model, measure, calibrate = tiny_entry.make()
    made = {}
    for seed, name in enumerate(("b", "c", "d"), start=1):
        made[name] = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in made[name].parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        save_file(made[name].state_dict(), tmp_path / f"{name}.safetensors")
    yield model.eval(), measure, calibrate, made
    sys.modules.pop("tiny_entry", None)


def test_all_shapes_are_those_of_the_library_and_on_the_page(small, others, tmp_path):
    model, measure, calibrate, made = others
    files = [tmp_path / f"{name}.safetensors" for name in "bcd"]
    parts = ("surface", "curvature", "sharpness")
    record = run(small(parts=parts, towards=tuple(files[:2]), trajectory=(files[2],), points=3, eigenvalues=2))

    line = interpolate(model, made["b"], measure, lambdas=[0, 0.5, 1], calibrate=calibrate)
    assert [row["loss"] for row in record.table("line") if row["towards"] == "b"] == list(line.values["loss"])
    assert record.table("lines")[0]["gap_loss"] == line.gap["loss"]
    assert len(record.table("plane")) == len(record.table("surface")) == 9
    places = record.table("places")
    assert [row["kind"] for row in places] == ["model"] * 3 + ["checkpoint"]
    # weights of float32 rebuilt from coordinates
    assert places[1]["loss"] == pytest.approx(line.at("loss", 1.0), rel=1e-5)
    assert 0 < places[3]["off"] <= 1

    data = measure.batches(256)
    found = {row["quantity"]: row["value"] for row in record.table("curvature")}
    (top, _), _ = top_eigenpairs(model, measure.loss_of, data, 2, mode="batch")
    assert found["eigenvalue 1"] == pytest.approx(top, rel=2e-3)  # the tolerance of both iterations
    assert found["smallest eigenvalue"] <= found["eigenvalue 2"] <= found["eigenvalue 1"]
    plain = record.table("sharpness")[0]
    assert plain["rise"] == pytest.approx(sharpness(model, measure.loss_of, data, mode="batch").value, rel=1e-6)
    page = (tmp_path / "run" / "report.html").read_text()
    for words in ("Towards other models", "The plane of three models", "eigenvalue 2", "Highest rise", "A surface"):
        assert words in page, words
    # for desk and phone: line, plane, surface
    assert page.count("<svg") == 2 * 3
    assert "Map of" not in page
    assert "NaN" not in page
    assert plane_figure(record).axes() is not None
    assert surface_figure(record) is not None


def test_batches_of_unequal_size_have_the_mean_over_rows(others):
    model, measure, _, _ = others
    measure.batch_size = 24  # 64 rows: 24, 24, 16
    data = measure.batches()
    mean = sum(float(measure.loss_of(model, batch).detach()) for batch in data) / len(data)
    assert mean == pytest.approx(measure(model)["loss"], rel=1e-6)  # float32 sums in another order


@pytest.mark.parametrize(("lowest", "words"), [(-0.5, "Not a minimum"), (-0.001, "none is clearly negative")])
def test_what_is_no_minimum_is_told(lowest, words):
    record = Record(question="Q?", settings={}, seed=0, environment={})
    for quantity, value in (("eigenvalue 1", 2.0), ("smallest eigenvalue", lowest), ("norm of the gradient", 0.1)):
        record.add("curvature", quantity=quantity, value=value)
    assert words in curvature_verdict(record)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--towards", "b.safetensors", "c.safetensors", "d.safetensors"], "three span a plane"),
        (["--towards", "b.safetensors", "--trajectory", "c.safetensors"], "projected onto a plane"),
        (["--towards", "missing.safetensors"], "there is no such file"),
        (["--radius", "0"], "radius"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_a_line(arguments, words, capsys):
    assert main(["scan", "tiny_entry:make", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_measure_without_a_loss_is_refused_before_anything_is_written(small, tmp_path):
    refused("no loss to differentiate", lambda: run(small(model="tiny_entry:own", parts=("curvature",))))
    assert not (tmp_path / "run").exists()

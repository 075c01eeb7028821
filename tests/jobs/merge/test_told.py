"""The forecast from the validation rows, beside that of the weights."""

from __future__ import annotations

import pytest
import torch

from sparing.jobs.merge import Settings, job, run
from sparing.jobs.merge.inputs import gather
from sparing.jobs.merge.sources import open_all
from sparing.jobs.merge.told import told
from sparing.valley.forecast.soft_labels import measure_gaps


@pytest.fixture(autouse=True)
def _pageless(monkeypatch):
    monkeypatch.setattr(job, "write_page", lambda record, path: path)


def test_it_is_the_librarys_number_and_replaces_that_of_the_weights(family, text, tmp_path):
    from transformers import AutoModelForCausalLM

    names = (family["a"], family["stranger"])
    settings = Settings(models=names, data=str(text), length=16, rows=4, points=3, method="soup", out=tmp_path / "out")
    sources, _ = open_all(settings.models, settings.labels, None)
    inputs = gather(settings, sources)
    found = told(*sources, inputs)
    models = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in names]
    expected = measure_gaps(*models, [{"input_ids": inputs.validation.inputs, "use_cache": False}]).values
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)  # float32 logits
    record = run(settings)
    (row,) = record.table("forecast")
    assert row["rows"] == 4
    assert row["gap_loss"] == pytest.approx(float(found[:, 0].mean()), rel=1e-5)
    assert row["by_weights"] == "will not"
    assert row["by_weights_loss"] != row["gap_loss"]
    assert record.table("gap", metric="loss")[0]["predicted"] == row["gap_loss"]
    assert "By 4 of the rows the expected gap" in record.table("outlook")[0]["sentence"]
    blind = run(Settings(models=names, method="soup", out=tmp_path / "blind"))
    assert "a first answer, from the weights alone" in blind.table("outlook")[0]["sentence"]

"""``sparing merge RECIPE.yml`` as a person runs it."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from refusals import refused
from sparing.cli import main
from sparing.jobs.merge import Settings
from sparing.report import Record
from sparing.valley.merging.merge import merge
from sparing.valley.merging.ties import Ties


def test_a_recipe_gives_model_page_and_record(family, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    recipe = tmp_path / "ties.yml"
    recipe.write_text(
        f"models: [{{model: {family['a']}}}, {{model: {family['b']}}}]\nbase_model: {family['base']}\n"
        "merge_method: ties\nparameters: {weight: 0.5, density: 0.4}\n"
    )
    out = tmp_path / "out"
    status = main(["merge", str(recipe), "--out", str(out)])
    streams = capsys.readouterr()
    assert status == 0, streams.err
    assert f"model: {out / 'model'}" in streams.out
    states = {name: load_file(family[name] / "model.safetensors") for name in ("a", "b", "base")}
    wanted = merge([states["a"], states["b"]], base=states["base"], method=Ties(0.4, weights=(0.5, 0.5), tied="plus"))
    found = load_file(out / "model" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(value) for name, value in wanted.items())
    AutoModelForCausalLM.from_pretrained(out / "model")
    record = Record.read(out / "record.jsonl")
    assert [row["base"] for row in record.table("inputs")] == [True, False, False]
    assert "model/README.md" in [row["file"] for row in record.table("written")]
    assert "ties" in (out / "report.html").read_text()


def test_mistakes_in_a_recipe_are_the_users_and_leave_nothing(tmp_path, capsys):
    (tmp_path / "wrong.yml").write_text("merge_method: magic\nmodels: [{model: nowhere}]")
    assert main(["merge", str(tmp_path / "wrong.yml"), "--out", str(tmp_path / "out")]) == 2
    assert "merge_method: got magic; known are" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("change", [{"method": "ties"}, {"base": "b"}, {"data": "text.txt"}, {"align": "weights"}])
def test_what_a_recipe_says_itself_is_not_said_beside_it(tmp_path, change):
    refused(f"{next(iter(change))}: got .* beside a recipe", Settings, models=(tmp_path / "a.yml",), **change)
    refused("a recipe names its models itself", Settings, models=(tmp_path / "a.yml", tmp_path / "b"))

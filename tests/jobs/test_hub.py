"""Names on the hub: from its cache as it lies on the disk, or refused in a line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import zoo
from fake_hub import COMMIT, NAME, lay
from sparing.errors import UserError
from sparing.jobs import hub
from sparing.jobs.adapt import Settings as Adapt
from sparing.jobs.evaluate import Settings as Evaluate
from sparing.jobs.finetune import job, loop, state
from sparing.jobs.finetune.job import run
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.lm.corpus import tokenizer_for
from sparing.jobs.lm.models import config_of, hash_folder, load_model, load_tokenizer
from sparing.jobs.merge import Settings as Merge
from sparing.jobs.merge.job import run as merge
from sparing.jobs.plan import Settings as Plan
from sparing.jobs.plan.candidates import read_config
from sparing.jobs.pretrain import Settings as Pretrain
from sparing.jobs.run_file import Settings as FromFile
from sparing.jobs.scan import Settings as Scan
from sparing.jobs.subjects.folders import folder_at, open_folder

ONE, TWO = COMMIT, "2" * 40


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page and the ledgers, most of a short run."""
    monkeypatch.setattr(job, "write_page", lambda record, path, caveats: path.write_text(record.question))
    monkeypatch.setattr(loop, "note_predicted", lambda *arguments: None)
    monkeypatch.setattr(loop, "watched_step_", lambda *given: state.take_step_(*given[:2]))


@pytest.fixture
def other_dir(tmp_path: Path, tokenizer) -> Path:
    """The same model with other weights."""
    model = zoo.redraw_(zoo.llama(layers=3, vocab=258, dtype=torch.float32), seed=7)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": f"note {n} about a small thing"}) + "\n" for n in range(12)))
    return path


def settings_for(data: Path, tmp_path: Path, **changes) -> Finetune:
    tiny = {"length": 16, "steps": 2, "accumulate": 1, "max_new_tokens": 0, "method": "lisa"}
    return Finetune(**{"model": Path(NAME), "data": (data,), "out": tmp_path / "run"} | tiny | changes)


@pytest.mark.parametrize(
    "text",
    ["gpt2", "a/b/c", "/etc/model", "./owner/name", "../owner/name", "owner/na--me", "owner/..", "owner/notes.jsonl",
     "owner/model.safetensors", "module:function", "owner/name@", "-owner/name", "owner/.name", "", "run/model"],
)  # fmt: skip
def test_what_is_no_name_on_the_hub(text: str, hub_cache: Path):
    assert hub.name_of(text) is None


@pytest.mark.parametrize("there", ["owner", "owner/name"])
def test_a_path_comes_first(there: str, hub_cache: Path):
    assert hub.name_of("owner/name") == hub.Name("owner/name")
    Path(there).mkdir(parents=True)
    assert hub.name_of("owner/name") is None
    assert hub.folder_of(Path("owner/name")) == Path("owner/name")


def test_parts_of_a_name(hub_cache: Path):
    assert hub.name_of("Qwen/Qwen2.5-0.5B") == hub.Name("Qwen/Qwen2.5-0.5B")
    assert hub.name_of(Path("o/n:plain@refs/pr/1")) == hub.Name("o/n", "plain", "refs/pr/1")
    assert str(hub.Name("o/n", "plain", "v1")) == "o/n:plain@v1"
    assert hub.title("o/n@v1") == "n"
    assert hub.source("o/n@v1") == "o/n"


def test_a_run_takes_its_model_from_the_cache_and_names_the_commit(
    hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path, brisk
):
    lay(hub_cache, model_dir, ONE)
    record = run(settings_for(data, tmp_path))
    assert record.settings["model"] == f"{NAME}@{ONE}"
    assert record.question == "What does fine-tuning small on notes.jsonl change, and what does it cost?"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["hub"] == {f"model {NAME}": ONE}
    repeated = FromFile(tmp_path / "run" / "run.toml", "finetune", Finetune, None).defaults
    assert repeated.model == Path(f"{NAME}@{ONE}")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f'base_model: "{NAME}"' in card
    assert f"sparing finetune {NAME}@{ONE} notes.jsonl" in card
    # and the numbers are those of the folder
    local = run(settings_for(data, tmp_path, model=model_dir, out=tmp_path / "local"))
    losses = [[row["loss"] for row in one.table("held_out")] for one in (record, local)]
    assert losses[0] == losses[1]


def test_a_resumed_run_keeps_its_commit_when_main_has_moved(
    hub_cache: Path, model_dir: Path, other_dir: Path, data: Path, tmp_path: Path, brisk
):
    lay(hub_cache, model_dir, ONE)
    first = run(settings_for(data, tmp_path))
    lay(hub_cache, other_dir, TWO)
    again = run(settings_for(data, tmp_path, resume=True))
    assert again.settings["model"] == f"{NAME}@{ONE}"
    assert again.table("held_out") == first.table("held_out")
    anew = run(settings_for(data, tmp_path, out=tmp_path / "anew"))
    assert anew.settings["model"] == f"{NAME}@{TWO}"
    assert anew.table("held_out") != first.table("held_out")
    with pytest.raises(UserError, match="a resumed run must reach the same bits"):
        run(settings_for(data, tmp_path, resume=True, model=Path(f"{NAME}@{TWO}")))


def test_each_setting_keeps_the_commit_of_its_own(hub_cache: Path, model_dir: Path, other_dir: Path, tmp_path: Path):
    """One name may stand for a model and for a data set, and in two settings at two commits."""
    lay(hub_cache, model_dir, ONE)
    lay(hub_cache, other_dir, TWO)
    known = {"out": tmp_path / "merged", "method": "soup"}
    first = hub.pinned(Merge(models=(Path(NAME), Path(f"{NAME}@{ONE}")), base=Path(f"{NAME}@{ONE}"), **known), {})
    assert hub.commits(first) == {f"models {NAME}": f"{TWO} {ONE}", f"base {NAME}": ONE}
    (hub_cache / "models--some-owner--small" / "refs" / "main").write_text(ONE)  # main goes back
    again = Merge(models=(Path(NAME), Path("some-owner/x")), base=Path(NAME), **known)
    lay(hub_cache, other_dir, TWO, name="some-owner/x")
    pins = {f"models {NAME}": TWO, f"base {NAME}": ONE}
    found = hub.pinned(again, pins)
    assert (str(found.models[0]), str(found.base)) == (f"{NAME}@{TWO}", f"{NAME}@{ONE}")


def test_files_of_others_in_a_snapshot_do_not_stop_a_run_from_going_on(
    hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path
):
    snapshot = lay(hub_cache, model_dir, ONE)
    before = hash_folder(Path(f"{NAME}@{ONE}"))
    (snapshot / "pytorch_model.bin").write_bytes(b"of another program")
    assert hash_folder(Path(f"{NAME}@{ONE}")) == before
    (snapshot / "tokenizer_config.json").unlink()
    assert hash_folder(Path(f"{NAME}@{ONE}")) != before


OFFLINE = "none of that name, and HF_HUB_OFFLINE is set; run hf download some-owner/small where there is a network"


def test_what_the_cache_does_not_have_is_refused_in_a_line(hub_cache: Path, data: Path, tmp_path: Path):
    with pytest.raises(UserError, match=OFFLINE) as refused:
        run(settings_for(data, tmp_path))
    assert refused.value.what == "model"
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"data: got o/rows; .* run hf download o/rows --repo-type dataset"):
        hub.pinned(settings_for(Path("o/rows"), tmp_path, model=tmp_path), {})
    assert not (tmp_path / "run").exists()


def test_no_download_says_so(hub_cache: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match="and --no-download is passed"):
        run(settings_for(data, tmp_path, download=False))


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json"])
def test_half_a_model_is_refused(lost: str, hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path):
    lay(hub_cache, model_dir, ONE, leave=(lost,))
    with pytest.raises(UserError, match="has only a part of it, and HF_HUB_OFFLINE is set"):
        run(settings_for(data, tmp_path))


def test_a_shard_that_is_missing_is_seen(hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path):
    whole = tmp_path / "shards"
    load_model(model_dir, dtype=torch.float32).save_pretrained(whole, max_shard_size="40KB")
    load_tokenizer(model_dir).save_pretrained(whole)
    parts = sorted(file.name for file in whole.glob("*.safetensors"))
    assert len(parts) > 1
    lay(hub_cache, whole, ONE, leave=(parts[-1],))
    with pytest.raises(UserError, match="only a part of it"):
        hub.pinned(settings_for(data, tmp_path), {})
    lay(hub_cache, whole, TWO)
    assert hub.pinned(settings_for(data, tmp_path), {}).model == Path(f"{NAME}@{TWO}")


def test_code_beside_a_model_is_not_run(hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path):
    foreign = tmp_path / "foreign"
    load_model(model_dir, dtype=torch.float32).save_pretrained(foreign)
    load_tokenizer(model_dir).save_pretrained(foreign)
    told = json.loads((foreign / "config.json").read_text())
    told |= {"model_type": "strange", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}
    (foreign / "config.json").write_text(json.dumps(told))
    (foreign / "c.py").write_text("raise SystemExit('it ran')")
    lay(hub_cache, foreign, ONE)
    with pytest.raises(UserError, match="code of others is not run"):
        run(settings_for(data, tmp_path))


def test_a_plan_needs_the_configuration_alone(hub_cache: Path, model_dir: Path, tmp_path: Path):
    lay(hub_cache, model_dir, ONE, leave=tuple(file.name for file in model_dir.iterdir() if file.name != "config.json"))
    settings = hub.pinned(Plan(model=Path(NAME), out=tmp_path / "plan"), {})
    assert (settings.title, str(settings.place)) == ("small", f"{NAME}@{ONE}")
    found, own = read_config(settings), config_of(model_dir)
    assert (found.vocab_size, found.hidden_size) == (own.vocab_size, own.hidden_size)


def test_models_of_the_cache_merge(hub_cache: Path, model_dir: Path, other_dir: Path, tmp_path: Path):
    lay(hub_cache, model_dir, ONE)
    lay(hub_cache, other_dir, TWO, name="some-owner/other")
    models = (Path(NAME), Path("some-owner/other"))
    record = merge(Merge(models=models, out=tmp_path / "merged", method="soup"))
    assert record.settings["models"] == [f"{NAME}@{ONE}", f"some-owner/other@{TWO}"]
    assert "A (small) and B (other)" in record.question
    mean = load_model(tmp_path / "merged" / "model", dtype=torch.float64).state_dict()
    one, other = (load_model(folder, dtype=torch.float64).state_dict() for folder in (model_dir, other_dir))
    for name, value in mean.items():
        torch.testing.assert_close(
            value, (one[name] + other[name]) / 2, rtol=0, atol=6e-8
        )  # half the last bit of 1 in 32 bits


def test_other_verbs_read_names_too(hub_cache: Path, model_dir: Path, tmp_path: Path):
    """``scan`` a folder, ``pretrain`` a tokenizer, ``adapt`` and ``evaluate`` a model: each where it opens it."""
    lay(hub_cache, model_dir, ONE)
    place = Path(f"{NAME}@{ONE}")
    assert folder_at(place) == hub.folder_of(place)
    assert open_folder(folder_at(place))[1] == "language"
    assert len(tokenizer_for(str(place), "", 0)) == 258
    for settings in (
        Scan(model=NAME, data="alice", out=tmp_path), Adapt(model=NAME, out=tmp_path),
        Evaluate(model=Path(NAME), data=tmp_path, out=tmp_path),
    ):  # fmt: skip
        assert str(hub.pinned(settings, {}).model) == str(place)
    assert hub.pinned(Pretrain(data=("x",), tokenizer=NAME, out=tmp_path), {}).tokenizer == str(place)


def rows_dir(tmp_path: Path, card: str = "") -> Path:
    """A data set of three parts with a card, as the hub has them."""
    folder = tmp_path / "rows"
    (folder / "data").mkdir(parents=True)
    for part, count in {"train-0": 3, "train-1": 4, "validation-0": 2, "test-0": 5}.items():
        lines = (json.dumps({"text": f"{part} row {n}"}) + "\n" for n in range(count))
        (folder / "data" / f"{part}.jsonl").write_text("".join(lines))
    (folder / "README.md").write_text(card or CARD)
    (folder / "rows.py").write_text("raise SystemExit('it ran')")
    return folder


CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: validation, path: data/validation-*}
  - {split: test, path: data/test-*}
---
"""


def test_a_data_set_by_name(hub_cache: Path, model_dir: Path, tmp_path: Path, brisk):
    lay(hub_cache, rows_dir(tmp_path), ONE, name="some-owner/rows", kind="datasets")
    apart = Path("some-owner/rows")
    settings = settings_for(Path("some-owner/rows"), tmp_path, model=model_dir, held_out_data=apart)
    settings = hub.pinned(settings, {})
    assert settings.data == (Path(f"some-owner/rows@{ONE}"),)
    files = hub.files_of_data(settings.data[0])
    assert [file.name for file in files] == ["train-0.jsonl", "train-1.jsonl"]
    assert [file.name for file in hub.files_of_data(settings.data[0], held_out=True)] == ["validation-0.jsonl"]
    record = run(settings)
    assert [(row["file"], row["records"]) for row in record.table("data")] == [("rows", 7)]
    assert 'datasets: ["some-owner/rows"]' in (tmp_path / "run" / "model" / "README.md").read_text()


MORE = "data/test-*}\n- config_name: two\n  data_files: data/test-*\n"


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (CARD.replace("data/train-*", "https://127.0.0.1/rows.jsonl"), "its card names files elsewhere"),
        (CARD.replace("data/train-*", "hf://datasets/a/b/rows.jsonl"), "its card names files elsewhere"),
        (CARD.replace("data/train-*", "../../../../notes.jsonl"), "its card names files elsewhere|cannot tell"),
        (CARD.replace("split: train", "split: learn"), "it has no part named train: its parts are learn"),
        (CARD + "two\n", ""),
        (CARD.replace("default", "one").replace("data/test-*}\n", MORE), "pass OWNER/NAME:CONFIG"),
    ],
)  # fmt: skip
def test_data_sets_that_cannot_be_read(card: str, said: str, hub_cache: Path, data: Path, tmp_path: Path):
    lay(hub_cache, rows_dir(tmp_path, card), ONE, name="some-owner/rows", kind="datasets")
    name = Path(f"some-owner/rows@{ONE}")
    if not said:
        assert hub.files_of_data(name)
        return
    with pytest.raises(UserError, match=said):
        hub.files_of_data(name)


def test_a_configuration_of_a_data_set_is_named(hub_cache: Path, tmp_path: Path):
    card = CARD.replace("default", "one").replace("data/test-*}\n", MORE)
    lay(hub_cache, rows_dir(tmp_path, card), ONE, name="some-owner/rows", kind="datasets")
    files = hub.files_of_data(Path(f"some-owner/rows:two@{ONE}"))
    assert [file.name for file in files] == ["test-0.jsonl"]


def test_rows_are_not_lost_without_a_word(hub_cache: Path, tmp_path: Path):
    """A snapshot of a part of the files, or one of which nobody knows whether it is all, is not taken for the whole."""
    lay(hub_cache, rows_dir(tmp_path), ONE, name="some-owner/rows", kind="datasets", leave=("train-1.jsonl",))
    settings = settings_for(Path("some-owner/rows"), tmp_path, model=tmp_path)
    with pytest.raises(UserError, match="only a part of it"):
        hub.pinned(settings, {})
    for place, leave in (("a", ("train-1.jsonl",)), ("b", ())):
        lay(hub_cache, tmp_path / "rows", TWO, name=f"some-owner/{place}", kind="datasets", leave=leave)
        (hub_cache / f"datasets--some-owner--{place}" / "trees" / f"{TWO}.json").unlink()
        with pytest.raises(UserError, match="only a part of it"):
            hub.pinned(dataclasses.replace(settings, data=(Path(f"some-owner/{place}"),)), {})

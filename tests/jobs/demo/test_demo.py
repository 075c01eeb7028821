"""The whole demo, small: run once by its own entry; its record, its page, going on, and each chapter's own laws."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re

import pytest

from sparing.errors import UserError
from sparing.jobs import demo
from sparing.jobs.condense.methods import TITLES
from sparing.jobs.demo import (
    condensation,
    condensation_page,
    federated_page,
    layers,
    layers_page,
    page,
    sharding,
    sharding_page,
    transfer,
    transfer_page,
    valley,
    valley_page,
)
from sparing.jobs.demo.condensation import METHODS, images_of
from sparing.jobs.demo.layers import ARMS
from sparing.jobs.demo.settings import NAMES, Settings
from sparing.jobs.demo.sharding_ranks import reader
from sparing.jobs.federate import job
from sparing.report import Record, format_number

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # four processes


def again(folder, **settings) -> Record:
    return demo.run(Settings(out=folder, scale="tiny", resume=True, **settings))


def test_the_record_holds_every_chapter_and_what_it_took(finished):
    record, folder = finished
    assert page.finished(record) == list(NAMES)
    assert Record.read(folder / "record.jsonl").rows == record.rows
    assert list(page.times(record)) == list(NAMES)
    assert all(spent["cpu_seconds"] > 0 for spent in page.times(record).values())
    kept = {"seed": 0, "scale": "tiny", "source": "auto"}
    assert Record.read(folder / "record.jsonl").settings == kept
    assert record.settings == kept | {"out": str(folder)}  # where the page is; no such path is on the disk


def test_the_page_asks_answers_and_leads_on(finished):
    record, folder = finished
    html = (folder / "report.html").read_text()
    ids = re.findall(r'<section id="(\w+)">', html)
    assert ids == [*NAMES, "reproduce", "caveats"]
    strip = html[html.index('<nav aria-label="Answers"') : html.index("</nav>")]
    assert re.findall(r'href="#(\w+)"', strip) == list(NAMES)
    parts = html.split('<section id="')[1:-2]
    for chapter, part in zip(page.chapters_of(record, folder), parts, strict=True):
        head, _, folded = part.partition("<details>")
        assert len(chapter.numbers) == 3
        for number in chapter.numbers:
            assert number.value in head.replace("\N{NO-BREAK SPACE}", " ")
        assert chapter.numbers[0].value in strip.replace("\N{NO-BREAK SPACE}", " ")
        assert chapter.question in head
        assert "beside ours" in head
        assert head.count("<figure>") == 1
        assert folded.count("<figure>") == len(chapter.details.figures)
        assert "sparing " in head[head.index("Go deeper") :]
    assert "The scale is <strong>tiny</strong>" in html
    assert "Not run here" not in html
    assert 'id="chapter-' not in html


def test_no_two_ids_of_the_page_are_the_same(finished):
    html = (finished[1] / "report.html").read_text().replace('id="left-out"', "")
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_the_terminal_shows_a_table_for_each_chapter(finished, capsys):
    demo.show(finished[0])
    shown = capsys.readouterr().out
    for name in (*ARMS, TITLES["forward-gradient"], "SμPar", "IIG", "two random starts", "FedSign"):
        assert name in shown
    assert shown.rstrip().endswith("report.html")


def test_the_overview_shows_numbers_of_the_record(finished):
    record, folder = finished
    stored = json.loads((folder / "overview.json").read_text())
    assert (folder / "overview.png").stat().st_size > 20_000
    assert list(stored["rows"]) == list(NAMES)
    assert [row["peak_measured"] for row in stored["rows"]["memory"]] == [
        r["peak_measured"] for r in record.table("arms")
    ]
    assert stored["settings"] == Record.read(folder / "record.jsonl").settings
    assert "command" in stored["environment"]


def test_nothing_finished_is_run_again(finished, monkeypatch):
    """Every chapter's own work would fail; the record stays as it is, but for the row that says where the page is."""
    record, folder = finished
    before = list(record.rows)
    for module, work in (
        (demo, "gather"), (condensation, "load_digits"), (transfer, "digits"), (sharding, "run_ranks"),
        (valley, "load_inputs"), (job, "run"), (demo, "write_overview"),
    ):  # fmt: skip
        stop = pytest.fail if work != "write_overview" else lambda *_: None
        monkeypatch.setattr(module, work, lambda *_, work=work, stop=stop, **__: stop(f"{work} ran again"))
    monkeypatch.setattr(demo, "write_page", lambda *_: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert again(folder).rows == [*before, before[-1]]


def test_every_arm_has_its_rows(finished):
    record, _ = finished
    assert [row["method"] for row in record.table("arms")] == list(ARMS)
    assert [row["method"] for row in record.table("sweep")] == ["LISA", "LISA"]  # the others have a single rate
    assert {row["when"] for row in record.table("samples")} == {"before", *(f"after {arm}" for arm in ARMS)}
    for row in record.table("arms"):
        tried = {t["lr"]: t["dev_loss"] for t in record.table("sweep") if t["method"] == row["method"]}
        assert not tried or row["lr"] == min(tried, key=tried.__getitem__)  # the best on the development rows
        assert row["peak_predicted"] == pytest.approx(row["peak_measured"], rel=0.02)  # the promise of `memory`
    by = {row["method"]: row for row in record.table("arms")}
    saved = 1 - by["LISA, embedding frozen"]["peak_measured"] / by["full"]["peak_measured"]
    assert layers_page.numbers(record)[0].value == f"−{100 * saved:.0f} %"


def test_other_materials_than_it_began_with_are_refused(finished, made):
    record, folder = finished
    half = Record.read(folder / "record.jsonl")
    half.rows = [row for row in half.rows if row["table"] != "arms" or row["method"] != "LoRA"]
    assert layers.remaining(half) == ["LoRA"]
    assert "memory" not in page.finished(half)  # half a chapter is on no page
    next(row for row in half.rows if row["table"] == "materials")["name"] = "another model"
    with pytest.raises(UserError, match="began on another model"):
        layers.run_chapter(made, half, seed=0, path=folder / "half.jsonl")
    assert record.table("materials")[0]["name"] == "a tiny model"


def test_every_condensation_has_its_rows_and_images(finished, small):
    record, folder = finished
    names = [TITLES[method] for method in METHODS]
    assert [row["method"] for row in condensation_page.rows_of(record)] == names
    assert all(row["peak"] > 0 for row in condensation_page.rows_of(record))
    images = images_of(folder, record)
    assert list(images) == ["the start", *names]
    assert all(found.shape == (10, 1, 28, 28) for found in images.values())
    assert len({float(found.sum()) for found in images.values()}) == 4  # each went its own way from one start
    best = max(row["accuracy"] for row in record.table("condensed"))
    assert f"**{best:.3g}"[:4] in condensation_page.answer(record, small.condense).replace(".0", "")


def test_the_papers_accuracies_stand_beside_the_papers_data_only(finished, small):
    record, folder = finished
    assert "82.4 %" in condensation_page.claims(record)[0].paper
    assert len(condensation_page.details(record, small.condense, folder).figures) == 3
    other = Record.read(folder / "record.jsonl")
    next(row for row in other.rows if row["table"] == "condense_data")["name"] = "typeset digits"
    assert {claim.paper for claim in condensation_page.claims(other)} == {"–"}
    assert len(condensation_page.details(other, small.condense, folder).figures) == 2


def test_the_seed_of_the_demo_is_that_of_the_scaling_runs(finished, tmp_path, small):
    record, _ = finished
    assert len(record.table("transfer_runs")) == 3 * 2 * 2
    other = Record(question="Q?", settings={}, seed=1, environment={})
    work = dataclasses.replace(small.transfer, rates=(-8,))
    transfer.run_chapter(other, seed=1, path=tmp_path / "record.jsonl", work=work)
    first = {(row["rule"], row["density"]): row["loss"] for row in record.table("transfer_runs") if row["x"] == -8}
    assert all(row["loss"] != first[row["rule"], row["density"]] for row in other.table("transfer_runs"))


def test_the_scaling_chapter_tells_what_the_dense_rate_costs(finished, small):
    study = transfer_page.study_of(finished[0], small.transfer)
    sparse = next(row for row in study.table("transfer") if (row["rule"], row["density"]) == ("supar", 0.5))
    assert f"**{format_number(sparse['loss_transferred'])} nat**" in transfer_page.answer(study, small.transfer)
    rows = transfer_page.rows_of(study)
    assert [(row["rule"], row["density"]) for row in rows][-2:] == [("SμPar", "dense"), ("SμPar", "1/2")]
    assert len(transfer_page.details(study, small.transfer).figures) == 5


def test_bytes_of_the_processes_are_those_of_closed_forms(finished, small):
    """Float32, all sizes divisible by four. DDP holds 16 bytes a weight; GGG a quarter of it; IIG 4/2 + 4/2 + 8/4."""
    record, _ = finished
    weights = sum(p.numel() for p in reader(small.shard).parameters())
    rows = {row["plan"]: row for row in record.table("shard_runs")}
    assert {plan: row["held"] / weights for plan, row in rows.items()} == {"NNN": 16, "NNG": 10, "IIG": 6, "GGG": 4}
    assert rows["NNN"]["sent_intra"] == 4 * weights  # reduce-scatter and all-gather of halves
    assert rows["NNN"]["sent_inter"] == 2 * weights
    assert rows["IIG"]["sent_inter"] == 2 * weights
    assert sharding_page.exact(record)
    assert sharding_page.largest_loss_gap(record) < 1e-5  # float32 sums in another order
    assert "37.5 %" in sharding_page.answer(record)
    assert sharding_page.numbers(record)[1].value == "37.5 %"


def test_every_net_curve_and_pair_is_in_the_record(finished):
    record, folder = finished
    assert [row["net"] for row in record.table("valley_nets")] == ["start", "tuned-a", "tuned-b", "other-a", "other-b"]
    assert [row["sign"] for row in record.table("valley_curves")] == ["raw", "consistent"]
    assert [row["pair"] for row in record.table("valley_merges")] == list(valley.PAIRS)
    same, other = record.table("valley_merges")
    assert same["agreement"] > other["agreement"]  # copies of one net against strangers
    for row in (same, other):
        assert row["gap"] == pytest.approx(row["error_merged"] - (row["error_a"] + row["error_b"]) / 2)
    assert valley_page.rows_of(record)[0]["gap"] == pytest.approx(100 * same["gap"])
    assert valley_page.answer(record).count("**") == 8  # two indices, two gaps
    assert valley.path_of(folder, "start").exists()


def test_a_valley_chapter_goes_on_to_the_same_numbers(finished, tmp_path, monkeypatch, small):
    """Killed while the third net trains: those on the disk are kept."""
    made = []
    inner = valley.train

    def train(*arguments, **settings):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(inner(*arguments, **settings))
        return made[-1]

    path = tmp_path / "record.jsonl"
    record = Record(question="Q?", settings={}, seed=0, environment={})
    with monkeypatch.context() as patch:
        patch.setattr(valley, "train", train)
        with pytest.raises(KeyboardInterrupt):
            valley.run_chapter(record, seed=0, path=path, work=small.valley)
    half = Record.read(path)
    assert [row["net"] for row in half.table("valley_nets")] == ["start", "tuned-a"]
    valley.run_chapter(half, seed=0, path=path, work=small.valley)

    def numbers(one):
        return {
            name: [{key: cell for key, cell in row.items() if key != "seconds"} for row in one.table(name)]
            for name in one.tables if name.startswith("valley")
        }  # fmt: skip

    assert numbers(half) == numbers(finished[0])


def test_without_a_calibration_the_gap_is_measured_and_not_predicted(finished, tmp_path, monkeypatch, small):
    def missing(*_, **__):
        raise UserError("calibration", got="the shipped file", why="it has too few pairs", do="measure them")

    monkeypatch.setattr(valley, "predict_merge", missing)
    inputs = valley.load_inputs(small.valley, 0)
    record = Record(question="Q?", settings={}, seed=0, environment={})
    load = valley.train_all(inputs, finished[0], finished[1] / "record.jsonl")
    valley.merge_pair(inputs, record, tmp_path / "record.jsonl", "one start", load)
    (row,) = record.table("valley_merges")
    assert row["predicted"] is None
    assert row["gap"] == finished[0].table("valley_merges")[0]["gap"]


def test_the_clients_runs_have_their_rows_and_bytes(finished, small):
    record, _ = finished
    rows = federated_page.rows_of(record, small.federate)
    methods = ["FedAvg", "FedSign", "own sign", "FedDyn", "FedAvg, 1 block drawn"]
    assert [row["method"] for row in rows] == methods
    whole, few = (next(r for r in record.table("federated_methods") if r["run"] == run) for run in ("main", "blocks"))
    assert few["bytes_up"] < whole["bytes_up"]
    assert all(row["up_counted"] == row["up_predicted"] for row in rows)
    saved = 1 - few["bytes_up"] / whole["bytes_up"]
    assert federated_page.numbers(record, small.federate)[2].value == f"−{100 * saved:.0f} %"
    assert f"**{100 * rows[0]['accuracy']:.1f} %**" in federated_page.answer(record, small.federate)


def test_flower_gives_the_same_model(finished):
    pytest.importorskip("flwr")
    (row,) = finished[0].table("federated_flower")
    assert row["apart"] < 1e-6  # float32: the embedded engine multiplies stacked clients, Flower each alone

"""The whole demo, small: run once by its own entry; its record, its page, and each chapter's own laws."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from sparing.jobs import demo
from sparing.jobs.condense.methods import TITLES
from sparing.jobs.condense.page import percent
from sparing.jobs.demo import condense, memory, page, shard, transfer, valley
from sparing.jobs.demo.condense import CondenseChapter
from sparing.jobs.demo.federate import FederateChapter
from sparing.jobs.demo.memory import ARMS, MemoryChapter
from sparing.jobs.demo.settings import NAMES, Settings
from sparing.jobs.demo.shard import ShardChapter
from sparing.jobs.demo.shard_ranks import reader
from sparing.jobs.demo.transfer import TransferChapter
from sparing.jobs.demo.valley import ValleyChapter
from sparing.jobs.federate import job
from sparing.report import Record, format_number

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # four processes


def test_the_record_holds_every_chapter_and_what_it_took(finished):
    record, folder = finished
    assert page.finished(record) == list(NAMES)
    assert Record.read(folder / "record.jsonl").rows == record.rows
    assert [row["chapter"] for row in record.table("chapters")] == list(NAMES)
    assert all(row["cpu_seconds"] > 0 for row in record.table("chapters"))
    kept = {"seed": 0, "scale": "tiny", "source": "auto"}
    assert Record.read(folder / "record.jsonl").settings == kept
    assert record.settings == kept | {"out": str(folder)}  # where the page is; no such path is on the disk
    assert str(folder) not in (folder / "record.jsonl").read_text()


def test_each_chapter_has_its_answer_numbers_picture_and_table(finished):
    record, folder = finished
    html = (folder / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)">', html) == [*NAMES, "reproduce", "caveats"]
    strip = html[html.index('<nav aria-label="Answers"') : html.index("</nav>")]
    assert re.findall(r'href="#(\w+)"', strip) == list(NAMES)
    parts = html.split('<section id="')[1:-2]
    for chapter, part in zip(page.chapters_of(record, folder), parts, strict=True):
        head, _, folded = part.partition("<details>")
        shown = chapter.section
        assert len(shown.numbers) == 3
        for number in shown.numbers:
            assert number.value in head.replace("\N{NO-BREAK SPACE}", " ")
        assert shown.numbers[0].value in strip.replace("\N{NO-BREAK SPACE}", " ")
        assert chapter.question in head
        assert chapter.answer()
        assert "beside ours" in head
        assert head.count("<figure>") == 1
        assert folded.count("<figure>") == len(chapter.figures()) - 1
        assert folded.count("<table") == len(chapter.tables())
        assert "sparing " in head[head.index("Go deeper") :]
    assert "Not run here" not in html
    assert 'id="chapter-' not in html
    ids = re.findall(r'\sid="([^"]+)"', html.replace('id="left-out"', ""))
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
    peaks = [row["peak_measured"] for row in record.table("arms")]
    assert [row["peak_measured"] for row in stored["rows"]["memory"]] == peaks
    assert stored["settings"] == Record.read(folder / "record.jsonl").settings
    assert "command" in stored["environment"]


def test_nothing_finished_is_run_again(finished, monkeypatch):
    """Every chapter's own work would fail; images and nets that are gone are written again, the record is the same."""
    record, folder = finished
    for module, work in (
        (memory, "gather"), (condense, "load_digits"), (transfer, "train"), (shard, "run_ranks"),
        (valley, "load_inputs"), (job, "run"),
    ):  # fmt: skip
        monkeypatch.setattr(module, work, lambda *_, work=work, **__: pytest.fail(f"{work} ran again"))
    for drawing in ("write_overview", "write_page"):
        monkeypatch.setattr(demo, drawing, lambda *_: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    files = [folder / name for name in (*condense.FILES.values(), *valley.FILES.values())]
    before = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    assert demo.run(Settings(out=folder, scale="tiny", resume=True)).rows == record.rows
    assert [path.read_bytes() for path in files] == before


def test_every_arm_has_its_rows(finished):
    record, folder = finished
    assert [row["method"] for row in record.table("arms")] == list(ARMS)
    assert [row["method"] for row in record.table("sweep")] == ["LISA", "LISA"]  # the others have a single rate
    assert {row["when"] for row in record.table("samples")} == {"before", *(f"after {arm}" for arm in ARMS)}
    for row in record.table("arms"):
        tried = {t["lr"]: t["dev_loss"] for t in record.table("sweep") if t["method"] == row["method"]}
        assert not tried or row["lr"] == min(tried, key=tried.__getitem__)  # the best on the development rows
        assert row["peak_predicted"] == pytest.approx(row["peak_measured"], rel=0.02)  # the promise of `memory`
    by = {row["method"]: row for row in record.table("arms")}
    saved = 1 - by["LISA, embedding frozen"]["peak_measured"] / by["full"]["peak_measured"]
    assert MemoryChapter(record, folder).numbers()[0][0] == f"−{100 * saved:.0f} %"


def test_every_condensation_has_its_rows_and_images(finished):
    record, folder = finished
    chapter = CondenseChapter(record, folder)
    names = [TITLES[method] for method in condense.METHODS]
    assert [row["method"] for row in chapter.rows] == names
    assert all(row["peak"] > 0 for row in chapter.rows)
    assert list(chapter.images) == ["the start", *names]
    assert all(found.shape == (10, 1, 28, 28) for found in chapter.images.values())
    assert len({float(found.sum()) for found in chapter.images.values()}) == 4  # each went its own way from one start
    best = max(row["accuracy"] for row in record.table("condensed"))
    assert f"**{best:.3g}"[:4] in chapter.answer().replace(".0", "")
    assert f"Ten real images teach them **{percent(chapter.real['accuracy'])}**" in chapter.answer()


def test_the_papers_accuracies_stand_beside_the_papers_data_only(finished):
    record, folder = finished
    assert "82.4 %" in CondenseChapter(record, folder).claims()[0][1]
    assert len(CondenseChapter(record, folder).figures()) == 4
    other = Record.read(folder / "record.jsonl")
    next(row for row in other.rows if row["table"] == "condense_data")["name"] = "typeset digits"
    assert {paper for _, paper, _ in CondenseChapter(other, folder).claims()} == {"–"}
    assert len(CondenseChapter(other, folder).figures()) == 3


def test_the_scaling_chapter_tells_what_the_dense_rate_costs(finished):
    record, folder = finished
    chapter = TransferChapter(record, folder)
    assert len(record.table("transfer_runs")) == 3 * 2 * 2
    sparse = next(row for row in chapter.study.table("transfer") if (row["rule"], row["density"]) == ("supar", 0.5))
    assert f"**{format_number(sparse['loss_transferred'])} nat**" in chapter.answer()
    assert [(row["rule"], row["density"]) for row in chapter.rows][-2:] == [("SμPar", "dense"), ("SμPar", "1/2")]
    assert len(chapter.figures()) == 6


def test_bytes_of_the_processes_are_those_of_closed_forms(finished):
    """Float32, all sizes divisible by four. DDP holds 16 bytes a weight; GGG a quarter of it; IIG 4/2 + 4/2 + 8/4."""
    record, folder = finished
    weights = sum(p.numel() for p in reader(shard.WORKS["tiny"]).parameters())
    rows = {row["plan"]: row for row in record.table("shard_runs")}
    assert {plan: row["held"] / weights for plan, row in rows.items()} == {"NNN": 16, "NNG": 10, "IIG": 6, "GGG": 4}
    assert rows["NNN"]["sent_intra"] == 4 * weights  # reduce-scatter and all-gather of halves
    assert rows["NNN"]["sent_inter"] == 2 * weights
    assert rows["IIG"]["sent_inter"] == 2 * weights
    chapter = ShardChapter(record, folder)
    assert chapter.exact
    assert chapter.largest_loss_gap < 1e-5  # float32 sums in another order
    assert "37.5 %" in chapter.answer()
    assert chapter.numbers()[1][0] == "37.5 %"


def test_every_net_curve_and_pair_is_in_the_record(finished):
    record, folder = finished
    assert [row["net"] for row in record.table("valley_nets")] == list(valley.NETS)
    assert [row["sign"] for row in record.table("valley_curves")] == ["raw", "consistent"]
    assert [row["pair"] for row in record.table("valley_merges")] == list(valley.PAIRS)
    same, other = record.table("valley_merges")
    assert same["agreement"] > other["agreement"]  # copies of one net against strangers
    for row in (same, other):
        assert row["gap"] == pytest.approx(row["error_merged"] - (row["error_a"] + row["error_b"]) / 2)
    chapter = ValleyChapter(record, folder)
    assert chapter.rows[0]["gap"] == pytest.approx(100 * same["gap"])
    assert chapter.answer().count("**") == 8  # two indices, two gaps


def test_the_clients_runs_have_their_rows_and_bytes(finished):
    record, folder = finished
    chapter = FederateChapter(record, folder)
    methods = ["FedAvg", "FedSign", "own sign", "FedDyn", "FedAvg, 1 block drawn"]
    assert [row["method"] for row in chapter.rows] == methods
    whole, few = (next(r for r in record.table("federated_methods") if r["run"] == run) for run in ("main", "blocks"))
    assert few["bytes_up"] < whole["bytes_up"]
    assert all(row["up_counted"] == row["up_predicted"] for row in chapter.rows)
    assert chapter.numbers()[2][0] == f"−{100 * (1 - few['bytes_up'] / whole['bytes_up']):.0f} %"
    assert f"**{100 * chapter.rows[0]['accuracy']:.1f} %**" in chapter.answer()


def test_flower_gives_the_same_model(finished):
    pytest.importorskip("flwr")
    (row,) = finished[0].table("federated_flower")
    assert row["apart"] < 1e-6  # float32: the embedded engine multiplies stacked clients, Flower each alone

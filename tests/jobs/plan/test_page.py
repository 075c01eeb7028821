"""What the pages of plans say of records that runs wrote, shortened."""

from __future__ import annotations

from pathlib import Path

from snapshots import check_page
from sparing.jobs.plan.cluster_page import answer as cluster_answer
from sparing.jobs.plan.cluster_page import page_of
from sparing.jobs.plan.device import PAGE, answer
from sparing.report import Record
from sparing.sharding import Topology

CLUSTER = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")


def read(name: str) -> Record:
    return Record.read(Path(__file__).with_name(f"{name}.jsonl"))


def test_snapshot():
    check_page(PAGE.of(read("device")), __file__, "device")


def test_snapshot_of_a_cluster():
    check_page(page_of(CLUSTER).of(read("cluster")), __file__, "cluster")


def test_when_nothing_fits_the_answer_names_the_least():
    record = read("device")
    for row in record.rows:
        row |= {"picked": False} if row["table"] == "plan" else {}
    assert (
        answer(record) == "Nothing fits 1GB (954 MiB); the least is QLoRA, nf4, rank 4, checkpointing at **597 KiB**."
    )
    for row in record.rows:
        row |= {"peak": None} if row["table"] == "plan" else {}
    assert answer(record) == "No way to fine-tune this model could be priced; the table says why."
    assert PAGE.of(record).sections[0].figures == []


def test_when_nothing_fits_a_cluster_the_answer_names_the_least():
    record = read("cluster")
    for row in record.rows:
        row |= {"picked": False} if row["table"] == "best" else {}
    assert cluster_answer(record).startswith("Nothing fits 80GB (74.5 GiB); the least is ")

"""A plan for three kinds of links, groups of unequal size, and few bits between groups: tables against the planner."""

from __future__ import annotations

import pytest

from sparing import UserError
from sparing.jobs.plan import Settings, cluster_page, run
from sparing.jobs.plan.crossover import RATIOS, crossovers
from sparing.jobs.plan.settings import Lisa, Lora
from sparing.sharding import Topology, Workload, choose, effective
from sparing.sharding.planner.choose import with_ratios
from sparing.sharding.planner.config import Link
from sparing.sharding.planner.wire_choices import wire_choices

FEW = {"lisa": Lisa(active=()), "lora": Lora(ranks=(16,)), "maps": False, "params": 7e9, "memory": "40GB"}
PAIR = {"groups": 2, "per_group": 8, "inter": "25Gbps", "intra": "7200Gbps"}


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch):
    monkeypatch.setattr(cluster_page, "write_page", lambda *_: None)


def test_three_kinds_of_links(tmp_path):
    settings = Settings(out=tmp_path, **FEW, **PAIR, domains=4, middle="400Gbps", sharing_middle=2, latency_middle=1e-5)
    assert settings.cluster == Topology(
        axes=[
            Link(name="intra", size=8, rate=900e9),
            Link(name="middle", size=4, rate=50e9, latency=1e-5, sharing=2),
            Link(name="inter", size=2, rate=3.125e9),
        ]
    )
    record = run(settings)
    full = [row for row in record.table("plan") if row["method"] == "full" and not row["checkpointing"]]
    assert {row["plan"] for row in full} == {plan.name for plan in effective(3)}
    assert [row["link"] for row in record.table("links")] == ["intra", "middle", "inter"]
    assert not record.table("arrangements")


def test_a_map_of_the_middle_links_is_the_planner_s_choice():
    machine = Topology(axes=[Link(name=n, size=2, rate=1e9) for n in ("intra", "middle", "inter")])
    work = Workload(params=1e8, accumulate=2, blocks=2)
    cells = [cell for cell in crossovers(work, machine, "10GB") if cell["map"] == "middle"]
    assert [(cell["row"], cell["ratio"]) for cell in cells] == [
        (f"{one:g}", other) for one in RATIOS for other in RATIOS
    ]
    for cell in cells[:: len(RATIOS) + 1]:
        best = choose(work, with_ratios(machine, cell["ratio"], float(cell["row"])), "10GB").best
        assert (cell["plan"], cell["seconds"]) == (best.plan.name, pytest.approx(best.seconds))
    flat = Topology(groups=2, per_group=2, inter=1e9, intra=1e9)
    assert {cell["map"] for cell in crossovers(work, flat, "10GB")} == {"accumulate", "trainable", "memory"}


def test_groups_of_unequal_size(tmp_path):
    settings = Settings(out=tmp_path, **FEW, inter="25Gbps", intra="7200Gbps", group_sizes=(8, 8, 4), sharing=8)
    assert settings.cluster.sizes == (4, 5)
    assert settings.cluster.axes[1].sharing == 4
    record = run(settings)
    rows = record.table("arrangements")
    best = max(rows, key=lambda row: row["rows_per_second"])
    said = [row["note"] for row in record.table("advice") if "more rows a second" in row["note"]]
    assert len(said) == bool(best["left_out"])
    assert [(row["groups"], row["per_group"], row["left_out"]) for row in rows] == [(5, 4, 0), (2, 8, 4)]
    for row in rows:
        assert row["rows_per_second"] == pytest.approx(row["groups"] * row["per_group"] / row["seconds"])


def test_groups_of_unequal_size_on_measured_links(tmp_path):
    """A probe measures neighbours in equal groups; the sizes of the real ones stand beside it."""
    told = {"inter": "25Gbps", "intra": "7200Gbps", "sharing": 8}
    by_hand = Settings(out=tmp_path, **FEW, **told, group_sizes=(8, 8, 4))
    path = tmp_path / "topology.json"
    path.write_text(Topology(groups=5, per_group=4, inter="25Gbps", intra="7200Gbps", sharing=8).to_json())
    probed = Settings(out=tmp_path, **FEW, topology=path, group_sizes=(8, 8, 4))
    assert [one.topology for one in probed.arrangements] == [one.topology for one in by_hand.arrangements]
    assert probed.cluster == by_hand.cluster
    with pytest.raises(UserError, match=r"topology: got .*; it has numbers"):
        Settings(params=7e9, topology=path, group_sizes=(8, 4), inter="1Gbps")


@pytest.mark.parametrize(
    ("number", "flag"),
    [
        ({"middle": "80Gbps"}, "middle"), ({"sharing": 8}, "sharing"), ({"sharing_middle": 2}, "sharing-middle"),
        ({"latency_inter": 1e-3}, "latency-inter"), ({"latency_middle": 1e-3}, "latency-middle"),
        ({"latency_intra": 1e-6}, "latency-intra"), ({"intra": "1Gbps", "domains": 2}, "domains, --intra"),
    ],
)  # fmt: skip
def test_numbers_beside_a_topology_that_has_them_are_refused(tmp_path, number, flag):
    with pytest.raises(UserError, match=rf"topology: got .*; it has numbers; drop --topology, or --{flag}$"):
        Settings(params=7e9, topology=tmp_path / "topology.json", **number)


@pytest.mark.parametrize("measured", [False, True])
def test_three_kinds_of_links_are_said_to_run_on_no_engine_for_gpus(tmp_path, measured):
    three = {"groups": 2, "per_group": 2, "domains": 2, "inter": "1Gbps", "middle": "2Gbps", "intra": "9Gbps"}
    if measured:
        path = tmp_path / "topology.json"
        path.write_text(Settings(out=tmp_path, **FEW, **three).cluster.to_json())
        three = {"topology": path}
    for more, said in (({}, True), ({"engine": "sparing"}, False)):
        record = run(Settings(out=tmp_path / f"out-{said}", **FEW, **three, **more))
        assert any("cannot be run on GPUs yet" in row["note"] for row in record.table("advice")) is said


def test_equal_groups_are_the_plan_that_they_were(tmp_path):
    one = run(Settings(out=tmp_path / "one", **FEW, **PAIR))
    sizes = {"inter": PAIR["inter"], "intra": PAIR["intra"], "group_sizes": (8, 8)}
    other = run(Settings(out=tmp_path / "other", **FEW, **sizes))
    assert one.table("plan") == other.table("plan")
    assert [row["left_out"] for row in other.table("arrangements")] == [0]


def test_ways_to_use_the_wires_are_the_planner_s(tmp_path):
    settings = Settings(out=tmp_path, **FEW, **PAIR, gradients="float32", slow_bits=8)
    record = run(settings)
    rows = {row["wires"]: row for row in record.table("wires")}
    assert list(rows) == ["two-level", "flat ring", "int8", "int4", "local steps, 8", "local steps, 32, int8"]
    assert rows["int8"]["seconds"] < rows["two-level"]["seconds"]
    # planned with eight bits: the pick is what the table has for them
    assert rows["int8"]["seconds"] == record.table("best")[0]["seconds"]
    assert "G" not in {row["plan"][0] for row in record.table("plan") if row["fits"]}
    work = Workload(params=7e9, accumulate=1)
    names = [way.name for way in wire_choices(work, settings.cluster)]
    assert names == list(rows)


def test_links_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="middle: got nothing; ranks talk over it \\(4\\)"):
        Settings(params=7e9, **PAIR, domains=4)
    with pytest.raises(UserError, match="group_sizes: got \\[8, 4\\]; it says the ranks of every group"):
        Settings(params=7e9, **PAIR, group_sizes=(8, 4))
    with pytest.raises(UserError, match="slow_bits: got 8; sums in 16 bits would lose what rounding owes"):
        Settings(params=7e9, **PAIR, slow_bits=8)
    with pytest.raises(UserError, match="slow_bits: got 4; it is for a cluster"):
        Settings(params=7e9, slow_bits=4, gradients="float32")
    with pytest.raises(UserError, match="inter: got nothing"):
        Settings(params=7e9, group_sizes=(8, 4), intra="1Gbps")

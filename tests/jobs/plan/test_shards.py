"""The plan for a cluster: bytes and guideline against formulas written out here, the rule, the files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparing import UserError
from sparing.cli import main
from sparing.jobs.plan import Settings, cluster_page, run, show
from sparing.jobs.plan.crossover import BLOCKS, crossovers
from sparing.jobs.plan.settings import Lisa, Lora, share_of
from sparing.report import Record
from sparing.sharding import Topology, Workload, effective, predict, simulate
from sparing.sharding.planner import choose as choosing

PAPER = {"groups": 4, "per_group": 8, "inter": "80Gbps", "intra": "2000Gbps", "memory": "80GB", "accumulate": 10}
FEW = {"lisa": Lisa(active=(2,)), "lora": Lora(ranks=(16,)), "maps": False}
WRITE = cluster_page.write_page
SIZES = {"N": 1, "I": 8, "G": 32}
SLOW = ("--gradients", "float32", "--slow-bits", "8", "--engine", "fsdp2")
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _no_pages():
    """Pictures take seconds each; the tests of pages undo this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_page, "write_page", lambda *_: None)
        yield


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.setattr(cluster_page, "write_page", WRITE)


@pytest.fixture(scope="module")
def paper(tmp_path_factory) -> Record:
    return run(Settings(params=65e9, out=tmp_path_factory.mktemp("plan"), **PAPER, **FEW))


def full(record: Record) -> list[dict]:
    return [row for row in record.table("plan") if row["method"] == "full" and row["checkpointing"]]


def test_every_method_plan_and_checkpointing_has_a_row(paper):
    rows = paper.table("plan")
    assert len(rows) == 4 * 2 * 14  # full, LISA with and without embedding, LoRA
    assert len({(row["method"], row["checkpointing"], row["plan"]) for row in rows}) == len(rows)
    assert paper.table("best")[0]["method"] == "full"
    assert all(row["verdict"] for row in rows)


def test_the_paper_s_cluster_takes_the_paper_s_plan(paper):
    """65B on 80 GB: only GGG, IGG, IIG and GIG, which the paper did not try, fit; IIG is the fastest."""
    assert paper.table("about")[0]["pick"] == "full, IIG, checkpointing"
    assert {row["plan"] for row in full(paper) if row["fits"]} == {"GGG", "IGG", "IIG", "GIG"}
    assert sum(bool(row["picked"]) for row in paper.table("plan")) == 1


def test_bytes_are_those_of_the_formula(paper):
    """2Ψ/s(p) + 2Ψ'/s(g) + 12Ψ'/s(os), up to the padding of 83 buckets to 32 elements, and fsdp2's 2Ψ/s(os) beside."""
    for row in full(paper):
        p, g, os = (SIZES[letter] for letter in row["plan"])
        kept = 2 * 65e9 / os if p == 1 else 0
        for column, size in (("params", 2 * 65e9 / p + kept), ("grads", 2 * 65e9 / g), ("optimizer", 12 * 65e9 / os)):
            assert 0 <= row[column] - size <= 83 * 32 * 12, (row["plan"], column)
        parts = [row[part] for part in ("params", "grads", "optimizer", "activations", "transient")]
        assert row["peak"] == sum(parts)
        assert row["fits"] == (row["peak"] <= 80e9)


def test_memory_is_that_of_the_engine_that_runs(paper, tmp_path):
    """On GPUs fully_shard's; on processors, or where it is asked for, our own, without what the other keeps."""
    given = {"params": 65e9, "out": tmp_path, **PAPER, **FEW}
    ours = run(Settings(**given, engine="sparing"))
    assert [record.table("about")[0]["engine"] for record in (paper, ours)] == ["fsdp2", "sparing"]
    one, two = ({row["plan"]: row for row in full(record)} for record in (ours, paper))
    more = {plan: round((two[plan]["peak"] - one[plan]["peak"]) / 1e9, 2) for plan in one}
    assert more == {plan: round(130 / SIZES[plan[2]], 2) if plan[0] == "N" else 0 for plan in one}
    for record, engine in ((paper, "fsdp2"), (ours, "sparing")):
        assert f"as {engine} fills it" in cluster_page.title(record)
        assert any(engine in note or "own engine" in note for note in cluster_page.caveats(record))


def test_the_engine_is_that_of_the_device(tmp_path):
    probed = tmp_path / "probed.json"
    probed.write_text(replace(Topology(groups=2, per_group=2, inter=1e9, intra=1e9), crowding=2.0).to_json())
    given = {"params": 1e9, **PAPER}
    assert Settings(**given).runs_on == Settings(**given, card="h100").runs_on == "fsdp2"
    assert Settings(**given, device="cpu").runs_on == "sparing"
    assert Settings(**given, gradients="float32", slow_bits=8).runs_on == "sparing"
    assert Settings(params=1e9, topology=probed).runs_on == "sparing"
    assert Settings(params=1e9, topology=probed, card="h100").runs_on == "fsdp2"
    assert Settings(params=1e9, topology=probed, engine="fsdp2").runs_on == "fsdp2"


def test_the_guideline_is_the_reconstructed_one(paper):
    """Communication seconds of 65B, trained in full, by the reconstructed formulas (tables 4 to 7)."""
    known = {
        "NNI": 3.35,
        "NII": 7.44,
        "IIG": 16.09,
        "III": 16.09,
        "NIG": 18.36,
        "ING": 22.91,
        "IGG": 136.3,
        "GGG": 377.8,
    }
    found = {row["plan"]: row["guideline"] for row in full(paper)}
    assert {plan: found[plan] for plan in known} == pytest.approx(known, rel=1e-3)


def test_a_share_is_one_method_and_trains_that_share(tmp_path):
    record = run(Settings(params=7e9, trainable="1/16", out=tmp_path, **PAPER, maps=False))
    rows = record.table("plan")
    assert len(rows) == 2 * 14
    assert all(row["trainable"] == pytest.approx(7e9 / 16, rel=1e-6) for row in rows)
    guideline = {row["plan"]: row["guideline"] for row in rows}
    assert guideline["NII"] < guideline["NIG"] < guideline["NGG"] < guideline["GGG"]  # the paper's order


def test_gradients_in_float32_are_twice_as_long(paper, tmp_path):
    wide = run(Settings(params=65e9, out=tmp_path, **PAPER, **FEW, gradients="float32"))
    one, two = ({row["plan"]: row for row in full(record)} for record in (paper, wide))
    assert all(two[plan]["grads"] == 2 * one[plan]["grads"] for plan in one)
    assert all(two[plan]["params"] == one[plan]["params"] for plan in one)


def test_arithmetic_hides_the_wires_and_checkpointing_costs(tmp_path):
    record = run(Settings(params=7e9, out=tmp_path, **PAPER, **FEW, tflops=0.01))  # so slow that wires hardly matter
    rows = {(row["plan"], row["checkpointing"]): row for row in record.table("plan") if row["method"] == "full"}
    plain, again = rows["IIG", False], rows["IIG", True]
    assert plain["compute"] == pytest.approx(plain["seconds"], rel=0.01)
    assert 7 / 6 < again["seconds"] / plain["seconds"] <= 8 / 6
    assert plain["compute"] == pytest.approx(10 * 6 * 7e9 * 1024 / 1e10, rel=0.1)  # 6 operations a weight and token


def test_what_must_survive_a_lost_group_has_a_copy_in_each(tmp_path):
    record = run(Settings(params=1e9, out=tmp_path, **PAPER, **FEW, survives=1))
    assert all("G" not in row["plan"] for row in record.table("plan") if row["fits"])


def test_nothing_fits_and_every_plan_says_by_how_much(tmp_path):
    given = PAPER | {"memory": "4GB"}
    record = run(Settings(params=65e9, out=tmp_path, **given, **FEW))
    assert record.table("about")[0]["pick"] == "nothing fits"
    assert not any(row["fits"] for row in record.table("plan"))
    assert all("GB too much" in row["verdict"] for row in record.table("plan"))


def test_maps_frame_the_cluster_and_agree_with_the_pick(tmp_path, capsys, pages):
    given = PAPER | {"accumulate": 4}
    record = run(Settings(params=7e9, out=tmp_path, trainable="1", **given))
    cells = record.table("crossover")
    assert {cell["map"] for cell in cells} == {"accumulate", "trainable", "memory"}
    here = {(cell["map"], cell["row"]): cell["plan"] for cell in cells if cell["ratio"] == 25}
    assert len({here["accumulate", "4"], here["trainable", "1"], here["memory", "as given"]}) == 1
    show(record)
    shown = capsys.readouterr().out
    assert "pick: 1 of each block" in shown
    assert "micro-steps of a step" in (tmp_path / "report.html").read_text()


def test_a_topology_file_is_as_good_as_its_numbers(paper, tmp_path):
    file = tmp_path / "topology.json"
    file.write_text(Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps").to_json())
    read = run(Settings(params=65e9, topology=file, memory="80GB", accumulate=10, out=tmp_path, **FEW))
    assert read.table("plan") == paper.table("plan")


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["by formula", "by ledger"])
def test_a_model_on_disk_has_its_own_blocks(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    cluster = PAPER | {"groups": 2, "per_group": 2, "memory": "1GB"}
    record = run(Settings(model=tmp_path, length=32, out=tmp_path / "out", **cluster, **FEW))
    rows = record.table("plan")
    assert record.table("about")[0]["parameters"] == max(row["trainable"] for row in rows if row["method"] == "full")
    lisa = next(row for row in rows if row["method"] == "LISA, 2 blocks")
    assert lisa["trainable"] < record.table("about")[0]["parameters"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "model"),
        (["DIR", "--params", "7e9"], "one model"),
        (["--params", "7e9", "--groups", "2"], "inter"),
        (["--params", "7e9", "--per-group", "2"], "intra"),
        (["--params", "7e9", "--trainable", "1/16"], "--groups"),
        (["--params", "7e9", "--engine", "fsdp2"], "engine"),
        (["--params", "7e9", "--groups", "2", "--inter", "1Gbps", *SLOW], "low-bit"),
        (["--params", "7e9", "--groups", "2", "--inter", "fast"], "Gbps"),
        (["--params", "7e9", "--groups", "2", "--inter", "80Gbps", "--trainable", "2"], "share"),
        (["--params", "7e9", "--groups", "2", "--inter", "80Gbps", "--survives", "2"], "survives"),
        (["--params", "7e9", "--topology", "missing.json"], "missing.json"),
        (["--params", "7e9", "--topology", "t.json", "--groups", "2", "--inter", "1Gbps"], "topology"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, said, capsys, tmp_path):
    assert main(["plan", *arguments, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", ["0", "1/0", "-1", "2", "half"])
def test_shares_that_are_none_are_refused(bad):
    with pytest.raises(UserError, match="share"):
        share_of(bad)


def test_the_positional_directory_works_on_the_command_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    small = ["--memory", "1GB", "--lisa.active", "2", "--lora.ranks", "4", "--length", "32", "--optimizers"]
    small += ["--weights", "None"]
    assert main(["plan", str(tmp_path), *small, "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"]["about"][0]["pick"] == "full"


def test_maps_simulate_only_plans_that_can_win(monkeypatch):
    """And say what the full comparison says."""
    work, machine = (
        Workload(params=7e9, accumulate=4),
        Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps"),
    )
    simulated = []
    monkeypatch.setattr(choosing, "simulate", lambda *asked: simulated.append(asked) or simulate(*asked))
    cells = crossovers(work, machine, "40GB")
    assert len(simulated) < 3 * len(cells)  # 6 to 14 plans fit each
    for cell in (cell for cell in cells if cell["map"] == "accumulate"):
        uneven = Topology(groups=4, per_group=8, inter=250e9 / cell["ratio"], intra=250e9)
        same = replace(work, accumulate=int(cell["row"]))
        fit = [plan for plan in effective() if predict(same, uneven, plan).memory <= 40e9]
        best = choosing.choose(replace(same, blocks=BLOCKS), uneven, plans=fit).best
        assert (cell["plan"], cell["seconds"]) == (best.plan.name, best.seconds)


def test_maps_count_the_cores_that_ranks_share():
    links = Topology(groups=2, per_group=2, inter=1e9, intra=5e9).axes
    crowded = Topology(axes=[replace(link, work_per_byte=1e-9) for link in links], crowding=20.0)
    work = Workload(params=1e8, blocks=2)
    cell = next(
        c for c in crossovers(work, crowded, "1TB") if (c["map"], c["row"], c["ratio"]) == ("accumulate", "1", 5)
    )
    assert cell["seconds"] == choosing.choose(work, crowded).best.seconds
    assert cell["seconds"] > choosing.choose(work, replace(crowded, crowding=0.0)).best.seconds

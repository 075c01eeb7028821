"""The study of the recipe: equal time on every side, rows that are made once, judges that have not seen the test."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from benchmarks import condense_others as others
from benchmarks import condense_real as real
from benchmarks import condense_recipe as study
from benchmarks import condense_recipe_tables as tables

from sparing.cli import _parse
from sparing.jobs.condense.settings import Condense, Evaluation, Truncated
from sparing.jobs.condense.state import start

ROOT = Path(__file__).parents[3]


def test_arms_that_cost_less_take_more_steps(small, inputs, monkeypatch) -> None:
    clock, cost = [0.0], {"reverse": 2.0, "truncated": 0.5, "Hessian-free": 0.25}

    def step(state, at, method) -> None:
        clock[0] += next(seconds for name, seconds in cost.items() if str(method).startswith(name))

    monkeypatch.setattr(study, "hypergradient_at", step)
    monkeypatch.setattr(study.time, "process_time", lambda: clock[0])
    arms = {
        "a": dataclasses.replace(small, method="reverse"),
        "b": dataclasses.replace(small, method="truncated", truncated=Truncated(steps=1)),
    }
    assert study.lengths(arms, inputs, 60.0) == {"steps": {"a": 30, "b": 120}, "turns": {"a": 0, "b": 0}}


def test_arms_that_cost_what_the_base_does_have_its_steps(small, inputs, monkeypatch, tmp_path) -> None:
    timed = []
    monkeypatch.setattr(
        study, "lengths",
        lambda arms, *_: timed.append(set(arms)) or {"steps": dict.fromkeys(arms, 7), "turns": dict.fromkeys(arms, 0)},
    )  # fmt: skip
    arms = dict.fromkeys([study.SHIFTED, "no average", "soft labels too"], small)
    size = study.sized(study.Table(tmp_path / "a.json"), inputs, "B", arms, 1.0, joins=False, base=study.SHIFTED)
    assert timed == [{study.SHIFTED, "soft labels too"}]
    assert size["steps"] == dict.fromkeys(arms, 7)
    # without the base each is timed
    study.sized(study.Table(tmp_path / "b.json"), inputs, "B", arms, 1.0, joins=False)
    assert timed[1] == set(arms)


def test_arms_that_join_late_have_the_steps_of_the_base_by_a_ratio_of_the_day(
    small, inputs, monkeypatch, tmp_path
) -> None:
    """The block began on a slow machine: 100 base steps; today they would be 200, and a late arm 300."""
    today = {study.PLAIN: 200, "soft labels too": 300, "no average": 190}
    monkeypatch.setattr(
        study, "lengths", lambda arms, *_: {"steps": {arm: today[arm] for arm in arms}, "turns": dict.fromkeys(arms, 4)}
    )
    table = study.Table(tmp_path / "a.json")
    table.rows["B | steps"] = {"steps": {study.PLAIN: 100}, "turns": {study.PLAIN: 0}}
    arms = dict.fromkeys([study.PLAIN, "no average", "soft labels too"], small)
    size = study.sized(table, inputs, "B", arms, 1.0, joins=True, anchor=small)
    assert size["steps"] == {study.PLAIN: 100, "no average": 100, "soft labels too": 150}
    assert size["turns"]["soft labels too"] == 2
    # a block without the base, or one that names none, times the late arm by itself
    alone = study.sized(table, inputs, "B", {"soft labels too": small}, 1.0, joins=True)
    assert alone["steps"]["soft labels too"] == 150
    other = study.Table(tmp_path / "b.json")
    other.rows["B | steps"] = {"steps": {study.DEFAULT: 100}, "turns": {study.DEFAULT: 0}}
    size = study.sized(other, inputs, "B", {"soft labels too": small}, 1.0, joins=True, anchor=small)
    assert size["steps"] == {study.DEFAULT: 100, "soft labels too": 300}


def test_a_study_is_written_row_by_row_and_goes_on(small, inputs, monkeypatch, tmp_path) -> None:
    one = dataclasses.replace(small, method="reverse", measurements=0, evaluation=Evaluation(steps=2, nets=1))
    arms = {"no shifts": one, "hard labels": dataclasses.replace(one, width=3)}
    monkeypatch.setattr(study, "lengths", lambda *_: {"steps": dict.fromkeys(arms, 1), "turns": dict.fromkeys(arms, 0)})
    path = tmp_path / "rows.json"
    study.block(study.Table(path), inputs, "B", arms, seconds=1.0, seeds=1)
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == [
        "B | steps", "B | no shifts | real images", "B | hard labels | real images", "B | no shifts | 0",
        "B | hard labels | 0",
    ]  # fmt: skip
    # nothing is made again, another seed joins
    monkeypatch.setattr(study, "control", lambda *_: {"accuracy": -1.0})
    # images of a test are smaller than LeNet takes
    monkeypatch.setattr(study, "ARCHITECTURES", {"perceptron": others.perceptron})
    study.block(study.Table(path), inputs, "B", arms, seconds=1.0, seeds=2, also=study.taught_to_others)
    again = json.loads(path.read_text())["rows"]
    assert {key: again[key] for key in rows} == rows
    assert set(again) - set(rows) == {"B | no shifts | 1", "B | hard labels | 1"}
    assert set(again["B | no shifts | 1"]["transfer"]) == set(study.OTHERS) | {"perceptron"}


def test_what_is_asked_of_the_command_line(monkeypatch, inputs, tmp_path) -> None:
    """An ablation is judged on held-out images, and the bars, of the recipe, on the test."""
    seen = {}
    monkeypatch.setattr(study, "gather", lambda *_, **__: inputs)

    def block(table, inputs, name, arms, **_) -> None:
        seen[name] = {settings.judge for settings in arms.values()}
        if name.startswith("bars"):
            (recipe,) = arms.values()
            assert dataclasses.replace(recipe, depth=3, measurements=4) == Condense(per_class=10)
        if name.startswith("shifted"):
            assert next(iter(arms)) == study.SHIFTED
            changed = {arm: settings.shift for arm, settings in arms.items()}
            assert {arm for arm, shift in changed.items() if shift != 1} == {
                "no shifts", "width 32, no shifts", "width 64, no shifts", "shifts of 2 pixels",
                "width 32, shifts of 2 pixels",
            }  # fmt: skip
        if name.startswith("methods"):
            assert {arm.inner_rate for arm in arms.values()} == {0.2}

    monkeypatch.setattr(study, "block", block)
    monkeypatch.setattr(study, "at_best_rates", lambda table, inputs, name, arms, seconds: arms)
    for part in ("ablation", "shifted", "bars", "methods"):
        words = ["x", "--part", part, "--depth", "2", "--per-class", "10", "--out", str(tmp_path / "none.json")]
        monkeypatch.setattr(study.sys, "argv", words)
        study.main()
    found = {name.partition(",")[0]: judge for name, judge in seen.items()}
    assert found == {"ablation": {"held-out"}, "shifted": {"held-out"}, "bars": {"test"}, "methods": {"test"}}


def test_tables_by_hand() -> None:
    real = {"accuracy": 50.0, "accuracies": [45.0, 55.0]}

    def run(score: float) -> dict[str, float]:
        return {"accuracy": score, "accuracy_low": score - 2, "accuracy_high": score + 1, "steps": 1234}

    one, two = (f"{{}}, mnist, {depth} blocks, 1 a class, 600 s | " for depth in (2, 3))
    rows = {
        one.format("bars") + "steps": {}, one.format("bars") + f"{study.DEFAULT} | real images": real,
        one.format("bars") + f"{study.DEFAULT} | 0": run(80.0) | {"seconds": 92.2},
        one.format("bars") + f"{study.DEFAULT} | 1": run(83.0) | {"seconds": 90.9},
        one.format("bars") + "no shifts | real images": real, one.format("bars") + "no shifts | 0": run(70.0),
        two.format("ablation") + "no shifts | real images": real, two.format("ablation") + "no shifts | 0": run(70.0),
        two.format("ablation") + "other | 0": {"failed": "not finite"},
        one.format("ablation") + "other | real images": real, one.format("ablation") + "other | 0": run(60.0),
    }  # fmt: skip
    two, ten = (f"two blocks{change}, 1 a class, 600 s" for change in ("", ", T = 10, no shifts"))
    real_cell = "50.0 [45.0, 55.0]"
    assert tables.bars(rows, mnist=True).splitlines()[2:] == [
        f"| mnist, {two} | 81.5 [80.0, 83.0] | {real_cell} | 85 | 1,234 | 91 to 92 | 2 |",
        f"| mnist, {ten} | 70.0 [68.0, 71.0] | {real_cell} | 85 | 1,234 | – | 1 |",
    ]
    assert tables.compared(rows, "ablation", 600.0).splitlines()[2:] == [
        "| no shifts | 70.0 [68.0, 71.0] | 1,234 | – | – |", "| other | failed | – | 60.0 [58.0, 61.0] | 1,234 |",
        "| as many real images | 50.0 [45.0, 55.0] | – | – | – |",
        "| as many real images, other | – | – | 50.0 [45.0, 55.0] | – |",
    ]  # fmt: skip
    assert len(tables.compared(rows, "ablation", 60.0).splitlines()) == 2
    assert len(tables.compared(rows, "ablation", 600.0, "10").splitlines()) == 2
    other = {key.replace("mnist", "cifar10"): row for key, row in rows.items()}
    both = rows | other
    assert tables.bars(both, mnist=True) == tables.bars(rows, mnist=True)
    assert tables.bars(both, mnist=False).splitlines()[2:] == [
        f"| cifar10, {two} | 81.5 [80.0, 83.0] | {real_cell} | 1,234 | 91 to 92 | 2 |",
        f"| cifar10, {ten} | 70.0 [68.0, 71.0] | {real_cell} | 1,234 | – | 1 |",
    ]


def test_another_net_that_diverged_is_right_about_nothing() -> None:
    """Scores that are not numbers would all name class 0."""
    images, labels = torch.zeros(4, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    lost = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    assert others.right(lost, (images, lost(torch.zeros(4, 64)).argmax(1))) == 100.0
    torch.nn.init.constant_(lost[1].bias, float("nan"))
    assert others.right(lost, (images, labels)) == 0.0


def test_real_images_at_best_by_hand() -> None:
    """Steps, shift and rate of the best way, and what the usual one gives on held-out images."""
    ways = {(300, 1): 50.0, (3000, 2): 52.25, (300, 0): 49.0}
    tried = [{"steps": n, "shift": shift, "lr": 0.02, "held_out": score} for (n, shift), score in ways.items()]
    row = {"accuracy": 51.0, "accuracies": [49.0, 53.0], "best": tried[1], "tried": tried}
    assert tables.real_at_best({"mnist, 3 blocks": row}).splitlines()[2:] == [
        "| mnist, 3 blocks | 51.0 [49.0, 53.0] | 3,000 | 2 | 0.02 | 52.2 | 50.0 |"
    ]


def test_the_best_way_to_train_on_real_images_is_chosen_by_other_draws(inputs, monkeypatch) -> None:
    """Nets 0 to 4 judge, 5 to 7 choose; more steps are better here, a shift of 1 best, and a rate of 0.02."""
    asked = []

    def score(settings, inputs, number, *, held_out) -> float:
        asked.append((number, held_out))
        judge = settings.evaluation
        return judge.steps / 1000 - abs(settings.shift - 1) - abs(math.log(judge.lr / 0.02)) + number

    monkeypatch.setattr(real, "accuracy", score)
    found = real.at_best(study.BASE, inputs, [300, 1000], [0, 1, 2])
    assert (found["best"]["steps"], found["best"]["shift"], found["best"]["lr"]) == (1000, 1, 0.02)
    assert found["best"]["held_out"] == pytest.approx(1 + 6)
    assert found["accuracy"] == pytest.approx(1 + 2)
    assert len(found["tried"]) == 6
    assert {number for number, held_out in asked if held_out} == {5, 6, 7}
    assert [number for number, held_out in asked if not held_out] == [0, 1, 2, 3, 4]


def test_arms_stand_by_what_they_add_to_the_base_of_the_same_seed() -> None:
    scores = {"no shifts": (70.0, 80.0, 60.0), "better": (74.0, 81.0), "failed": (None,), "worse": (69.0, 78.0, 60.0)}
    rows = {
        f"ablation, mnist, 3 blocks, 1 a class, 80 s | {arm} | {seed}": {"failed": "not finite"} if score is None else {
            "accuracy": score, "accuracy_low": score - 1, "accuracy_high": score + 1, "steps": 1234,
            "seconds": score + 10.4,
        }
        for seed in range(3) for arm, each in scores.items() for score in each[seed:seed + 1]
    }  # fmt: skip
    for arm in ("no shifts", "better"):
        real = {"accuracy": 50.0, "accuracies": [45.0, 55.0]}
        rows[f"ablation, mnist, 3 blocks, 1 a class, 80 s | {arm} | real images"] = real
    assert tables.paired(rows, "ablation", 80.0).splitlines()[2:] == [
        "| better | 77.5 [74.0, 81.0] | +2.5 [+1.0, +4.0] | 1,234 | 84 to 91 | 2 |",
        "| no shifts | 70.0 [60.0, 80.0] | – | 1,234 | 70 to 90 | 3 |",
        "| failed | failed | – | – | – | 1 |",
        "| worse | 69.0 [60.0, 78.0] | −1.0 [−2.0, +0.0] | 1,234 | 70 to 88 | 3 |",
        "| as many real images | 50.0 [45.0, 55.0] | – | – | – | – |",
        "| as many real images, better | 50.0 [45.0, 55.0] | – | – | – | – |",
    ]
    assert len(tables.paired(rows, "ablation", 60.0).splitlines()) == 2


def test_what_the_guide_passes_are_arms_of_the_study() -> None:
    """The rows of the chapter on a few images, parsed as the command parses them."""
    chapter = (ROOT / "docs/how-to-choose.md").read_text().split("### A few images in place of a data set")[1]
    flags = re.findall(r"`(--[^`]+)`", chapter.split("### ")[0])
    given = [_parse("condense", Condense, flag.split()) for flag in flags]
    found = [dataclasses.replace(one, inner_lr=one.inner_rate, unroll=one.inner_steps) for one in given]
    # windows of all steps are full reverse
    found = [dataclasses.replace(one, method="reverse") if one.unroll == 10 else one for one in found]
    arms = (
        study.SHIFTED, "width 32, T = 25, random windows of 10", "wide and long",
        "width 32, shifts of 1 pixel, inner rate 0.2",
    )  # fmt: skip
    for made, arm, base in zip(found, arms, ({}, {"shift": 1}, {"depth": 2}, {"per_class": 10}), strict=False):
        asked = dataclasses.replace(study.BASE, measurements=4, **base | study.ARMS[arm])
        assert made == asked
    assert found[4].shift == 0
    assert found[5].learn == ("images", "labels", "rates")
    assert found[6] == dataclasses.replace(found[0], data="cifar10")
    assert len(found) == 7


def test_table_of_nets_taught_images_of_another_by_hand() -> None:
    """Real images stand beside them from the net that is taught; a net that condenses nothing is no bar."""
    block = "bars, mnist, 3 blocks, 1 a class, 1200 s | "
    rows = {
        block + "wide | real images": {"accuracy": 50.0, "accuracies": [45.0, 55.0]},
        block + "width 32 | real images": {"accuracy": 40.0, "accuracies": [35.0, 45.0]},
        block + "width 32 | 0": {
            "accuracy": 80.0, "accuracy_low": 78.0, "accuracy_high": 81.0, "steps": 9,
            "transfer": {"wide": {"accuracy": 60.0, "accuracies": [55.0, 65.0], "lr": 0.1}},
        },
    }  # fmt: skip
    assert tables.bars(rows, mnist=True).splitlines()[2:] == [
        "| mnist, three blocks, T = 10, width 32, 1 a class, 1200 s "
        "| 80.0 [78.0, 81.0] | 40.0 [35.0, 45.0] | – | 9 | – | 1 |"
    ]
    assert tables.transfer(rows).splitlines()[2:] == [
        "| three blocks, T = 10, width 32, 1200 s | wide | 60.0 [55.0, 65.0] | 50.0 [45.0, 55.0] | 1 |"
    ]


def test_other_architectures_learn_what_they_are_taught(small, inputs) -> None:
    # 101,770 and 61,706 as published; 144 + 4,608 + 14,336 + 57,344 of convolutions, 480 of norms, 650 at the end
    sizes = {"perceptron": 101_770, "LeNet": 61_706, "residual net with group norm": 77_562}
    generator = torch.Generator().manual_seed(0)
    images, goals = torch.rand(4, 1, 28, 28, generator=generator), torch.tensor([3, 1, 4, 1])
    for name, build in others.ARCHITECTURES.items():
        assert sum(leaf.numel() for leaf in build(1, 28, 10).parameters()) == sizes[name]
        before = torch.get_rng_state()
        make = functools.partial(build, 1, 28, 10)
        one, two = (others.taught(make, images, goals, 0.02, steps=60, number=0) for _ in range(2))
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(one(images), two(images))
        assert others.right(one, ((images * 255).round().to(torch.uint8), goals)) == 100.0


def test_the_rate_of_another_architecture_is_chosen_on_held_out_images(small, inputs, monkeypatch) -> None:
    """By the net that is not judged, and of a sweep that goes on until the best is inside; five others are judged."""
    state = start(dataclasses.replace(small, judge="test", evaluation=Evaluation(steps=2, nets=2, lr=1.0)), inputs)
    asked = []
    monkeypatch.setattr(others, "taught", lambda make, images, goals, lr, steps, number: (lr, number))
    monkeypatch.setattr(
        others, "right", lambda net, real: asked.append((net, len(real[0]))) or 50.0 - abs(net[0] - 30.0)
    )
    found = others.taught_architecture(state, "perceptron", lambda number: state.phi)
    assert found["lr"] == 33.0  # 0.03 to 10 first, and then 33 and 110
    held, tested = len(inputs.held_out[0]), len(inputs.test[0])
    assert {size for (_, number), size in asked if number == 2} == {held}
    assert [(net, size) for net, size in asked if net[1] < 2] == [((33.0, 0), tested), ((33.0, 1), tested)]


def test_an_arm_of_the_bars_joins_later(small, inputs, monkeypatch, tmp_path) -> None:
    """It is timed by itself and has real images of its own; an ablation leaves it out."""
    one = dataclasses.replace(small, method="reverse", measurements=0, evaluation=Evaluation(steps=2, nets=1))
    size = lambda arms, *_: {"steps": dict.fromkeys(arms, 1), "turns": dict.fromkeys(arms, 0)}  # noqa: E731
    monkeypatch.setattr(study, "lengths", size)
    table = study.Table(tmp_path / "rows.json")
    study.block(table, inputs, "B", {"no shifts": one}, seconds=1.0, seeds=1, apart=True)
    held = set(table.rows)
    late = {"late": dataclasses.replace(one, outer_lr=0.1)}
    study.block(table, inputs, "B", late, seconds=1.0, seeds=1, apart=True)
    assert set(table.rows) - held == {"B | steps of late", "B | late | real images", "B | late | 0"}
    study.block(table, inputs, "B", {"no shifts": one, "later": one}, seconds=1.0, seeds=1)
    assert not any("later" in key for key in table.rows)


def test_an_arm_of_an_ablation_whose_steps_cost_the_same_has_as_many(small, inputs, monkeypatch, tmp_path) -> None:
    one = dataclasses.replace(small, method="reverse", measurements=0, evaluation=Evaluation(steps=2, nets=1))
    table = study.Table(tmp_path / "rows.json")
    table.rows["B | steps"] = {"steps": {"no shifts": 3}, "turns": {"no shifts": 0}}
    flat = {"outer_schedule": "constant"}
    arms = {"no shifts": {"shift": 0}, "flat outer rates": flat, "shifts of 1 pixel": {"shift": 1}}
    assert all(study.ARMS[arm] == change for arm, change in arms.items())
    made = {arm: dataclasses.replace(one, **change) for arm, change in arms.items()}
    study.block(table, inputs, "B", made, seconds=1.0, seeds=1)
    assert table.rows["B | flat outer rates | 0"]["steps"] == 3
    assert "B | shifts of 1 pixel | 0" not in table.rows


def test_arms_that_do_not_belong_are_refused(monkeypatch, inputs, tmp_path, capsys) -> None:
    monkeypatch.setattr(study, "gather", lambda *_, **__: inputs)
    words = ["x", "--out", str(tmp_path / "none.json"), "--part", "bars", "--arms"]
    for arms, said in ((["reverse"], "no such arm of bars: reverse"), (["wide and long", "--transfer"], "--transfer")):
        monkeypatch.setattr(study.sys, "argv", words + arms)
        with pytest.raises(SystemExit):
            study.main()
        assert said in capsys.readouterr().err


def test_methods_stand_at_the_rate_that_held_out_images_choose(small, inputs, monkeypatch, tmp_path) -> None:
    """The sweep goes below its first rates until the best is inside; its runs have a judge and a seed of their own."""
    asked = []

    def walk(settings, inputs, steps, turn, also):
        asked.append((settings.judge, settings.seed, settings.outer_lr, steps))
        rate = settings.outer_lr
        return {"accuracy": 90.0 - 1000 * abs(rate - 0.005)} if rate < 0.04 else {"failed": "not finite"}

    monkeypatch.setattr(study, "walk", walk)
    monkeypatch.setattr(
        study, "lengths", lambda arms, *_: {"steps": dict.fromkeys(arms, 7), "turns": dict.fromkeys(arms, 0)}
    )
    table = study.Table(tmp_path / "rows.json")
    arms = {"a": dataclasses.replace(small, judge="test")}
    found = study.at_best_rates(table, inputs, "methods, mnist, 3 blocks, 1 a class, 60 s", arms, 60.0)
    assert found == {"a": dataclasses.replace(small, judge="test", outer_lr=0.005)}
    assert asked == [("held-out", study.SWEPT, rate, 7) for rate in (0.01, 0.02, 0.04, 0.005, 0.0025)]
    assert study.at_best_rates(table, inputs, "methods, mnist, 3 blocks, 1 a class, 60 s", arms, 60.0) == found
    assert len(asked) == 5
    late = {"b": dataclasses.replace(small, outer_lr=0.005)}
    assert study.at_best_rates(table, inputs, "methods, mnist, 3 blocks, 1 a class, 60 s", {"b": small}, 60.0) == late
    assert "methods, mnist, 3 blocks, 1 a class, 60 s | steps of b" in table.rows
    table.rows = {key: row for key, row in table.rows.items() if "| b |" not in key}
    key = "methods, mnist, 3 blocks, 1 a class, 60 s | a | "
    run = {"accuracy": 80.0, "accuracy_low": 78.0, "accuracy_high": 81.0, "steps": 7, "outer_lr": 0.005}
    other = {key.replace("3 blocks", "2 blocks") + "0": run}
    rows = table.rows | {f"{key}0": run, f"{key}real images": {"accuracy": 50.0, "accuracies": [45.0, 55.0]}} | other
    assert tables.methods(rows).splitlines()[2:] == [
        "| a | 80.0 [78.0, 81.0] | 7 | – | 0.005 | 0.0025, 0.005, 0.01, 0.02, 0.04 | 1 |",
        "| as many real images | 50.0 [45.0, 55.0] | – | – | – | – | – |",
    ]
    failed = {f"{key}0": {"failed": "not finite"}}
    assert "| a | failed | – | – | – | 0.0025, 0.005, 0.01, 0.02, 0.04 | 1 |" in tables.methods(rows | failed)
    with pytest.raises(ValueError, match=r"a: runs at outer rates \[0.005, 0.02\] stand in one row"):
        tables.methods(rows | {f"{key}1": run | {"outer_lr": 0.02}})

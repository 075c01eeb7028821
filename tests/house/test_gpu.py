"""One command for a GPU: the list of CUDA branches, the parts it finds, and how it deals out its minutes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.gpu import ORDER, branches
from benchmarks.gpu import __main__ as gpu


def test_every_cuda_branch_is_named_and_none_that_is_gone() -> None:
    assert {path: set(names) for path, names in branches.BRANCHES.items()} == branches.found()
    who = {by for names in branches.BRANCHES.values() for by in names.values()}
    assert who <= {*ORDER, branches.SHAPES, branches.NOTHING}


def test_a_branch_is_found_by_its_function() -> None:
    text = 'class A:\n    def f(self, x):\n        return x.is_cuda\ndef g():\n    """On cuda."""\nwhere = "cuda"\n'
    assert branches.in_source(text) == {"A.f", ""}
    compared = (
        'def f(x):\n    return x.device.type != "cpu"\ndef g(x):\n    return f"{x.type}"\ndef h(b):\n    b == "nccl"\n'
    )
    assert branches.in_source(compared) == {"f", "h"}


def test_parts_are_the_files_with_results_the_most_telling_first() -> None:
    names = [part.name for part in gpu.parts()]
    assert {"layers", "sharding", "scaling"} <= set(names)
    assert names == sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    for part in gpu.parts():
        assert part.question.endswith("?")
        assert importlib.util.find_spec(f"benchmarks.gpu.{part.name}") is not None


# A part as the protocol wants it: each call measures one of its cells.
PART = '''"""Does it go on?"""
import argparse, json, sys
from pathlib import Path
RESULT = Path("{rows}")
parser = argparse.ArgumentParser()
parser.add_argument("--minutes", type=float)
parser.add_argument("--out", type=Path, default=RESULT)
parser.add_argument("--try", action="store_true")
options = parser.parse_args()
rows = options.out.read_text().splitlines() if options.out.exists() else []
rows.append(json.dumps({{"minutes": options.minutes}}))
options.out.write_text("\\n".join(rows) + "\\n")
{more}
print("nothing is left" if len(rows) == 3 else f"{{3 - len(rows)}} cells are left: run it again")
'''


def made(folder: Path, name: str, more: str = "") -> gpu.Part:
    path = folder / f"{name}.py"
    path.write_text(PART.format(rows=folder / f"{name}.jsonl", more=more))
    return gpu.Part.read(path)


def command_in(folder: Path) -> Callable[[gpu.Part, float], list[str]]:
    return lambda part, minutes: [sys.executable, str(folder / f"{part.name}.py"), "--minutes", f"{minutes:g}"]


def test_minutes_are_dealt_out_until_nothing_is_left(tmp_path: Path) -> None:
    part = made(tmp_path, "one")
    ends = gpu.run([part], minutes=40, command=command_in(tmp_path))
    assert [(end.part, end.said) for end in ends] == [("one", "nothing is left")]
    assert [float(line.split()[1][:-1]) for line in part.result.read_text().splitlines()] == pytest.approx([8, 8, 8])


@pytest.mark.parametrize("late", [0.0, gpu.LATE / 60], ids=["in time", "late"])
def test_every_part_has_a_turn_within_the_minutes(late: float) -> None:
    """Even if each uses its whole turn and ends as late as it may, and the first gets all that is left over."""
    left, given, count = gpu.MINUTES, [], len(gpu.parts(tests=True))
    for others in reversed(range(count)):
        given.append(gpu.turn(left, others))
        left -= given[-1] + late
    assert min(given) >= gpu.LEAST
    assert left >= -late - 1e-9  # the last alone may end after them
    assert given[0] == gpu.AT_ONCE
    assert gpu.turn(gpu.MINUTES, 0) == gpu.AT_ONCE
    assert gpu.turn(gpu.LEAST / 2, 3) < gpu.LEAST


def test_memory_comes_before_the_tests_which_have_one_turn(tmp_path: Path) -> None:
    names = [part.name for part in gpu.parts(tests=True)]
    assert names[0] == "layers"
    assert gpu.TESTS in names
    (tests,) = gpu.parts([gpu.TESTS], tests=True)
    ends = gpu.run([tests], minutes=40, command=lambda _, minutes: [sys.executable, "-c", "print('4 passed')"])
    assert [(end.said, end.failed) for end in ends] == [("4 passed", False)]


@pytest.mark.parametrize(
    ("more", "said"),
    [("import no_such_module", "lacks no_such_module"), ("sys.exit('no CUDA')", "no CUDA")],
    ids=["module", "refusal"],
)  # fmt: skip
def test_a_part_that_fails_says_why_and_the_next_goes_on(tmp_path: Path, more: str, said: str) -> None:
    every = [made(tmp_path, "bad", more), made(tmp_path, "good")]
    ends = gpu.run(every, minutes=40, command=command_in(tmp_path))
    assert said in ends[0].said
    assert (ends[0].failed, ends[1].said) == (True, "nothing is left")


def test_a_dry_run_says_what_it_lacks_and_fails_by_what_is_wrong() -> None:
    done = gpu.End("layers", "nothing is left", failed=False, seconds=1.0)
    good = {"table": "layers", "method": "full"}
    bare = good | {"why": "UserError: weights: got nf4; run pip install 'sparing[lowbit]'"}
    head = {"question": "?"}
    assert gpu.judged(done, [head, good, bare]).said == f"1 of 2 cells ran; {bare['why']}"
    assert not gpu.judged(done, [head, good, bare]).failed
    wrong = gpu.judged(done, [head, bare, good | {"why": "ValueError: no"}])
    assert (wrong.said, wrong.failed) == ("ValueError: no", True)
    assert gpu.judged(done, [head, good | {"table": "other"}]).failed


def test_the_page_says_what_was_not_run(tmp_path: Path) -> None:
    ends = [gpu.End("layers", "lacks peft", failed=True, seconds=1.0)]
    page = gpu.write(tmp_path, ends, dry=False).read_text()
    assert "lacks peft" in page
    assert branches.untouched()[0].partition(":")[0] in page

"""One command for a GPU: the list of CUDA branches, the parts it finds, and how it deals out its minutes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import ORDER, branches
from benchmarks.gpu import __main__ as gpu


def test_every_cuda_branch_is_named_and_none_that_is_gone() -> None:
    assert {path: set(names) for path, names in branches.BRANCHES.items()} == branches.found()
    who = {by for names in branches.BRANCHES.values() for by in names.values()}
    assert who <= {*ORDER, "tests", branches.SHAPES, branches.NOTHING}


def test_a_branch_is_found_by_its_function() -> None:
    text = 'class A:\n    def f(self, x):\n        return x.is_cuda\ndef g():\n    """On cuda."""\nwhere = "cuda"\n'
    assert branches.in_source(text) == {"A.f", ""}


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


def test_minutes_are_dealt_out_until_nothing_is_left(tmp_path: Path) -> None:
    part = made(tmp_path, "one")
    ends = gpu.run([part], minutes=40, command=lambda one: [sys.executable, str(tmp_path / f"{one.name}.py")])
    assert [(end.part, end.said) for end in ends] == [("one", "nothing is left")]
    assert [float(line.split()[1][:-1]) for line in part.result.read_text().splitlines()] == pytest.approx([8, 8, 8])


@pytest.mark.parametrize(
    ("more", "said"),
    [("import no_such_module", "lacks no_such_module"), ("sys.exit('no CUDA')", "no CUDA")],
    ids=["module", "refusal"],
)  # fmt: skip
def test_a_part_that_fails_says_why_and_the_next_goes_on(tmp_path: Path, more: str, said: str) -> None:
    every = [made(tmp_path, "bad", more), made(tmp_path, "good")]
    ends = gpu.run(every, minutes=40, command=lambda one: [sys.executable, str(tmp_path / f"{one.name}.py")])
    assert said in ends[0].said
    assert (ends[0].failed, ends[1].said) == (True, "nothing is left")


def test_the_page_says_what_was_not_run(tmp_path: Path) -> None:
    ends = [gpu.End("layers", "lacks peft", failed=True, seconds=1.0)]
    page = gpu.write(tmp_path, ends, dry=False).read_text()
    assert "lacks peft" in page
    assert branches.untouched()[0].partition(":")[0] in page

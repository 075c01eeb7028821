"""What a stranger meets first: links that lead somewhere, extras that say their line, equal checks everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())


def described() -> str:
    """The README as an index of packages shows it."""
    text = (ROOT / "README.md").read_text()
    for one in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text


def test_every_link_of_the_description_is_absolute_and_its_file_is_there():
    links = re.findall(r"""(?:\]\(|\b(?:src|srcset)=")([^)"\s]+)""", described())
    assert len(links) > 15
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    address = PROJECT["project"]["urls"]["Source"]
    ours = [link.removeprefix(address) for link in links if link.startswith(address)]
    places = [re.sub(r"^/(blob|raw)/main/", "", link).partition("#")[0] for link in ours]
    assert [place for place in places if not (ROOT / place).exists()] == []
    assert any(link.startswith("/raw/main/docs/pictures/") for link in ours)


def test_all_addresses_begin_alike():
    address = PROJECT["project"]["urls"]["Source"]
    assert all(url.startswith(address) for url in PROJECT["project"]["urls"].values())
    hooks = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    assert all(f"{address}/" in one["replacement"] for one in hooks)


def test_a_python_is_named_where_it_is_run():
    named = [
        found[1]
        for one in PROJECT["project"]["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one))
    ]
    assert all(job["strategy"]["matrix"]["python"] == named for job in WORKFLOW["jobs"].values())
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def test_the_workflow_runs_what_the_makefile_has():
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == ["make check", "make test", "make test-slow", "make gpu-dry", "make harness", "make wheel"]
    assert {step.removeprefix("make ") for step in steps} <= rules


def test_what_is_skipped_elsewhere_runs_in_the_workflow():
    """The browser must be there, and the harness is installed in the version of the constraints."""
    assert WORKFLOW["jobs"]["test"]["env"]["SPARING_BROWSER"] == "required"
    recipe = (ROOT / "Makefile").read_text().partition("\n.venv/.harness:")[2].partition("\n\n")[0]
    assert "-c constraints.txt -e '.[dev,eval]'" in recipe
    assert re.search(r"^lm_eval==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_hooks_are_make_check():
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0].split("\n\t")[1:]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [line.replace("$(BIN)", ".venv/bin") for line in recipe]
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks} == {("system", False)}


TOOLS = {"all", "dev", "docs", "bench"}  # extras that no part of the package asks for
EXTRAS = sorted(set(PROJECT["project"]["optional-dependencies"]) - TOOLS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_says_its_line(extra: str):
    """Somewhere in the sources stands what to type where it is missing."""
    sources = "".join(path.read_text() for path in (ROOT / "src" / "sparing").rglob("*.py"))
    assert f"pip install 'sparing[{extra}]'" in sources


def test_nothing_replaces_a_torch_that_is_there():
    """A build for CUDA satisfies what the package asks for; pins of torch are of ``constraints.txt`` alone."""
    project = PROJECT["project"]
    asked = [*project["dependencies"], *(one for some in project["optional-dependencies"].values() for one in some)]
    assert [one for one in asked if re.match(r"torch\b(?!-)", one)] == ["torch>=2.11"]

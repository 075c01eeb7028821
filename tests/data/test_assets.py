"""The list is complete, pinned, and its names are guessable."""

from __future__ import annotations

import re

import pytest

from sparing.data import ASSETS, asset, catalogue
from sparing.errors import UserError


def test_every_asset_is_pinned_and_described() -> None:
    assert len({each.name for each in ASSETS}) == len(ASSETS)
    for each in ASSETS:
        assert re.fullmatch(r"[a-z0-9-]+", each.name)  # a folder's name on every system
        assert re.fullmatch(r"[0-9a-f]{64}", each.package.sha256)
        assert re.fullmatch(r"[0-9][^<>=~^*]*", each.package.version.replace("~git", "")), "an exact version"
        assert each.title
        assert each.licence
        assert each.size > 0
        assert each.download > 0
        assert all("/" not in ours for ours in each.members.values())


@pytest.mark.parametrize(
    ("typed", "meant"), [("stories15M", "stories15m"), ("bryant", "bryant-stories"), ("MNIST", "mnist")]
)
def test_a_slip_gets_the_close_name(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"use '{meant}'"):
        asset(typed)


def test_a_wild_name_gets_the_list() -> None:
    with pytest.raises(UserError, match=r"use one of .*alice, enwik8"):
        asset("zzz")


def test_the_catalogue_touches_no_network(cache, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    rows = catalogue()
    assert [row["name"] for row in rows] == [each.name for each in ASSETS]
    assert not any(row["cached"] for row in rows)
    assert {"title", "kind", "licence", "download", "size", "source", "caution"} <= set(rows[0])
    assert not cache.exists()

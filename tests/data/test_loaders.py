"""Assets in memory, and the user's own copies of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sparing.data import load_images, load_text
from sparing.errors import UserError

LETTERS = "aé€𐌰"  # one, two, three and four bytes of UTF-8


def test_the_beginning_never_ends_within_a_character(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(LETTERS, encoding="utf-8")
    got = [load_text("alice", path=path, first=count) for count in range(11)]
    assert got == ["", "a", "a", "aé", "aé", "aé", "aé€", "aé€", "aé€", "aé€", LETTERS]
    assert load_text("alice", path=path) == LETTERS


def test_line_ends_are_kept_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"a\r\nb\rc\n")
    assert load_text("alice", path=tmp_path / "mine.txt") == "a\r\nb\rc\n"


@pytest.mark.parametrize("data", [b"ab\xff", b"ab\xc3"])
def test_what_is_not_utf8_is_refused_with_the_place(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mine.txt").write_bytes(data)
    with pytest.raises(UserError, match="byte 2 is not UTF-8"):
        load_text("alice", path=tmp_path / "mine.txt")


def test_kinds_are_not_confused() -> None:
    with pytest.raises(UserError, match="no asset of kind text; use one of bryant-stories"):
        load_text("mnist")
    with pytest.raises(UserError, match="no asset of kind images; use one of mnist, fashion-mnist"):
        load_images("alice")


def test_damaged_images_of_the_users_own_are_refused(tmp_path: Path) -> None:
    from sparing.data.images import FILES

    for name in FILES:
        (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not an idx file"):
        load_images("mnist", path=tmp_path)


@pytest.mark.asset
@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("bryant-stories", "TWO LITTLE RIDDLES IN RHYME\n", 'where these virtues are\nabsent!"\n'),
        ("burgess-busterbrown", "I\n\nBUSTER BEAR GOES FISHING\n", "that I am going to do it.\n"),
        ("alice", "CHAPTER I. Down the Rabbit-Hole\n", "and the happy summer days.\n"),
    ],
)
def test_the_real_books_are_whole_and_unwrapped(fetched, name: str, begins: str, ends: str) -> None:
    fetched(name)
    text = load_text(name)
    assert text.startswith(begins)
    assert text.endswith(ends)
    assert "\r" not in text
    assert "Gutenberg" not in text


@pytest.mark.asset
def test_the_real_enwik8_is_the_known_one(fetched) -> None:
    path = fetched("enwik8")
    with path.open("rb") as file:
        # the md5 published with the Large Text Compression Benchmark
        assert hashlib.file_digest(file, "md5").hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"

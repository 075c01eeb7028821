"""Roles are told apart by more than colour, and all that is read stands off its background."""

from __future__ import annotations

import itertools

import pytest

from sparing.report.palette import DARK, LIGHT, ROLES, Palette, blend, contrast, style


def test_contrast_is_that_of_known_pairs() -> None:
    # published examples of the definition: #767676 is the lightest grey that passes 4.5 on white, #777777 fails
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert contrast("#ff0000", "#ffffff") == pytest.approx(4.00, abs=0.005)


@pytest.mark.parametrize("shade", [LIGHT, DARK])
@pytest.mark.parametrize("name", ["ink", "quiet", "link"])
def test_text_stands_off_paper_and_panel(shade, name) -> None:
    assert contrast(getattr(shade, name), shade.paper) >= 4.5
    assert contrast(getattr(shade, name), shade.panel) >= 4.5


def test_no_two_roles_share_colour_or_marker() -> None:
    looks = [style(role) for role in ROLES]
    for one, other in itertools.combinations(looks, 2):
        assert one.colour != other.colour
        assert one.marker != other.marker
        assert one.sign != other.sign


def test_the_colours_are_those_of_the_house() -> None:
    assert [style(role).colour for role in ROLES] == [
        "#0072B2", "#56B4E9", "#000000", "#D55E00", "#E69F00", "#8A8A8A", "#009E73", "#F0E442",
    ]  # fmt: skip
    assert style("reference").dark == "#FFFFFF"
    assert all(style(role).dark == style(role).colour for role in ROLES if role != "reference")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_methods_stand_off_the_paper(theme) -> None:
    """Shapes need 3 to 1; the pale hues of the palette have an outline, a marker and a written name instead."""
    pale = {"extension", "second_rival", "warning"} if theme == "light" else set()
    for role in ROLES:
        if role not in pale:
            assert contrast(Palette(theme).of(role), Palette(theme).shades.paper) >= 3


def test_stand_ins_are_one_for_a_pair_and_blend_on_each_ground() -> None:
    both, light, dark = Palette("both"), Palette("light"), Palette("dark")
    assert both.of("ours") == light.of("ours") == dark.of("ours")  # the same on both: nothing stands in
    ink = both.shades.ink
    assert ink == both.shades.ink
    assert both.pairs[ink] == (light.shades.ink, dark.shades.ink)
    pale = both.pale(ink, 0.2, 0.4)
    assert both.pairs[pale] == (light.pale(light.shades.ink, 0.2), dark.pale(dark.shades.ink, 0.0, 0.4))
    assert len({*both.pairs, *both.pairs.values()}) == 2 * len(both.pairs)


def test_mixing_ends_at_its_ends() -> None:
    assert blend("#102030", "#ffffff", 1) == "#102030"
    assert blend("#102030", "#ffffff", 0) == "#ffffff"

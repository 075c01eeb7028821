"""Numbers read as LOOK says: three digits, units, intervals, a dash for what was not measured."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparing.report.cells import columns, digits, format_number, scale_of, tidy, words

_WORDS = {"M": 1e6, "bn": 1e9, "tn": 1e12}
_PLAIN = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")


def read_back(text: str) -> float:
    """An independent reader of what ``digits`` writes."""
    text = text.replace(",", "").translate(_PLAIN)
    if " × 10" in text:
        factor, power = text.split(" × 10")
        return float(factor) * 10.0 ** int(power)
    number, _, name = text.partition(" ")
    return float(number) * _WORDS.get(name, 1.0)


@given(st.floats(min_value=1e-300, max_value=1e300) | st.floats(min_value=-1e300, max_value=-1e-300))
def test_three_significant_digits_are_kept_and_no_more(value: float) -> None:
    # half a unit of the third digit: at most 0.5 % of a number that begins with 1.00
    assert read_back(digits(value)) == pytest.approx(value, rel=5.001e-3)
    mantissa = digits(value).split(" ")[0].replace(",", "").replace("−", "").lstrip("0.").replace(".", "")
    assert len(mantissa.rstrip("0")) <= 3


@given(st.integers(-999_999, 999_999))
def test_small_integers_are_exact(value: int) -> None:
    assert int(digits(value).replace(",", "").replace("−", "-")) == value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3.2149, "", "3.21"),
        (0.5, "", "0.500"),
        (999.96, "", "1000"),
        (12345.6, "tokens/s", "12,300 tokens/s"),
        (0.0, "", "0"),
        (3e-4, "", "0.0003"),
        (-1.5e-7, "", "−1.5 × 10⁻⁷"),
        (6_738_415_616, "", "6.74 bn"),
        (999_700_000.0, "", "1.00 bn"),
        (24.1e9, "B", "22.4 GiB"),
        (512, "B", "512 B"),
        (0, "B", "0 B"),
        (0.0123, "s", "12.3 ms"),
        (90.0, "s", "90.0 s"),
        (5400.0, "s", "90.0 min"),
        (2.7, "×", "2.7×"),
        (2.0, "×", "2.0×"),
        (11.9, "×", "11.9×"),
        (1.352, "×", "1.35×"),
        (None, "GiB", "–"),
        (math.nan, "", "NaN"),
        (-math.inf, "", "−∞"),
        (math.nan, "×", "NaN"),
        (True, "", "yes"),
        ("a\nb", "", "a b"),
    ],
)
def test_one_value(value, unit, text) -> None:
    assert format_number(value, unit) == text


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.83, 0.80, 0.86, "0.83 [0.80, 0.86]"),
        (3.2141, 3.2109, 3.2183, "3.214 [3.211, 3.218]"),
        (2.5, 2.49, 2.515, "2.500 [2.490, 2.515]"),  # half-width 0.0125 begins with 1: one digit more
        (12345.0, 12000.0, 12600.0, "12,300 [12,000, 12,600]"),
        (-0.2, -0.5, 0.1, "−0.2 [−0.5, 0.1]"),
        (1.0, 1.0, 1.0, "1.00 [1.00, 1.00]"),
        (math.nan, 0.0, 1.0, "NaN [0, 1.00]"),
    ],
)
def test_an_interval_has_the_decimals_it_supports(value, low, high, text) -> None:
    assert format_number(value, low=low, high=high) == text


def test_a_ratio_with_interval() -> None:
    assert format_number(1.41, "×", low=1.36, high=1.45) == "1.41× [1.36, 1.45]"


@given(st.floats(0.1, 100), st.floats(0.001, 0.5))
def test_an_interval_never_collapses(value: float, half: float) -> None:
    text = format_number(value, low=value - half, high=value + half)
    low, high = re.findall(r"\[(.*), (.*)\]", text)[0]
    assert read_back(low) < read_back(high)


def test_bytes_of_a_column_share_the_unit_of_the_largest() -> None:
    rows = [{"peak": 3 * 2**30}, {"peak": 2**29}, {"peak": 2**20}, {"peak": None}]
    (column,) = columns(rows, units={"peak": "B"})
    assert column.unit == "GiB"
    assert column.cells == ("3.00", "0.500", "1.00 MiB", "–")  # a thousandth of the unit says so itself


def test_intervals_are_folded_and_gaps_are_dashes() -> None:
    rows = [{"table": "t", "name": "a", "loss": 0.83, "loss_low": 0.8, "loss_high": 0.86, "n": 3}, {"name": "b"}]
    shown = {column.name: column.cells for column in columns(rows)}
    assert shown == {"name": ("a", "b"), "loss": ("0.83 [0.80, 0.86]", "–"), "n": ("3", "–")}


def test_columns_are_chosen_and_named_in_words() -> None:
    chosen = columns([{"held_out_loss": 1.0, "b": 2}], names=["b", "held_out_loss", "absent"])
    assert [column.label for column in chosen] == ["b", "held out loss", "absent"]
    assert chosen[2].cells == ("–",)
    assert not chosen[2].numeric


def test_a_column_with_low_in_its_name_is_not_an_interval() -> None:
    assert [column.name for column in columns([{"loss_low": 1.0}])] == ["loss_low"]


def test_units_do_not_stand_over_text_or_ratios() -> None:
    rows = [{"speed": 2.7, "state": "ok"}]
    assert [column.unit for column in columns(rows, units={"speed": "×", "state": "s"})] == ["", ""]


def test_no_rows_no_columns() -> None:
    assert columns([]) == []


def test_values_that_are_not_numbers_do_not_choose_the_scale() -> None:
    assert scale_of([None, "oom", True, math.inf, 2048], "B").unit == "KiB"
    assert scale_of([], "s").unit == "s"


@given(st.text())
def test_tidy_text_is_one_line_without_control_characters(text: str) -> None:
    assert tidy(text).isprintable() or "�" in tidy(text) or not tidy(text).strip() or _only_odd_spaces(tidy(text))
    assert "\n" not in tidy(text)
    assert "\x1b" not in tidy(text)


def _only_odd_spaces(text: str) -> bool:
    return all(letter.isprintable() or letter.isspace() or not letter.isascii() for letter in text)


def test_words() -> None:
    assert words("tokens_per_second") == "tokens per second"

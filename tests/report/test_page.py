"""The page: whole, offline, in order, escaped, readable in the light and in the dark."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest

from sparing.report import Figure, Page, Record, Sample, Section, Table
from sparing.report import page as page_module
from sparing.report.cells import columns
from sparing.report.page import Number
from sparing.report.palette import DARK, LIGHT
from sparing.report.plots import Bar, Series, bars, lines

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> {{ 7*7 }} </style>"
VOID = {"meta", "br", "hr", "img"}


class Reader(HTMLParser):
    """Checks that tags are balanced and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data) -> None:
        self.words.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.stack
    return reader


ROWS = [
    {"method": "full", "peak": 2**32, "loss": 2.05, "loss_low": 2.0, "loss_high": 2.1, "n": 3},
    {"method": EVIL, "peak": None},
]
UNITS = {"peak": "B", "loss": "nat/token"}
FIGURE = bars([Bar(EVIL, 1.0)], title=f"Bars {EVIL}", value="x", caption=EVIL)


def record() -> Record:
    machine = {"cores": 2, "threads": 1, "cpu": "CPU", "memory": 2**34}
    return Record(
        question="How much?",
        settings={
            "model": EVIL,
            "sampling": {"active": 2, "draw": {"kind": "Uniform"}},
            "betas": [0.9, 0.999],
            "clip": None,
        },
        seed=[0, 1],
        environment={"python": "3.11", "torch": "2.13", "command": f"run {EVIL}"} | machine,
        units=UNITS,
    )


def full() -> Page:
    table = Table(ROWS, title="Numbers", units=UNITS, roles={"full": "reference"}, note="A **note**.")
    speech = Sample(EVIL, {"before": "a\n b", "after": EVIL})
    return Page(
        f"Title {EVIL}",
        "How much?",
        "It is **4 GiB**, see `peak`.",
        [
            Section("First", f"One.\n\nTwo {EVIL}", [FIGURE], [table], [speech], "Chapter **answer**."),
            Section("Second", figures=[FIGURE], tables=[Table(ROWS, title="More", folded=True)]),
        ],
        record=record(),
        reproduce={"data": "enwik8", "seeds": "0 and 1"},
        caveats=["One `seed`.", EVIL],
    )


@pytest.fixture(scope="module")
def text() -> str:
    return full().render()


@pytest.fixture(scope="module")
def page(text) -> Reader:
    return read(text)


def test_nothing_is_loaded_or_run(text, page) -> None:
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href"}:
                assert str(value).startswith(("#", "data:image/png;base64,"))
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text


def test_hostile_text_is_shown_as_it_is(page) -> None:
    words = " ".join(page.words)
    assert "{{ 7*7 }}" in words
    assert words.count("<script>alert(1)</script>") >= 8
    assert any(EVIL in (attributes.get("aria-label") or "") for _, attributes in page.tags)


def test_the_order_is_question_answer_picture_table_reproduce_caveats(text) -> None:
    marks = ["How much?", "<strong>4\N{NO-BREAK SPACE}GiB</strong>", "<svg", "<table", "How to reproduce", "Caveats"]
    places = [text.index(mark, text.index("<main>")) for mark in marks]
    assert places == sorted(places)


def test_a_number_keeps_its_unit_beside_it_but_in_code() -> None:
    table = Table([{"what": "95 % or more"}], title="T")
    text = Page("T", "Q?", "**3 %**, as `wait 3 s` says.", [Section("S", tables=[table])]).render()
    assert "<strong>3\N{NO-BREAK SPACE}%</strong>" in text
    assert "<code>wait 3 s</code>" in text
    assert ">95\N{NO-BREAK SPACE}% or more</th>" in text


def test_ids_are_unique_though_a_figure_is_shown_twice(page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [str(attributes["href"])[1:] for tag, attributes in page.tags if tag == "a"]
    assert targets == ["chapter-1", "chapter-2"]
    assert set(targets) <= set(ids)


def test_every_picture_has_words_and_a_drawing_for_desk_and_phone(page) -> None:
    pictures = [attributes for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert [attributes["aria-label"] for attributes in pictures] == [FIGURE.alt, FIGURE.alt]
    drawn = [attributes["class"] for tag, attributes in page.tags if tag == "svg"]
    assert drawn == ["wide", "narrow"] * 2


@pytest.mark.parametrize("narrow", [False, True])
def test_exactly_one_drawing_shows_on_each_screen(text, narrow) -> None:
    """The rules of the style sheet, applied by hand in their order."""
    style = text[text.index("<style>") : text.index("@media print")]
    now = {name for name, on in (("(max-width: 560px)", narrow),) if on}
    shown = set()
    for line in style.splitlines():
        media = re.match(r"@media (.*?) \{", line)
        if ".plot ." in line and set(media.group(1).split(" and ") if media else ()) <= now:
            for name, state in re.findall(r"\.plot \.(\w+) \{ display: (\w+)", line):
                shown = shown | {name} if state == "block" else shown - {name}
    assert shown == {"narrow" if narrow else "wide"}


def test_the_table_shows_what_the_terminal_shows(page) -> None:
    words = [word.strip() for word in page.words]
    for column in columns(ROWS, units=UNITS):
        assert column.label in words
        assert all(cell in words for cell in column.cells)
    assert "nat/token" in words
    heads = [attributes for tag, attributes in page.tags if tag == "th" and attributes.get("scope") == "col"]
    assert [attributes.get("class") for attributes in heads[:4]] == [None, "number", "number", "number"]


def test_how_to_reproduce_names_command_commit_seeds_versions_machine(text, page) -> None:
    words = " ".join(" ".join(page.words).split())
    part = words[words.index("How to reproduce") : words.index("Caveats")]
    assert "run <script>" in part
    for fact in ("commit not from a checkout", "seeds 0 and 1", "Python 3.11, torch 2.13", "data enwik8"):
        assert fact in part
    assert "CPU, 2 cores, 1 thread, 16.0 GiB of memory, no CUDA device" in part
    for setting in ("sampling.active 2", "sampling.draw.kind Uniform", "betas 0.9, 0.999", "clip –"):
        assert setting in part


def test_wide_tables_scroll_in_their_own_box_reached_by_key(page) -> None:
    boxes = [attributes for tag, attributes in page.tags if attributes.get("class") == "scroll"]
    assert [box["aria-label"] for box in boxes] == ["Numbers", "More"]
    assert all(box["tabindex"] == "0" for box in boxes)


def test_both_grounds_are_in_the_sheet_and_texts_keep_their_lines_and_their_prompt(text) -> None:
    prompt = html.escape(EVIL).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    assert f'<span class="prompt">{prompt}</span>a\n b</p>' in text
    assert f"--paper: {LIGHT.paper}" in text
    assert f"--paper: {DARK.paper}" in text
    assert 'name="viewport"' in text


def test_a_page_of_one_chapter_has_no_list_of_chapters() -> None:
    short = Page("T", "Q?", "A.", [Section("Only", "Text.")]).render()
    assert "<nav" not in short
    assert "Caveats" not in short
    assert "record.jsonl" not in short
    read(short)


def glance(**changes) -> Section:
    numbers = [Number(value="12 MiB", label=f"held {EVIL}", note="n = 1"), Number(value="3 s", label="a step")]
    settings = {"topic": "memory", "anchor": "first", "numbers": numbers, "commands": [f"run {EVIL}"]}
    return Section("How much?", "Words.", **(settings | changes))


def test_numbers_stand_in_their_chapter_and_the_first_of_each_in_the_strip() -> None:
    second = glance(anchor="second", numbers=[Number(value="5 %", label="lost")], topic="")
    text = Page("T", "Q", "A", [glance(), second, Section("Plain")]).render()
    reader = read(text)
    strip = text[text.index("<nav") : text.index("</nav>")]
    assert re.findall(r'href="#(\w+)"', strip) == ["first", "second"]
    assert "12\N{NO-BREAK SPACE}MiB" in strip
    assert "How much?" in strip.split("</li>")[1], "without a topic the heading stands for it"
    assert "3\N{NO-BREAK SPACE}s" not in strip
    assert "3\N{NO-BREAK SPACE}s" in text[text.index("</nav>") :]
    assert [values["id"] for tag, values in reader.tags if tag == "section"] == [
        "first", "second", "chapter-3", "reproduce",
    ]  # fmt: skip
    assert f"run {EVIL}" in reader.words
    assert "<script" not in text


def test_a_card_carries_its_interval_and_its_control_into_the_strip() -> None:
    card = Number(value="+1.0 points", label="gain", note="seed 0", interval="[−2, +4], n = 3", control="+0.8 points")
    text = Page("T", "Q", "A", [glance(numbers=[card]), glance(anchor="second")]).render()
    strip = text[text.index("<nav") : text.index("</nav>")]
    first, second = strip.split("</li>")[:2]
    assert "[−2, +4], n = 3" in first
    assert "<b>control</b> +0.8" in first
    assert "seed 0" not in first, "notes stay in the chapter"
    assert "control" not in second


def test_commands_in_a_sentence_do_not_break_within_a_flag() -> None:
    text = Page("T", "Q", "A", [Section("Only", "Call `sparing plan --memory <24GB>` now.")]).render()
    assert 'sparing plan <span class="flag">--memory</span> &lt;24GB&gt;</code>' in text


def test_details_are_folded_with_their_pictures_under_ids_of_their_own() -> None:
    inner = Section("More", "Inside.", [FIGURE], [Table(ROWS)])
    text = Page("T", "Q", "A", [glance(details=inner), Section("Plain", figures=[FIGURE])]).render()
    read(text)
    folded = text[text.index("<details><summary>More</summary>") :]
    assert "Inside." in folded[: folded.index("</details>")]
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_note_stands_below_the_chapters() -> None:
    text = Page("T", "Q", "A", [Section("Only")], note="Not run: `x`.").render()
    assert '<p class="note">Not run: <code>x</code>.</p>' in text[: text.index("</nav>")]


def test_it_is_written_whole_and_the_same_twice(tmp_path) -> None:
    page = Page("T", "Q? – γ", "A.", [Section("S", "Text.")])
    path = page.write(tmp_path / "out" / "report.html")
    assert path.read_text(encoding="utf-8") == page.render()
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_pictures_can_be_written_beside_it(tmp_path) -> None:
    up = lines([Series("a", [0, 1], [1, 2])], title="Up", x="x", y="y")
    page = Page("T", "Q?", "A.", [Section("S", figures=[up])])
    (picture,) = page.write_pictures(tmp_path / "png")
    assert picture.name == "chapter-1-figure-1.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_page_that_fails_leaves_the_old_one(tmp_path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no")

    path = Page("T", "Q?", "old").write(tmp_path / "report.html")
    broken = Page("T", "Q?", "new", [Section("S", figures=[Figure("t", "a", "c", fail)])])
    with pytest.raises(RuntimeError):
        broken.write(path)
    assert "old" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_prose_knows_bold_and_code_only() -> None:
    shown = Page("T", "Q?", "**a** and `b`; 2 ** 3 * 4; `<b>` **<i>**").render()
    marked = "<strong>a</strong> and <code>b</code>; 2 ** 3 * 4; <code>&lt;b&gt;</code> <strong>&lt;i&gt;</strong>"
    assert marked in shown


def test_a_table_is_laid_out_once_for_all_its_cells(monkeypatch):
    """A page of 450 rows took 88 s: every cell laid its whole table out anew."""
    made = []
    lay_out = page_module.to_columns
    monkeypatch.setattr(page_module, "to_columns", lambda *args, **more: made.append(1) or lay_out(*args, **more))
    rows = [{"client": f"c{at}", "rows": at} for at in range(50)]
    table = Table(rows, "Clients", roles={"c0": "ours"})
    text = Page("t", "Who?", "They.", [Section("s", tables=[table])]).render()
    assert len(made) == 1
    assert "c49" in text


def test_a_command_breaks_between_its_words_alone() -> None:
    section = Section("Go on", commands=["sparing plan a-b --max-new-tokens 4 -x '<b>'"])
    html = Page("P", "Q?", "A.", [section]).render()
    flags = [f'<span class="flag">{flag}</span>' for flag in ("--max-new-tokens", "-x")]
    assert f"sparing plan a-b {flags[0]} 4 {flags[1]} &#39;&lt;b&gt;&#39;" in html
    assert ".flag { white-space: nowrap; }" in html

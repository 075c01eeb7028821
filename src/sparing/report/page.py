"""A page that answers one question: self-contained, opened from a disk, light or dark, on a desk or a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.report.atomic import write_whole
from sparing.report.cells import Cell, Column, format_number, words
from sparing.report.cells import columns as to_columns
from sparing.report.environment import version
from sparing.report.figure import FONTS, Figure, prefix_ids
from sparing.report.palette import DARK, LIGHT, Role, style
from sparing.report.record import Record, plain

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_PACKAGES = ("torch", "transformers", "peft", "numpy")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a record, shown as the terminal shows them."""

    rows: Sequence[Mapping[str, Cell]]
    """Rows of one table."""

    title: str = ""
    """What it lists."""

    units: Mapping[str, str] | None = None
    """Unit by column name."""

    columns: Sequence[str] | None = None
    """Columns to show, in order; all by default."""

    note: str = ""
    """Below the table."""

    roles: Mapping[str, Role] | None = None
    """Role by name in the first text column, for the marker beside it."""

    folded: bool = False
    """Whether the table opens on a click; for long ones."""

    @property
    def shown(self) -> list[Column]:
        """Its columns as text."""
        return to_columns(self.rows, units=self.units, names=self.columns)

    @staticmethod
    def named(shown: Sequence[Column]) -> int | None:
        """Position of the first text column among those shown."""
        return next((at for at, column in enumerate(shown) if not column.numeric), None)


@dataclass(frozen=True, slots=True)
class Sample:
    """Texts that models wrote, side by side."""

    prompt: str
    """What they continue; shown in a muted colour before each text; may be empty."""

    texts: Mapping[str, str]
    """Continuation by who wrote it ("before", "after LISA")."""

    title: str = "Text written by the model"
    """Heading above the texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """One measured number, large."""

    value: str  # with its unit
    label: str  # what it is
    note: str = ""  # runs and seed behind it
    interval: str = ""  # where it may lie, with the runs behind that; in the strip too
    control: str = ""  # what it is held against; in the strip too


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter: answer, words, numbers, pictures, tables, texts, commands to try next, and folded details."""

    title: str
    """Heading, also in the list of chapters."""

    text: str = ""
    """Paragraphs, separated by blank lines; ``**bold**`` and backticks are understood."""

    figures: Sequence[Figure] = ()
    """Pictures, each under its finding."""

    tables: Sequence[Table] = ()
    """Tables."""

    samples: Sequence[Sample] = ()
    """Texts."""

    answer: str = ""
    """The chapter in one sentence with its number."""

    topic: str = ""
    """What it is about, in a few words above the heading."""

    anchor: str = ""
    """Its place in a link; "chapter-1" and so on by default."""

    numbers: Sequence[Number] = ()
    """Key numbers; on a page with such chapters the first of each stands in a strip at the top."""

    commands: Sequence[str] = ()
    """Commands for readers who want to go deeper."""

    details: Section | None = None
    """What opens on a click, under its title: words, pictures, tables and texts."""


@dataclass(frozen=True, slots=True)
class Page:
    """Question, answer, pictures, tables, how to reproduce, caveats: in this order.

    Example:
        >>> page = Page("Memory", "How much is held?", "**A half**.", [Section("Peak", "By `method`.")])
        >>> "<strong>A half</strong>" in page.render()
        True
    """

    title: str
    """Name of the page."""

    question: str
    """The question it answers, in one sentence."""

    answer: str
    """The answer, in one sentence with its number."""

    sections: Sequence[Section] = ()
    """Chapters."""

    record: Record | None = None
    """Where command, commit, seeds, versions, machine, settings and environment come from."""

    reproduce: Mapping[str, Any] = field(default_factory=dict)
    """More of these, or others in their place, by name ("command", "data", …)."""

    caveats: Sequence[str] = ()
    """What the answer does not cover, one sentence each."""

    note: str = ""
    """Below the list of chapters."""

    def write(self, path: str | PathLike[str]) -> Path:
        """Write the page whole or not at all.

        Args:
            path: Target, usually ``OUT/report.html``.

        Returns:
            The target.
        """
        return write_whole(path, self.render())

    def write_pictures(self, folder: str | PathLike[str]) -> list[Path]:
        """Write every figure as a PNG at twice its size on the page, with its title, for slides and emails.

        Args:
            folder: Where to; made when missing.

        Returns:
            The files, ``chapter-1-figure-1.png`` and so on.
        """
        return [
            figure.save_png(Path(folder) / f"chapter-{chapter}-figure-{number}.png")
            for chapter, section in enumerate(self.sections, start=1)
            for number, figure in enumerate(section.figures, start=1)
        ]

    def render(self) -> str:
        """The page as HTML: no scripts, no links out; everything that was given is escaped."""
        facts = (_facts(self.record) if self.record else {}) | {
            words(name): _as_text(plain(value)) for name, value in self.reproduce.items()
        }
        folded = []
        if self.record is not None:
            machine = dict(self.record.environment)
            if machine.get("memory"):
                machine["memory"] = format_number(machine["memory"], "B")
            both = (("Settings", self.record.settings), ("Environment", machine))
            folded = [(name, list(_flat(entries))) for name, entries in both if entries]
        template = _templates().get_template("page.html.j2")
        text = template.render(
            page=self, folded=folded, command=facts.pop("command", ""), facts=[one for one in facts.items() if one[1]],
            light=LIGHT, dark=DARK, accent=style("ours").colour, fonts=FONTS, version=version(),
        )  # fmt: skip
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    # strict: a name that is spelt wrong in the template would otherwise leave a gap in the page
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = (_markup, _paragraphs, _svg, _marker, _unbroken, _flags)
    templates.filters |= {one.__name__.removeprefix("_"): one for one in filters}
    return templates


def _markup(text: str) -> Markup:
    """Escape, then understand ``**bold**`` and backticks."""
    from markupsafe import Markup, escape

    # readers copy what is in backticks, so its spaces stay ordinary ones
    between = re.split(r"(`[^`\n]+`)", text)
    text = "".join(part if part.startswith("`") else _unbroken(part) for part in between)
    marked = re.sub(r"`([^`\n]+)`", lambda code: f"<code>{_flag_spans(code[1])}</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*\n]+)\*\*", r"<strong>\1</strong>", marked))  # noqa: S704  escaped above


def _unbroken(text: str) -> str:
    """Keep a number on one line with its unit."""
    return re.sub(r"(?<=\d) (?=%|nat|points|[KMGT]i?B\b|[mµ]?s\b|min\b)", "\N{NO-BREAK SPACE}", text)


def _flags(command: str) -> Markup:
    """A command that breaks between its words, and not at the hyphens within a flag."""
    from markupsafe import Markup, escape

    return Markup(_flag_spans(str(escape(command))))  # noqa: S704  escaped here


def _flag_spans(escaped: str) -> str:
    """The same of text that is escaped already."""
    return re.sub(r"(?<!\S)(--?[\w.-]+)", r'<span class="flag">\1</span>', escaped)


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _svg(figure: Figure, narrow: bool, prefix: str) -> Markup:
    """Put one drawing of a figure into the page; matplotlib has escaped its texts."""
    from markupsafe import Markup

    width = "narrow" if narrow else "wide"
    svg = prefix_ids(figure.svg("both", narrow=narrow), f"{prefix}{width[0]}")
    return Markup(svg.replace("<svg ", f'<svg class="{width}" ', 1))  # noqa: S704  matplotlib escapes texts


def _marker(name: str, roles: Mapping[str, Role] | None) -> Markup:
    """The marker of a method, in its colour, before its name."""
    from markupsafe import Markup

    if not roles:
        return Markup("")
    if name not in roles:
        return Markup('<span class="sign"></span>')
    look = style(roles[name])
    colour = "inherit" if roles[name] == "reference" else look.colour
    return Markup('<span class="sign" style="color:{}" aria-hidden="true">{}</span>').format(colour, look.sign)


def _facts(record: Record) -> dict[str, str]:
    """Command, commit, seeds, versions and machine of a record, in words."""
    known = record.environment
    seeds = record.seed if isinstance(record.seed, list) else [record.seed]
    versions = [f"Python {known['python']}"] if "python" in known else []
    versions += [f"{name} {known[name]}" for name in _PACKAGES if name in known]
    return {
        "command": str(known.get("command") or ""),
        "commit": str(known.get("commit") or "not from a checkout"),
        "seed" if len(seeds) == 1 else "seeds": ", ".join(map(str, seeds)),
        "versions": ", ".join(versions),
        "machine": _machine(known),
        "written": str(known.get("time") or ""),
    }


def _machine(known: Mapping[str, Any]) -> str:
    parts = [
        known.get("cpu"),
        f"{known['cores']} cores" if known.get("cores") else None,
        f"{known['threads']} threads" if known.get("threads") else None,
        f"{format_number(known['memory'], 'B')} of memory" if known.get("memory") else None,
        known.get("cuda") or "no CUDA device",
        known.get("platform"),
    ]
    return ", ".join(str(part).replace("1 cores", "1 core").replace("1 threads", "1 thread") for part in parts if part)


def _flat(entries: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str]]:
    for key, value in entries.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", _as_text(value)


def _as_text(value: Any) -> str:
    """A setting as it was given, not rounded: readers type it again."""
    if isinstance(value, bool) or value is None:
        return format_number(value)
    if isinstance(value, list):
        return ", ".join(map(_as_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_as_text(entry)}" for key, entry in value.items())
    return str(value)

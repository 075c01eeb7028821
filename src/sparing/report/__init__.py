"""One record of a run, and all that is shown of it: terminal table, progress bar, plots and an HTML page.

Rows with units go into a ``Record``; the table on the terminal, the figures and the page are made of the same rows, so
they name and round alike. Nothing here loads matplotlib, jinja2 or rich before something is drawn.

Example:
    >>> record = Record(question="Which method holds less?", settings={}, seed=0, units={"peak": "B"})
    >>> record.add("methods", method="lisa", peak=2.4e9)
    >>> print_table(record.table("methods"), units=record.units)
    method   peak
              GiB
    ─────────────
    lisa     2.24
"""

from sparing.report import plots
from sparing.report.cells import format_number
from sparing.report.environment import environment
from sparing.report.figure import Figure
from sparing.report.page import Page, Sample, Section, Table
from sparing.report.progress import Progress
from sparing.report.record import Record
from sparing.report.terminal import print_table

__all__ = [
    "Figure",
    "Page",
    "Progress",
    "Record",
    "Sample",
    "Section",
    "Table",
    "environment",
    "format_number",
    "plots",
    "print_table",
]

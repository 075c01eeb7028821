"""The plots of our pages, as plain functions from data to a ``Figure``; nothing global, drawn when a page is written.

Example:
    >>> figure = lines([Series("full", [0, 1], [3.2, 2.1], "reference")], title="Loss falls", x="step", y=Axis("loss"))
    >>> figure.alt
    'Line plot of loss over step. full goes from 3.20 to 2.10.'
"""

from sparing.report.bars import Bar, Stack, bars, stacked_bars
from sparing.report.curves import lines, scatter
from sparing.report.maps import heatmap
from sparing.report.mosaic import images
from sparing.report.palette import Role, Style, style
from sparing.report.series import Axis, Series, series

__all__ = [
    "Axis",
    "Bar",
    "Role",
    "Series",
    "Stack",
    "Style",
    "bars",
    "heatmap",
    "images",
    "lines",
    "scatter",
    "series",
    "stacked_bars",
    "style",
]

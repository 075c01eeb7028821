"""What the page of a run over several ranks says about them."""

from __future__ import annotations

from sparing.report import Record, Section, Table

TABLES = {"sharding": "Plan", "traffic": "Sent by rank 0"}
"""Tables of such a run and their titles."""


def ranks_section(record: Record) -> Section:
    """Plan, ranks and traffic.

    Args:
        record: Of a run under a plan.

    Returns:
        The chapter.
    """
    text = (
        "The three letters of a plan say how ranks hold parameters, gradients and optimizer state: **N** whole on "
        "every rank, **I** cut inside a group, **G** cut over all. Bytes are counted in the rings, with evaluation; "
        "a run that was resumed has a row for each part."
    )
    tables = [Table(record.table(name), title, units=record.units) for name, title in TABLES.items()]
    return Section("Ranks", text, tables=[table for table in tables if table.rows])

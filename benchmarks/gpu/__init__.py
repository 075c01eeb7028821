"""Benchmarks that need a CUDA device: parts, which ``python -m benchmarks.gpu`` (``make gpu``) finds and runs in turn.

A file of this folder is a part if it has a constant ``RESULT``, the path of its rows. What all parts keep to:

    python -m benchmarks.gpu.NAME    measures what is left, for eight minutes at most, then says how many cells
                                     are left, or ``nothing is left``; the next call goes on
    ... --minutes 5                  for so long; at least one cell, whatever the minutes; 0: one of each sort
    ... --out FILE                   rows go there, after every cell; a cell that fails is a row with ``why``
    ... --try                        tiny shapes, which a CPU runs too

The first line of a part's docstring is its question. ``ORDER`` says which tell most. ``branches`` lists what only a
CUDA device runs in the library, and which part runs it.
"""

ORDER = ("layers", "agreement", "tests", "sharding", "hypergrad", "federated", "scaling")
"""Parts and the CUDA tests, the most telling first; others follow by name."""

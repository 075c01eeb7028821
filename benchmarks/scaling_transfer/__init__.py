"""Does SμPar transfer where it counts? A Llama that has passed its bigram, tuned on a dense base of half its width.

``study`` trains, ``tables`` makes the tables, verdicts and the picture of ``docs/results/scaling.md``.
"""

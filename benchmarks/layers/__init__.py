"""What layer sampling is worth: LISA, its successors and its rivals on one model, at equal steps and at equal bytes.

In order, each going on where it stopped, the studies with one process per core:

    python -m benchmarks.layers.base         # the model of ladder 1: 13.7 M parameters, 5.1 M tokens; 1.6 CPU hours
    python -m benchmarks.layers.study        # twenty-one arms on Bryant's stories; 6.5 CPU hours
    python -m benchmarks.layers.study --corpus burgess-busterbrown      # as long
    python -m benchmarks.layers.ablations    # 6 CPU hours, on rows that the study has in part
    python -m benchmarks.layers.study --ladder 2                        # about 9 CPU hours
    python -m benchmarks.layers.tables       # decision, tables

CPU seconds of a run of 100 steps on one core of a Xeon with AVX-512, development rows included, from 12 steps of every
arm: full 71, LoRA of rank 8 86, of rank 64 88, DoRA 103, GaLore 84, APOLLO 68, LISA 50 (fixed 58, three blocks 57, ten
64), embedding frozen 45, by outliers 52, BAdam 37, GRASS 53, MISA 41 and 55, embedding and head 52; bfloat16 takes
about 1.6 times as long. A judged run takes 9 seconds more, for test rows and for those on which forgetting is measured.
The hours count twelve runs of each arm's sweep (six rates, two seeds) and eight judged ones, about 23,500 seconds.
"""

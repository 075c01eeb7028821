"""``python -m benchmarks.data_selection [--seeds N] [--only CASE]``: measure, row by row, what is not measured yet."""

from benchmarks.data_selection.study import main

if __name__ == "__main__":
    main()

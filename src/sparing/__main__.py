"""``python -m sparing`` is the command ``sparing``."""

import sys

from sparing.cli import main

sys.exit(main())

"""A model or a measure that the user's own code makes: ``module:function``."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from sparing.errors import UserError, require

ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def call_entry(spec: str, setting: str) -> Any:
    """Import ``module:function``, with the working directory first, and call it without arguments."""
    require(ENTRY.fullmatch(spec) is not None, setting, spec, "it is module:function", "pass such as my_nets:make")
    module, name = spec.split(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)()
    except Exception as error:  # the user's code may raise anything; one line says what and where
        why = f"it raised {type(error).__name__} ({(str(error).splitlines() or [''])[0][:120]})"
        do = f'try: python -c "import {module}; {module}.{name}()"'
        raise UserError(setting, got=spec, why=why, do=do) from error
    finally:
        sys.path.remove(str(Path.cwd()))

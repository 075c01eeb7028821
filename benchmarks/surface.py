"""What users hold on to: flags of every verb, tables of its records, public names. Written, and compared.

    python -m benchmarks.surface > after.json
    python -m benchmarks.surface benchmarks/surface-before.json after.json

``surface-before.json`` is of the last commit in which verbs had words of their own. The second ends with status 1 if
anything was lost: gone, and not in the table of renamed flags. Tables and columns are read from the code; of a row
that is spread from a mapping, ``**``, the columns are not known.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import sparing
from sparing.cli import VERBS

SOURCE = Path(sparing.__file__).parent
MISSING = dataclasses.MISSING
DROPPED = {"demo table run: all columns"}  # it held the path of the page, which the last line on the terminal has


def flags(settings: type, prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Flags as typed, with type and default; groups by their dotted names, what has no flag by its place."""
    hints, marks = get_type_hints(settings), get_type_hints(settings, include_extras=True)
    arguments = 0
    for field in dataclasses.fields(settings):
        name, hint = prefix + field.name.replace("_", "-"), hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from flags(hint, f"{name}.")
            continue
        if "Positional" in str(marks[field.name]):
            arguments += 1
            name = f"argument {arguments}"
        default = field.default if field.default_factory is MISSING else field.default_factory()
        written = re.sub(r"\b(?:typing|pathlib)\.|<class '([\w.]+)'>", r"\1", str(hint))
        written = re.sub(r"Optional\[(.*)\]", r"\1 | None", written).removeprefix("pathlib.")
        yield name, {"type": written, "default": "required" if default is MISSING else str(default)}


def tables(paths: list[Path]) -> dict[str, list[str]]:
    """Columns by table, as ``record.add("table", column=…)`` or the demo's ``begin_on(run, "table", …)`` name them."""
    found: dict[str, set[str]] = {}
    trees = [ast.parse(path.read_text()) for path in paths]
    for tree in trees:
        nodes = list(ast.walk(tree))
        if any(isinstance(node, ast.Call) and ast.unparse(node).startswith("record.add(table, ") for node in nodes):
            # tables written in one loop over a mapping: its keys may be tables, of which the columns are not known
            keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
            found |= {str(key.value): {"**"} for key in keys if isinstance(key, ast.Constant)}
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Call(func=ast.Attribute(attr="add"), args=[ast.Constant(value=str(table))], keywords=columns):
                found.setdefault(table, set()).update(column.arg or "**" for column in columns)
            case ast.Call(func=ast.Name(id="begin_on"), args=[_, ast.Constant(value=str(table)), _], keywords=columns):
                found.setdefault(table, {"name"}).update(column.arg or "**" for column in columns)
    return {table: sorted(found[table]) for table in sorted(found)}


def surface() -> dict[str, Any]:
    """Flags and tables by verb, and what ``docs/api`` shows."""
    verbs = {name: importlib.import_module(verb.module).Settings for name, verb in VERBS.items()}
    homes = {name: SOURCE / "jobs" / name for name in VERBS}
    beside = [*(SOURCE / "jobs").glob("*.py"), *(SOURCE / "jobs" / "lm").glob("*.py")]  # what several verbs call
    written = {name: [*home.rglob("*.py"), *beside] for name, home in homes.items()}
    pages = "\n".join(page.read_text() for page in (SOURCE.parents[1] / "docs" / "api").glob("*.md"))
    return {
        "flags": {name: dict(flags(settings)) for name, settings in verbs.items()},
        "tables": {name: tables(paths) for name, paths in written.items()},
        "public": sorted(set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[str]]:
    """What was lost, renamed, changed and added, a line each."""
    from sparing.jobs.renamed import FLAGS

    lines: dict[str, list[str]] = {"lost": [], "renamed": [], "changed": [], "added": []}
    for verb, old in before["flags"].items():
        new, reached = after["flags"].get(verb, {}), set()
        for name, was in old.items():
            told = "" if name in new and name not in FLAGS.get(verb, {}) else FLAGS.get(verb, {}).get(name, "")
            names = re.findall(r"--([\w.-]+)", told) or (["argument 1"] if told else [name])
            reached |= set(names)
            gone = [one for one in names if one not in new]
            if gone:
                lines["lost"].append(f"{verb} --{name}")
                continue
            if told:
                lines["renamed"].append(f"{verb} --{name}: {told}")
            for one in names:
                changed = [what for what in ("type", "default") if was[what] != new[one][what]]
                lines["changed"] += [f"{verb} --{one} {w}: {was[w]} -> {new[one][w]}" for w in changed]
        lines["added"] += [f"{verb} --{name}" for name in new if name not in reached]
    for verb, old in before["tables"].items():
        new = after["tables"].get(verb, {})
        for table, columns in old.items():
            known = set(new.get(table, []))
            gone = sorted(set(columns) - known - {"**"}) if table in new else ["all columns"]
            gone = [] if "**" in known else gone
            if gone:
                lines["lost"].append(f"{verb} table {table}: {', '.join(gone)}")
        lines["added"] += [
            f"{verb} table {table}" for table, known in new.items() if table not in old and known != ["**"]
        ]
    lines["lost"] = [line for line in lines["lost"] if line not in DROPPED]
    # by package and name: users import from the package, whatever file a name lies in
    old_names, new_names = ({(n.split(".")[1], n.split(".")[-1]) for n in of["public"]} for of in (before, after))
    lines["lost"] += [f"public {package}.{name}" for package, name in sorted(old_names - new_names)]
    lines["added"] += [f"public {package}.{name}" for package, name in sorted(new_names - old_names)]
    return lines


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.stdout.write(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
    else:
        found = compare(*(json.loads(Path(path).read_text()) for path in sys.argv[1:3]))
        for kind, entries in found.items():
            sys.stdout.write(f"{kind}: {len(entries)}\n" + "".join(f"  {entry}\n" for entry in entries))
        sys.exit(bool(found["lost"]))

"""What a wheel says of itself: links that lead somewhere from anywhere, and no torch that would replace another."""

from __future__ import annotations

import email
import re
import sys
import zipfile
from pathlib import Path


def main(wheel: Path) -> int:
    """Refuse a wheel whose description has relative links, or that pins torch; returns an exit status."""
    with zipfile.ZipFile(wheel) as held:
        (place,) = (name for name in held.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(held.read(place))
        names = held.namelist()
    links = re.findall(r"\]\(([^)\s]+)\)", said.get_payload())
    faults = [f"relative link {link}" for link in links if not link.startswith(("https://", "#"))]
    faults += [] if links else ["no description"]
    needs = said.get_all("Requires-Dist") or []
    torch = [one for one in needs if re.match(r"torch\b(?!-)", one)]
    faults += [] if len(torch) == 1 and re.fullmatch(r"torch>=[\d.]+", torch[0]) else [f"torch: {torch}"]
    faults += [
        f"{name} is in it" for name in ("tests/", "benchmarks/", "docs/") if any(n.startswith(name) for n in names)
    ]
    faults += [] if any(name.endswith("sparing/py.typed") for name in names) else ["no py.typed"]
    faults += [] if said.get_all("Project-URL") else ["no address"]
    sys.stdout.write(
        ("\n".join(faults) or f"described: {len(links)} links, {len(needs)} requirements, {torch[0]}") + "\n"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

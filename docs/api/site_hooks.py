"""What `make docs` adds to mkdocs: folders in the navigation, and a page for every source file that a page links to.

On a code host a link such as ``../src/sparing/seeds.py`` opens the file. The site has no such file, so it gets a page
with its text, and a link whose words are a dotted name or ``path::test`` leads to the line of that definition.
"""

from __future__ import annotations

import ast
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")
PICTURE = re.compile(r'<picture>\s*<source[^>]* srcset="([^"]+)">\s*<img src="([^"]+)" alt="([^"]*)">\s*</picture>')
SINGLE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+)\)$", re.MULTILINE)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CELL = re.compile(r"<t[dh][^>]*>(.*?)</t[dh]>", re.DOTALL)
CODE = re.compile(r"(<(?:code|pre|script)\b.*?</(?:code|pre|script)>)", re.DOTALL)
PERCENT = re.compile(r"(?<=\d) %")
WORDS = re.compile(r">[^<]+<")
FLAG = re.compile(r"(?<![\w-])--\w[\w.-]*")
SENTENCE = 60  # characters of a cell that is read as a sentence rather than as a number
README = "readme.md"
LANGUAGES = {".py": "python", ".md": "markdown", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def on_config(config: Any) -> Any:
    """Replace folders in the navigation by their pages."""
    config.nav = [{title: expanded(entry)} for item in config.nav for title, entry in item.items()]
    return config


def expanded(entry: Any) -> Any:
    """The pages of an entry: of a folder all but its index, which the navigation names."""
    if isinstance(entry, list):
        return [page for one in entry for page in (expanded(one) if str(one).endswith("/") else [one])]
    if not entry.endswith("/"):
        return entry
    return [entry + name for name in sorted(page.name for page in (DOCS / entry).glob("*.md")) if name != "index.md"]


def outside(page: str, target: str) -> Path | None:
    """The file that a link of a page means, if the repository has it outside ``docs``."""
    path = Path(posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target)))
    inside = path.parts[:1] == ("docs",)
    return None if inside or not (ROOT / path).is_file() else path


def source_page(path: Path) -> str:
    """Where the page of a source file is."""
    return f"source/{path.as_posix()}.md"


def readme() -> str:
    """The README as a page of the site: its links begin at ``docs`` instead of one above."""
    text = re.sub(r"(\]\(|(?:src|srcset|href)=\")docs/", r"\1", (ROOT / "README.md").read_text())
    text = re.sub(r"\]\((\w+)\)", lambda found: f"]({_first(found[1] + '/')})", text)
    return re.sub(r"\]\((?=[^)#]+)(?!https?:)([^)#]+)", lambda found: f"]({_moved(found[1])}", text)


def _first(folder: str) -> str:
    """The page that stands for a folder: its index, or its first."""
    return f"{folder}index.md" if (DOCS / folder / "index.md").exists() else expanded(folder)[0]


def _moved(target: str) -> str:
    return target if (DOCS / target).exists() or not (ROOT / target).is_file() else f"../{target}"


def on_files(files: Files, config: Any) -> Files:
    """Add the README, and a page for every source file that some page links to."""
    files.append(File.generated(config, README, content=readme()))
    linked = set()
    for file in list(files.documentation_pages()):
        for _, target in LINK.findall(file.content_string):
            linked.add(outside(file.src_uri, target))
    for path in sorted(linked - {None, Path("README.md")}):
        kind = LANGUAGES.get(path.suffix, "text")
        text = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n`````{kind}\n{(ROOT / path).read_text()}\n`````\n"
        files.append(File.generated(config, source_page(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to source files into links to their pages; what the repository lacks stays for the strict check."""
    here = page.file.src_uri

    def turned(match: re.Match[str]) -> str:
        path = outside(here, match[2])
        if path == Path("README.md"):
            return f"[{match[1]}]({posixpath.relpath(README, posixpath.dirname(here) or '.')})"
        if path is None or here.startswith("source/"):
            return match[0]
        link = posixpath.relpath(source_page(path), posixpath.dirname(here) or ".")
        line = lines(path).get(re.split(r"::|\.", match[1].strip("`"))[-1])
        return f"[{match[1]}]({link}{f'#__codelineno-0-{line}' if line else ''})"

    # an interval and a link behind it are no reference: "[−4, 7] [here](page.md)"
    markdown = re.sub(r"\] (?=\[[^\]\n]+\]\()", "]&#32;", LINK.sub(turned, markdown))
    return markdown if here.startswith("source/") else pictures(markdown)


def pictures(markdown: str) -> str:
    """Every picture in a box that can scroll; of a pair, the one that fits the colours chosen on the site is shown.

    On a code host ``<picture>`` asks the system, which is all it can know; here the reader can choose otherwise.
    """
    pair = r'<div class="picture"><img src="\2#only-light" alt="\3"><img src="\1#only-dark" alt="\3"></div>'
    markdown = PICTURE.sub(pair, markdown)
    return SINGLE.sub(r'<div class="picture" markdown="span">![\1](\2)</div>', markdown)


def on_post_build(config: Any) -> None:
    """The search index as a script too: a page that is opened from the disk may not read the JSON."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Say of tables of sentences how many columns they have, and where names, flags and numbers may not break."""
    parts = CODE.split(TABLE.sub(lambda found: table(found[0]), html))
    return "".join(
        whole_flags(part) if CODE.match(part) else PERCENT.sub("\N{NO-BREAK SPACE}%", part) for part in parts
    )


def whole_flags(code: str) -> str:
    """Code whose ``--flags`` stay on one line."""
    return WORDS.sub(lambda words: FLAG.sub(r'<span class="flag">\g<0></span>', words[0]), code)


def table(html: str) -> str:
    """A table whose long names may break after a dot, a slash or an underscore."""
    cells = CELL.findall(html)
    columns = len(CELL.findall(html.partition("</tr>")[0]))
    if columns > 2 and any(len(re.sub(r"<[^>]+>", "", cell)) > SENTENCE for cell in cells):
        html = html.replace("<table>", f'<table data-columns="{min(columns, 5)}">', 1)
    return re.sub(
        r"(?<=<code>)[^<]{12,}(?=</code>)", lambda code: re.sub(r"(?<=\w)(::|[./_=])(?=\w)", r"\1<wbr>", code[0]), html
    )


@cache
def lines(path: Path) -> dict[str, int]:
    """Line of every function and class of a Python file."""
    if path.suffix != ".py":
        return {}
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name: node.lineno for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}

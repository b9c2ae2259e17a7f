"""Writes the tree of docs/architecture.md: every module with the first sentence of its docstring.

python -m docs.tree
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from config.text_table import text_table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = (
    "config",
    "rate_limit",
    "cpu_engine",
    "samplers",
    "tool_server",
    "agent_loop",
    "cluster",
    "verl_mixed",
)
"""In the order of the layers, the lowest first."""

BEGIN, END = "<!-- from docs/tree.py -->\n", "<!-- to here -->\n"


def first_sentence(module: Path) -> str:
    """What a module says that it is, in one line without the full stop."""
    words = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(words.split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)(?<!\bet al\.)\s", paragraph, maxsplit=1)[0].removesuffix(".")


def folder_lines(folder: Path) -> Iterator[str]:
    """A heading and a block for a folder with modules; then the folders below it."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    said = first_sentence(folder / "__init__.py")
    yield f"**`{folder.relative_to(ROOT).as_posix()}/`**{': ' if said else ''}{said}"
    yield from ["", "```"]
    yield from text_table([[path.name, first_sentence(path)] for path in modules])
    yield from ["```", ""]
    for below in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from folder_lines(below)


def tree() -> str:
    """The tree of all packages, as Markdown."""
    return "\n".join(line for name in PACKAGES for line in folder_lines(ROOT / name))


def with_tree(page: str) -> str:
    """The page with the tree as it is now.

    Raises:
        ValueError: the page has not the two marks.
    """
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"cannot write the tree into {PAGE}: want the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{tree()}\n{END}{after}"


if __name__ == "__main__":
    now = with_tree(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(now, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(now.splitlines())} lines", file=sys.stderr)

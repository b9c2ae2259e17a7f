"""Compares what a driver makes with a recorded file: `--write` records it, `--check` shows a diff.

A recording is a list of blocks with a name each. Text that another run or machine would print
otherwise (folders, ports, times) is replaced by a word before it is recorded.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent

_HEAD = "=== "


def joined(blocks: Mapping[str, str], note: str) -> str:
    """The text of a recording: the note as comment lines, then each block below its name."""
    parts = ["".join(f"# {line}\n" for line in note.splitlines())]
    for name, body in blocks.items():
        lines = body.replace("\r", "\\r").rstrip("\n").split("\n")
        if any(line.startswith(_HEAD) for line in lines):
            raise ValueError(f"cannot record block={name!r}: a line of it begins with {_HEAD!r}")
        parts.append("\n".join([f"{_HEAD}{name}", *lines]) + "\n")
    return "\n".join(parts)


def split(text: str) -> dict[str, str]:
    """The blocks of a recording, the inverse of `joined`."""
    found: dict[str, str] = {}
    for part in re.split(rf"^{_HEAD}", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        found[name] = body.rstrip("\n")
    return found


def normalised(text: str, words: Iterable[tuple[str | Path, str]]) -> str:
    """The text with other words for some folders and names; the longest are replaced first."""
    for given, word in sorted(((str(given), word) for given, word in words), key=_longest_first):
        text = text.replace(given, word)
    return text


def _longest_first(pair: tuple[str, str]) -> int:
    return -len(pair[0])


def differences(name: str, recorded: str, now: str) -> str:
    """A unified diff from the recording to what is made now; empty if they are the same."""
    lines = difflib.unified_diff(
        recorded.split("\n"), now.split("\n"), f"recorded/{name}", f"now/{name}", lineterm="", n=2
    )
    return "\n".join(lines)


def recorded_blocks(name: str) -> dict[str, str]:
    """The blocks of a recorded file."""
    return split((RECORDED / name).read_text(encoding="utf-8"))


def changed(name: str, recorded: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A diff of some blocks with the recorded ones; blocks that `now` lacks are not compared."""
    both = [
        "\n".join(f"{_HEAD}{block}\n{blocks.get(block, '').rstrip()}" for block in now)
        for blocks in (recorded, now)
    ]
    return differences(name, *both)


def main(
    make: Callable[[], Mapping[str, str]], doc: str | None, argv: Sequence[str] | None = None
) -> int:
    """Write or check the files that `make` gives as file name -> text; 1 if a file differs."""
    parser = argparse.ArgumentParser(description=doc)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="record what is made now")
    choice.add_argument("--check", action="store_true", help="show what differs from the recording")
    arguments = parser.parse_args(argv)
    code = 0
    for name, text in make().items():
        path = RECORDED / name
        if arguments.write:
            path.write_text(text, encoding="utf-8")
            print(f"{path}: {len(text):,} characters")
            continue
        recorded = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found := differences(name, recorded, text):
            code = 1
            print(found)
    if code:
        print("\nrun it with --write if this is what is wanted", file=sys.stderr)
    return code

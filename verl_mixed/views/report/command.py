"""`verl-mixed report`: words of the command line, and what they do."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from verl_mixed.exit_codes import GOOD, NOT_GOOD
from verl_mixed.run.state import RunFolder
from verl_mixed.run.text import printable
from verl_mixed.views.report.files import write_csv, write_page, write_png
from verl_mixed.views.report.runs import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words of `verl-mixed report`."""
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN", help="runs/<experiment>, going on or over"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default RUN/report.html; of several runs comparison.html in the first)",
    )
    parser.add_argument(
        "--png", action="store_true", help="also all charts as an image, beside the page"
    )
    parser.add_argument(
        "--csv",
        action="store_true",
        help="also a table, beside the page: a row a step, a column a metric",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files and print their names.

    Returns:
        Exit code; 1 where a file cannot be read or written.

    Raises:
        ValueError: a folder is none of a run, the page would be lost to the table or the image, or
            the image cannot be drawn.
    """
    if args.output is not None and args.output.suffix.lower() in (".csv", ".png"):
        raise ValueError(
            f"cannot write the page to --output {printable(str(args.output))}: it is HTML; name it "
            "*.html, --csv and --png write their files beside it"
        )
    try:
        _write(args)
    except OSError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return NOT_GOOD
    return GOOD


def _write(args: argparse.Namespace) -> None:
    folders = [RunFolder(path) for path in args.run_dirs]
    names = Counter(folder.path.resolve().name for folder in folders)
    runs = [
        load_run(folder, str(folder.path) if names[folder.path.resolve().name] > 1 else None)
        for folder in folders
    ]
    page = args.output or folders[0].path / ("report.html" if len(runs) == 1 else "comparison.html")
    write_page(runs, page)
    print(page)
    if args.csv:
        write_csv(runs, page.with_suffix(".csv"))
        print(page.with_suffix(".csv"))
    if args.png:
        write_png(runs, page.with_suffix(".png"))
        print(page.with_suffix(".png"))

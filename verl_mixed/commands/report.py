"""`verl-mixed report`: the results of one or several runs, as a page, an image, a table."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from verl_mixed.commands.arguments import Help, add_flag, add_option
from verl_mixed.exit_codes import GOOD
from verl_mixed.run.state import RunFolder
from verl_mixed.views.report.files import write_csv, write_page, write_png
from verl_mixed.views.report.runs import load_run

HELP = Help(
    """\
Writes one HTML page that needs no network: which source improved and by how much, planned and
trained prompts, lengths, tools, the limiter, and how the time of a step was spent. Every run writes
this page when it ends. The command also works while a run is going on. Several runs are compared on
one page.""",
    """\
verl-mixed report runs/mixed_demo
verl-mixed report runs/mixed_demo --png --csv
verl-mixed report runs/mixed_demo runs/more_code --output comparison.html""",
    "0 it is written, 1 a file cannot be read or written, 2 no such run or usage error",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN", help="runs/<experiment>; may still run"
    )
    page = "the page (default RUN/report.html; for several runs comparison.html in the first)"
    add_option(parser, "--output", "FILE", page, Path)
    add_flag(parser, "--png", "also write all charts as an image beside the page")
    table = "also write a table beside the page: a row per step, a column per metric"
    add_flag(parser, "--csv", table)


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their names.

    Raises:
        ValueError: a folder is not a run's folder, --output names the table or the image, or the
            image cannot be drawn.
    """
    output: Path | None = arguments.output
    if output is not None and output.suffix.lower() in (".csv", ".png"):
        raise ValueError(
            f"cannot write the page to --output {output}: it is HTML; name it *.html, --csv and "
            "--png write their files beside it"
        )
    _write(arguments.run_dirs, output, with_csv=arguments.csv, with_png=arguments.png)
    return GOOD


def _write(
    run_dirs: Sequence[Path], output: Path | None, *, with_csv: bool, with_png: bool
) -> None:
    folders = [RunFolder(path) for path in run_dirs]
    names = Counter(folder.path.resolve().name for folder in folders)
    runs = [
        load_run(folder, str(folder.path) if names[folder.path.resolve().name] > 1 else None)
        for folder in folders
    ]
    page = output or folders[0].path / ("report.html" if len(runs) == 1 else "comparison.html")
    write_page(runs, page)
    print(page)
    if with_csv:
        write_csv(runs, page.with_suffix(".csv"))
        print(page.with_suffix(".csv"))
    if with_png:
        write_png(runs, page.with_suffix(".png"))
        print(page.with_suffix(".png"))

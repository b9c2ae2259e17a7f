"""What a run prints when it ends: rewards and changes, cost of a step, audit, files."""

import shlex
from collections.abc import Callable, Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_mixed.exit_codes import GOOD, NOT_GOOD
from verl_mixed.launch.plan import Plan
from verl_mixed.run.audit import audit_run, describe
from verl_mixed.run.evaluations import validations_of
from verl_mixed.run.state import RunFolder
from verl_mixed.run.text import printable
from verl_mixed.views.estimates import NO_RECORDS, Validated, comparison_words, improvements
from verl_mixed.views.pace import pace_words
from verl_mixed.views.progress import Line, series, server_waits
from verl_mixed.views.report.files import write_report
from verl_mixed.views.summary import PHASE_WORDS, phase_means, reward_rows, trained


def summarise(plan: Plan, console: Console, say: Callable[[str], None]) -> int:
    """Mark a run as complete, print its results and audit it.

    Returns the exit code: 1 if the audit fails.
    """
    folder = plan.folder
    folder.mark_done()
    for line in reward_lines(folder.lines()):
        say(f"reward       {line}")
    table = changes_table(folder.lines(), validations_of(folder.path, folder.lines()))
    if table.row_count:
        console.print(table)
    if cost := cost_line(folder.lines()):
        say(f"cost         {cost}")
    if pace := pace_words(folder.lines()):
        say(f"pace         {pace}")
    for waited in server_waits(folder.lines()):
        say(f"tools        {printable(waited)}")
    try:
        report = audit_run(folder, plan.config)
    except ValueError as error:
        say(f"audit not possible: {error}")
        return NOT_GOOD
    for line in describe(report):
        say(line)
    return GOOD if report.ok else NOT_GOOD


def reward_lines(lines: Sequence[Line]) -> list[str]:
    """Mean, min, max and standard deviation of the rewards of each source in the last steps."""
    return [
        f"{printable(row.source)}: mean {row.mean:.2f}, min {_two_digits(row.least)}, max "
        f"{_two_digits(row.most)}, std {row.std:.2f} in the last {row.steps} steps"
        for row in reward_rows(lines)
    ]


def _two_digits(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def cost_line(lines: Sequence[Line]) -> str | None:
    """Mean seconds of a step, its longest phases, most memory in use; None before a step."""
    steps = trained(lines)
    seconds = [value for _, value in series(steps, "timing_s/step")]
    if not seconds:
        return None
    longest = list(phase_means(steps).items())[:4]
    phases = ", ".join(f"{PHASE_WORDS.get(phase, phase)} {mean:.1f}" for phase, mean in longest)
    used = [value for _, value in series(steps, "actor/perf/cpu_memory_used_gb")]
    memory = f"; at most {max(used):.1f} GB of this machine's memory in use" if used else ""
    return f"{fmean(seconds):.1f} s a step ({phases}){memory}"


def changes_table(lines: Sequence[Line], validated: Validated = NO_RECORDS) -> Table:
    """First and last validation of every source, empty before two validations.

    The mean over the sources is added if all have the same measure at the same steps.
    """
    table = Table("source", "validation first", "last", "change", caption_justify="left")
    compared = improvements(lines, validated)
    changes = [one for one in compared if one.measure != "training reward"]
    table.caption = comparison_words(compared)
    for one in changes:
        solved = " solved" if one.measure == "validation pass rate" else ""
        table.add_row(
            Text(printable(one.source)),
            f"{one.first.mean:.2f}",
            f"{one.last.mean:.2f}",
            Text(f"{one.change_words}{solved}: {one.verdict}"),
        )
    kinds = {(one.measure, one.first.steps, one.last.steps) for one in changes}
    if len(changes) > 1 and len(kinds) == 1:
        first = fmean(one.first.mean for one in changes)
        last = fmean(one.last.mean for one in changes)
        table.add_row("mean", f"{first:.2f}", f"{last:.2f}", f"{last - first:+.2f}")
    return table


def report_and_list_files(folder: RunFolder, say: Callable[[str], None]) -> None:
    """Write the report, also of a run that failed or was stopped, and print where files are."""
    try:
        write_report(folder)
    except (OSError, ValueError) as error:
        say(f"report not written: {error}")
    else:
        say(f"report       {folder.report}")
    if folder.tensorboard.is_dir():  # trainer.logger may name another, or it never logged
        say(f"curves       tensorboard --logdir {shlex.quote(str(folder.tensorboard))}")
    if (trajectories := folder.path / "trajectories").is_dir():
        say(f"trajectories {trajectories}")

"""The results of evaluations as tables, JSON and CSV, and which rows changed. Pure, but for files.

`agent_loop.evaluation` computes the numbers.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from agent_loop.records.evaluation_records import Record
from agent_loop.records.paired import Difference, difference, paired_means
from agent_loop.records.statistics import LEVEL, SourceResult, results_of
from verl_mixed.run.evaluations import Evaluation
from verl_mixed.run.text import printable

Summary = Mapping[str, Any]
"""The content of a `summary.json`."""

MOST_ROWS = 20
"""Changed rows of a source that are printed."""


def summary_of(evaluation: Evaluation, ks: Sequence[int]) -> dict[str, Any]:
    """The results of an evaluation, as JSON."""
    results = results_of(evaluation.records, ks)
    sources = {source: _plain(result) for source, result in results.items()}
    return {"label": evaluation.label, "step": evaluation.step, "sources": sources}


def _plain(result: SourceResult) -> dict[str, Any]:
    plain = asdict(result)
    plain["pass_at"] = {str(k): asdict(one) for k, one in result.pass_at.items()}
    return plain


def ks_of(summaries: Sequence[Summary]) -> list[str]:
    """Every k of the pass@k of some summaries, ascending."""
    found = {k for one in summaries for own in one["sources"].values() for k in own["pass_at"]}
    return sorted(found, key=int)


def rows_of(summaries: Sequence[Summary]) -> Iterator[tuple[str, Summary, Mapping[str, Any]]]:
    """(source, summary, result of the source), the evaluations of a source beside each other."""
    for source in sorted({name for one in summaries for name in one["sources"]}):
        for one in summaries:
            if source in one["sources"]:
                yield source, one, one["sources"][source]


def head_of(summaries: Sequence[Summary]) -> list[str]:
    """The titles of a table of results."""
    passes = [f"pass@{k}" for k in ks_of(summaries)]
    return ["source", "weights", "prompts", "reward", *passes, "tokens", "calls", "turns", "lost"]


def cells_of(summaries: Sequence[Summary]) -> list[list[str]]:
    """The rows of a table of results: a row for each source and evaluation."""
    ks = ks_of(summaries)
    return [
        [
            source,
            str(one["label"]),
            _prompts(own),
            estimate_words(own["reward"]),
            *(_pass_words(own, k) for k in ks),
            f"{own['sampled_tokens']:.0f}",
            f"{own['tool_calls']:.1f}",
            f"{own['turns']:.1f}",
            str(own["lost"]),
        ]
        for source, one, own in rows_of(summaries)
    ]


def _prompts(own: Mapping[str, Any]) -> str:
    each = own["trajectories"] / max(1, own["prompts"])
    return f"{own['prompts']} x {each:g}" if each == int(each) else f"{own['prompts']} x {each:.1f}"


def _pass_words(own: Mapping[str, Any], k: str) -> str:
    """pass@k, with its number of prompts if some have too few judged samples."""
    found = own["pass_at"].get(k)
    words = estimate_words(found)
    if found is None or found["prompts"] == own["prompts"]:
        return words
    return f"{words} of {found['prompts']}"


def fewer_prompts_note(summaries: Sequence[Summary]) -> str:
    """What `of <prompts>` behind a pass@k means; empty if no pass@k has fewer prompts."""
    if any(
        found["prompts"] < own["prompts"]
        for _, _, own in rows_of(summaries)
        for found in own["pass_at"].values()
    ):
        return (
            "pass@k of N: over the N prompts that have k judged samples; do not compare it with "
            "one of other prompts"
        )
    return ""


def estimate_words(estimate: Mapping[str, Any] | None) -> str:
    """A mean and its interval, as `0.41 [0.32, 0.51]`."""
    if estimate is None:
        return "-"
    words = f"{estimate['mean']:.2f}"
    if estimate["interval"] is None:
        return words
    low, high = estimate["interval"]
    return f"{words} [{low:.2f}, {high:.2f}]"


def results_table(summaries: Sequence[Summary]) -> Table:
    """The table that the command prints."""
    table = Table(*head_of(summaries), box=SIMPLE, caption_justify="left")
    table.caption = "means, 95 % intervals over prompts; tokens, calls and turns of a trajectory"
    if note := fewer_prompts_note(summaries):
        table.caption += f"\n{note}"
    for row in cells_of(summaries):
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One source of two evaluations."""

    source: str
    first: str
    last: str
    """Labels."""

    difference: Difference
    left_out: int
    """Judged samples that are not compared, as in `PairedMeans`."""


def compared(evaluations: Sequence[Evaluation]) -> list[Compared]:
    """The first evaluation against each other one, for each source with a prompt in common.

    All differences are corrected for their number.
    """
    pairs = [
        (source, other, means)
        for other in evaluations[1:]
        for source, means in paired_means(evaluations[0].records, other.records).items()
    ]
    return [
        Compared(
            source=source,
            first=evaluations[0].label,
            last=other.label,
            difference=difference(means.first, means.last, len(pairs)),
            left_out=means.left_out,
        )
        for source, other, means in sorted(pairs, key=lambda pair: pair[0])
    ]


def difference_words(one: Difference) -> str:
    """`+0.20 [+0.06, +0.33]: improved`."""
    words = f"{one.change:+.2f}"
    if one.interval is not None:
        words += f" [{one.interval[0]:+.2f}, {one.interval[1]:+.2f}]"
    return f"{words}: {one.verdict}"


def comparison_note(count: int) -> str:
    """How the differences were compared."""
    if count == 1:
        return "paired by prompt; 1 comparison, its interval at 95 %"
    level = 100 * (1 - (1 - LEVEL) / count)
    return (
        f"paired by prompt; {count} comparisons, each interval at {level:.1f} % (Bonferroni), so "
        "together 95 %"
    )


def left_out_words(count: int) -> str:
    """Why judged samples are not compared."""
    are = "sample is" if count == 1 else "samples are"
    return (
        "of each prompt, the first samples that both sides have are compared: "
        f"{count} judged {are} left out"
    )


def differences_table(found: Sequence[Compared]) -> Table:
    """The paired differences, as the command prints them."""
    table = Table(
        *("source", "from", "to", "prompts", "first", "last", "change of the reward"),
        box=SIMPLE,
        caption_justify="left",
    )
    for each in found:
        one = each.difference
        table.add_row(
            *(Text(printable(word)) for word in (each.source, each.first, each.last)),
            f"{one.prompts} ({one.changed} changed)",
            f"{one.first:.2f}",
            f"{one.last:.2f}",
            Text(difference_words(one)),
        )
    table.caption = comparison_note(len(found))
    if left_out := sum(each.left_out for each in found):
        table.caption += f"\n{left_out_words(left_out)}"
    return table


def differences_json(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """The paired differences, as JSON."""
    return [asdict(each) | {"verdict": each.difference.verdict} for each in found]


def write_csv(summaries: Sequence[Summary], path: Path) -> None:
    """Write a row for each source and evaluation."""
    ks = ks_of(summaries)
    head = ["source", "label", "step", "prompts", "trajectories", "lost"]
    head += ["reward", "reward_low", "reward_high"]
    head += [f"pass@{k}{part}" for k in ks for part in ("", "_low", "_high", "_prompts")]
    means = ["sampled_tokens", "response_tokens", "turns", "tool_calls"]
    totals = ["total_sampled_tokens", "total_tool_calls"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*head, *means, *totals])
        for source, one, own in rows_of(summaries):
            row = [source, one["label"], one["step"]]
            row += [own[name] for name in ("prompts", "trajectories", "lost")]
            row += _numbers(own["reward"])
            for found in (own["pass_at"].get(k) for k in ks):
                row += [*_numbers(found), found["prompts"] if found else 0]
            writer.writerow([*row, *(own[name] for name in (*means, *totals))])


def _numbers(estimate: Mapping[str, Any] | None) -> list[Any]:
    if estimate is None:
        return ["", "", ""]
    return [estimate["mean"], *(estimate["interval"] or ("", ""))]


# --- rows that changed ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRow:
    """A row whose share of solved samples is another in the second evaluation."""

    source: str
    row_id: str
    question: str
    first: float
    last: float


def changed_rows(first: Sequence[Record], last: Sequence[Record]) -> list[ChangedRow]:
    """The rows that both have and that are solved more often, or less often, in the second.

    Of each row, the samples of `paired_means` count.
    """
    questions = {(each.source, each.row_id): each.question for each in (*first, *last)}
    pairs = paired_means(first, last, "solved")
    return [
        ChangedRow(
            source=source,
            row_id=row,
            question=questions[source, row],
            first=own.first[row],
            last=own.last[row],
        )
        for source, own in pairs.items()
        for row in own.first
        if own.first[row] != own.last[row]
    ]


def changed_lines(rows: Sequence[ChangedRow], most: int = MOST_ROWS) -> Iterator[str]:
    """The changed rows as text: first those that are solved less often."""
    for source in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == source]
        for words, chosen in (
            ("solved less often", [row for row in own if row.last < row.first]),
            ("solved more often", [row for row in own if row.last > row.first]),
        ):
            if not chosen:
                continue
            gap = fmean(abs(row.last - row.first) for row in chosen)
            count = f"{len(chosen)} row{'s' * (len(chosen) > 1)}"
            yield f"{source}: {count} {words}, by {gap:.2f} on average"
            for row in sorted(chosen, key=_largest_change_first)[:most]:
                yield f"  {_share(row.first)} -> {_share(row.last)}  {row.row_id}  {row.question}"
            if len(chosen) > most:
                yield f"  and {len(chosen) - most} more; --json lists all"


def _largest_change_first(row: ChangedRow) -> tuple[float, str]:
    return -abs(row.last - row.first), row.row_id


def _share(share: float) -> str:
    return "solved" if share == 1 else "unsolved" if share == 0 else f"{share:.2f}"

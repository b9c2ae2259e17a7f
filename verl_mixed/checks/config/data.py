"""Checks of a run's rows: files, sources, ids, agents, ground truths, leakage.

Rows are read in batches, so that files may be larger than the memory.
`verl_mixed.checks.config.prompts` checks the prompts.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent_loop.rewards.attempt import Reward
from agent_loop.rewards.registry import REWARDS, reward_for
from config.lookup import at, files_at
from config.schema import TOOL_CONFIG
from samplers.adaptive.profiles import choices_for, drawn_by_profile, profiles_for, row_ids_of
from samplers.rows.schema import FileRows, read_sources, row_id_problems
from samplers.rows.sources import seeds
from verl_mixed.checks.config.modes import truncation_problem
from verl_mixed.checks.finding import Finding, from_problem, warning
from verl_mixed.run.compose import unset_keys
from verl_mixed.run.sections import named_sources, sound_sources, where_agents_are

TOY_ROWS = 100
"""With fewer training rows, leakage is a warning: a first trial has a few questions."""

BATCH_ROWS = 256
"""Rows in memory at once; one row of TACO may have a megabyte of tests."""


def data_problems(config: Mapping[str, Any], agents: set[str] | None) -> Iterator[str]:
    """Faults of whole files: missing, damaged, of other sources, duplicate ids.

    `agents` are the names of agent loops; None if their file cannot be read.
    """
    for key in ("data.train_files", "data.val_files"):
        if key in unset_keys(config):
            continue  # already reported
        files = files_at(config, key)
        for file, count in Counter(map(os.path.abspath, files)).items():
            if count > 1:
                why = "its rows would count as often; name it once"
                yield f"{key}: {file} is named {count} times: {why}"
        found, unreadable = _readable(files)
        yield from (f"{key}: {problem}" for problem in unreadable)
        yield from _source_problems(config, key, found, all_are_read=not unreadable)
        yield from _row_agent_problems(config, found, agents)
        if key == "data.train_files":
            paths = [file.path for file in found]
            yield from (f"{key}: {problem}" for problem in row_id_problems(paths))
            yield from _own_file_problems(config, files, found)


def _readable(files: Sequence[str]) -> tuple[list[FileRows], list[str]]:
    """(content of the good files, faults of the others); each file is read once."""
    found: list[FileRows] = []
    problems: list[str] = []
    for some in [[file] for file in dict.fromkeys(map(os.path.abspath, files))] or [[]]:
        try:
            found += read_sources(some)
        except ValueError as error:
            problems += str(error).splitlines()
    return found, problems


def _source_problems(
    config: Mapping[str, Any], key: str, found: Sequence[FileRows], *, all_are_read: bool
) -> Iterator[str]:
    """Rows of unknown sources; sources without rows, if all files could be read."""
    for file in found:
        for source, count in file.rows_by_source.items():
            if source not in named_sources(config):
                yield (
                    f"no ratio for source={source!r} ({file.path}, {count} rows): every source of "
                    f"{key} needs one; add mixed.sources.{source}.ratio (0 leaves it out)"
                )
    there = {source for file in found for source in file.rows_by_source}
    paths = ", ".join(str(file.path) for file in found)
    for name, source in sound_sources(config).items():
        if all_are_read and source.takes_part and name not in there:
            yield (
                f"no rows of source={name!r} in {key} ({paths}): it has "
                f"mixed.sources.{name}.ratio={source.ratio}; add a file with its rows or set its "
                "ratio to 0"
            )


def _own_file_problems(
    config: Mapping[str, Any], files: Sequence[str], found: Sequence[FileRows]
) -> Iterator[str]:
    """Rows of other sources in a file that one source names as its own file."""
    rows_of = {str(file.path): file.rows_by_source for file in found}
    trained = set(map(os.path.abspath, files))
    for name, source in sound_sources(config).items():
        key = f"mixed.sources.{name}.files"
        for path in source.files if source.takes_part else []:
            if os.path.abspath(path) not in trained:
                yield (
                    f"{key}: {path} is not one of data.train_files, so nothing is drawn from it; "
                    "add it there"
                )
            others = [
                f"{count} rows of source={other!r}"
                for other, count in rows_of.get(os.path.abspath(path), {}).items()
                if other != name
            ]
            if others:
                yield (
                    f"{key}: {path} holds {', '.join(others)}: its files hold rows of "
                    f"data_source={name!r} only; move those rows, or name the file in "
                    "data.train_files (TRAIN_FILES) instead"
                )


def _row_agent_problems(
    config: Mapping[str, Any], found: Sequence[FileRows], agents: set[str] | None
) -> Iterator[str]:
    """Agents in rows of sources that name none: unknown ones, and what they do not support."""
    left_to_rows = {
        name
        for name, source in sound_sources(config).items()
        if source.takes_part and source.agent is None
    }
    if agents is None or not left_to_rows:
        return
    columns = ["data_source", "agent_name"]
    for path in (file.path for file in found):
        table = pq.read_table(path, columns=columns)
        counted = table.group_by(columns, use_threads=False).aggregate([([], "count_all")])
        for pair in counted.to_pylist():
            source, agent = pair["data_source"], pair["agent_name"]
            if source in left_to_rows and agent not in agents:
                yield (
                    f"{path}: {pair['count_all']} rows of source={source!r} have "
                    f"agent_name={agent!r}: no such agent, there are {', '.join(sorted(agents))}; "
                    f"{where_agents_are(config)}, or set mixed.sources.{source}.agent"
                )
            elif source in left_to_rows and (problem := truncation_problem(config, source, agent)):
                yield f"{path}: {problem}"


def row_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Faults of single rows: unusable cells, and validation rows that are also training rows.

    Files that cannot be read are left to `data_problems`.
    """
    train, validation = _sound_rows(config)
    rewards = _rewards_of(config)
    for path in dict.fromkeys([*train, *validation]):
        yield from _cell_problems(config, rewards, path)
    try:
        run_dir, afresh = str(at(config, "mixed.run_dir")), _begins_again(config)
        choices_for(sound_sources(config), train, run_dir, afresh=afresh)
    except ValueError as error:
        yield str(error)
    once = list(dict.fromkeys(map(os.path.abspath, validation)))
    yield from (f"data.val_files: {problem}" for problem in row_id_problems(once))
    if not _is_toy(train):
        yield from _leaked_rows(config, train, validation)


def row_warnings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Leakage in data that is so small that it can only be a trial."""
    if _is_toy(files_at(config, "data.train_files")):
        for words in _leaked_rows(config, *_sound_rows(config)):
            yield from_problem("data", words, warning)
    yield from _unprofiled(config)


def _begins_again(config: Mapping[str, Any]) -> bool:
    return at(config, "trainer.resume_mode") == "disable"


def _unprofiled(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Rows that are not drawn because they have no profile."""
    train, _ = _sound_rows(config)
    wanted = drawn_by_profile(sound_sources(config))
    if not wanted:
        return
    with suppress(ValueError):  # the check of rows reports it
        run_dir, afresh = str(at(config, "mixed.run_dir")), _begins_again(config)
        known = profiles_for(train, run_dir, afresh=afresh)
        for name, ids in row_ids_of(train).items():
            lacking = sum(row_id not in known for row_id in ids)
            if name in wanted and 0 < lacking < len(ids):
                yield warning(
                    "data",
                    f"source={name}: {lacking} of {len(ids)} rows have no profile and are not "
                    "drawn",
                    "run `verl-mixed profile`, which tries them",
                )


def _is_toy(train: Sequence[str]) -> bool:
    """Whether the training files together have few rows; False if one cannot be read."""
    try:
        return sum(pq.read_metadata(path).num_rows for path in train) < TOY_ROWS
    except (OSError, pa.ArrowInvalid):
        return False


def _sound_rows(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The training and the validation files that can be read."""
    named = [files_at(config, key) for key in ("data.train_files", "data.val_files")]
    sound = set(sound_files([*named[0], *named[1]]))
    train, validation = ([file for file in files if file in sound] for files in named)
    return train, validation


def _leaked_rows(
    config: Mapping[str, Any], train: Sequence[str], validation: Sequence[str]
) -> Iterator[str]:
    """Validation rows that are also training rows, unless they are allowed."""
    if at(config, "mixed.leakage") != "allow":
        yield from _leakage_problems(config, train, validation)


def batches(path: str, columns: Sequence[str]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the first row, rows with some columns) of each batch of a good file."""
    with pq.ParquetFile(path) as file:
        row = 0
        for batch in file.iter_batches(columns=list(columns), batch_size=BATCH_ROWS):
            yield row, batch.to_pylist()
            row += batch.num_rows


def sampled_rows(
    config: Mapping[str, Any], most: int
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """source that takes part -> its first sound training rows, each with file and number.

    Args:
        most: rows of a source; where the rows name the agents, of each agent.
    """
    sources = {n: source for n, source in sound_sources(config).items() if source.takes_part}
    found: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    columns = ["data_source", "agent_name", "prompt", "reward_model", "extra_info"]
    for readable in _readable(files_at(config, "data.train_files"))[0]:
        path, there = str(readable.path), sources.keys() & readable.rows_by_source.keys()
        named = {name for name in there if sources[name].agent}
        pairs = [(name, "") for name in readable.rows_by_source if name in named]
        pairs += [pair for pair in named_agents(path) if pair[0] in there - named]
        wanted = {pair: found.setdefault(pair, []) for pair in pairs}
        first = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=columns, batch_size=BATCH_ROWS):
                if all(len(rows) >= most for rows in wanted.values()):
                    break
                names = zip(*(batch.column(n).to_pylist() for n in columns[:2]), strict=True)
                for number, (source, agent) in enumerate(names):
                    rows = wanted.get((source, ""), wanted.get((source, agent)))
                    if rows is None or len(rows) >= most:
                        continue
                    (row,) = batch.slice(number, 1).to_pylist()
                    if prompt_problem(row["prompt"]) is None:
                        rows.append((f"{path} row {first + number}", row))
                first += batch.num_rows
    by_source: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for (source, _), rows in found.items():
        by_source.setdefault(source, []).extend(rows)
    return {source: rows for source, rows in by_source.items() if rows}


def named_agents(path: str) -> list[tuple[str, str]]:
    """(source, agent) pairs that the rows of a good file name, in the order of the rows."""
    return _named_agents(path, os.stat(path).st_mtime_ns)


@lru_cache(64)
def _named_agents(path: str, _changed_ns: int) -> list[tuple[str, str]]:
    columns, found = ["data_source", "agent_name"], dict[tuple[str, str], None]()
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=columns, batch_size=BATCH_ROWS):
            groups = (
                pa.Table.from_batches([batch]).group_by(columns, use_threads=False).aggregate([])
            )
            found |= {(row["data_source"], row["agent_name"]): None for row in groups.to_pylist()}
    return [(source, agent) for source, agent in found if agent]


def media_columns(config: Mapping[str, Any], path: str) -> list[str]:
    """The columns of a good file that hold images, videos or audio."""
    keys = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}  # verl's defaults
    wanted = [at(config, f"data.{key}") or name for key, name in keys.items()]
    return [name for name in wanted if name in pq.read_schema(path).names]


def sound_files(files: Sequence[str]) -> list[str]:
    """The files that can be read and have our columns; `data_problems` reports the others."""
    readable = {str(file.path) for file in _readable(files)[0]}
    return [file for file in files if os.path.abspath(file) in readable]


def _cell_problems(
    config: Mapping[str, Any], rewards: Mapping[str, Reward], path: str
) -> list[str]:
    """Unusable rows, and ground truths that the source's reward cannot judge by, counted."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}

    def found(source: str, what: str, row: int, why: str) -> None:
        counts[source, what] += 1
        first.setdefault((source, what), f"first row {row}: {why}")

    columns = ["data_source", "prompt", "reward_model.ground_truth", "extra_info.extras"]
    closing = str(at(config, f"{TOOL_CONFIG}.answer_end_tag", ""))
    for start, rows in batches(path, columns):
        for row, values in enumerate(rows, start):
            source = values["data_source"]
            if why := prompt_problem(values["prompt"]) or _extras_problem(values["extra_info"]):
                found(source, "cannot be used", row, f"{why}; prepare the data again")
            text = (values["reward_model"] or {}).get("ground_truth")
            if source in rewards and (why := _truth_problem(rewards[source], text, closing)):
                what = "have a ground truth that its reward cannot judge by"
                remedy = f"prepare the data again, or set mixed.sources.{source}.reward"
                found(source, what, row, f"{why}; {remedy}")
    return [
        f"{path}: {count} rows of source={source!r} {what}, {first[source, what]}"
        for (source, what), count in counts.items()
    ]


def prompt_problem(prompt: Any) -> str | None:
    """Why a cell of the column `prompt` is not a prompt."""
    if not prompt:
        return "its prompt has no messages"
    if not all(message and message["role"] and message["content"] for message in prompt):
        return "its prompt has a message without a role or a content"
    if not any(message["role"] == "user" for message in prompt):
        return "its prompt has no message of the role user"
    return None


def _extras_problem(extra_info: Mapping[str, Any] | None) -> str | None:
    text = (extra_info or {}).get("extras") or "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError as error:
        return f"extra_info.extras is not JSON ({error})"
    return None if is_object else f"extra_info.extras={text:.60} is no JSON object"


def _truth_problem(reward: Reward, text: str | None, closing: str) -> str | None:
    """Why a reward cannot judge by a ground truth; `closing` is the tag that ends an answer."""
    try:
        ground_truth = json.loads(text or "")
    except ValueError as error:
        return f"reward_model.ground_truth is not JSON ({error})"
    if why := reward.truth_problem(ground_truth):
        return why
    if closing and reward.name in REWARDS and _are_unwritable(ground_truth, closing):
        return f"every accepted answer has {closing!r}, which ends the model's answer before it"
    return None


def _are_unwritable(truth: Any, closing: str) -> bool:
    """Whether there are accepted answers, and each has the tag that ends an answer."""
    targets = truth.get("target", truth.get("answer")) if isinstance(truth, Mapping) else truth
    targets = targets if isinstance(targets, list) else [targets]
    return bool(targets) and all(isinstance(each, str) and closing in each for each in targets)


def _rewards_of(config: Mapping[str, Any]) -> dict[str, Reward]:
    """source -> its reward, without sources whose reward is wrong, which another check reports."""
    rewards: dict[str, Reward] = {}
    for name, source in sound_sources(config).items():
        with suppress(ValueError):
            rewards[name] = reward_for(source.reward_name(name), source.reward_options)
    return rewards


def _identities(
    config: Mapping[str, Any], files: Sequence[str]
) -> Iterator[tuple[str, set[str | int]]]:
    """(place, {row id, hash of the prompt}) of the rows of sources with a ratio above 0.

    Rows of a file with images have their id only, because many images have the same question, and
    so have rows of seeds.
    """
    sources = sound_sources(config)
    for path in files:
        has_media = bool(media_columns(config, path))
        for first, rows in batches(path, ["data_source", "prompt", "extra_info.row_id"]):
            for row, values in enumerate(rows, start=first):
                source = sources.get(values["data_source"])
                row_id = (values["extra_info"] or {}).get("row_id")
                if source is None or not source.takes_part or not row_id:
                    continue  # `row_id_problems` reports rows without an id
                if has_media or source.kind == seeds.SOURCE:
                    yield f"{path} row {row}", {row_id}
                elif prompt_problem(values["prompt"]) is None:
                    said = [(message["role"], message["content"]) for message in values["prompt"]]
                    yield f"{path} row {row}", {row_id, hash((values["data_source"], *said))}


def _leakage_problems(
    config: Mapping[str, Any], train: Sequence[str], validation: Sequence[str]
) -> Iterator[str]:
    """Validation rows that are also training rows, by id or by prompt."""
    trained: set[str | int] = set()
    for _, names in _identities(config, train):
        trained |= names
    leaked = [row for row in _identities(config, validation) if row[1] & trained]
    if leaked:
        place, names = leaked[0]
        twin = next(place for place, others in _identities(config, train) if others & names)
        yield (
            f"data.val_files: {len(leaked)} rows are in data.train_files too, by their row_id or "
            f"their prompt, first {place} ({twin}): a curve over them shows what was memorised; "
            "leave them out of one side (`verl-mixed prepare --validation`), or set "
            "mixed.leakage=allow"
        )

"""Preparation of rows: read a dataset's files or make its records, convert and choose records,
write parquet, count drops.

Memory per row is about 20 bytes for each seen id, 8 bytes for each kept row's length, and 8 bytes
for its draw if a number of rows is drawn. Rows are saved in parts (`samplers.rows.draft`), so that
a killed process loses little. The files depend only on their fingerprint, not on interruptions.
"""

# pyarrow has no types; what comes of it is narrowed where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import hashlib
import importlib
import inspect
import json
import os
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from samplers.kind import BadRecord, Kind, UnusableRecord
from samplers.rows.draft import Draft, State, draft_folder, open_draft
from samplers.rows.draws import EVERY, SeenIds, digests_of, smallest
from samplers.rows.made_records import MadeRecords
from samplers.rows.records import BadData, Record, RecordFile
from samplers.rows.row_files import Output, RowFile, description, outputs_of, publish
from samplers.rows.schema import Row, columns_of

PART_RECORDS = 8192
PART_BYTES = 64 << 20
"""A part is saved at the first of these limits; a killed process loses at most one part."""

_BATCH_RECORDS = 256
_BATCH_BYTES = 16 << 20
"""Records are tokenised and converted together, up to the first of these limits."""

_FORMAT = 1  # of the fingerprint; it changes when the same inputs give other rows
_LENGTH = "length"
_COPY = "it is a copy of an earlier record"
_LONG = "its prompt is longer than max_prompt_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    name: str
    """Its name, a part of the fingerprint."""

    lengths: Callable[[list[str]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which rows are kept, and which of these are for validation; None makes no choice."""

    limit: int | None = None
    """Number of rows to keep; reading stops there."""

    sample: int | None = None
    """Number of kept rows to draw; the same rows for any order of the records."""

    validation: float | int | None = None
    """Share (below 1) or number of the remaining rows for the second file. With a share, a row's
    file depends only on its id and the seed."""

    max_prompt_tokens: int | None = None
    """Longer prompts are left out; templates, which the run adds, do not count."""

    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("sample", 1), ("max_prompt_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"cannot prepare with {name}={value}: it must be >= {least}")
        share = self.validation
        if share is not None and not (share >= 1 if isinstance(share, int) else 0.0 < share < 1.0):
            raise ValueError(
                f"cannot prepare with validation={share}: give a share between 0 and 1, or a whole "
                "number of rows"
            )


_EVERYTHING = Choice()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareProgress:
    read_bytes: int
    size_bytes: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    files: dict[str, int]
    """Path -> number of rows."""

    read: int
    """Number of records."""

    dropped: dict[str, int]
    """Reason -> records."""

    unit: str
    """Of `lengths`: `tokens`, or `characters` without a tokenizer."""

    lengths: dict[str, int]
    """`p50`, `p90`, `p99`, `max` of the written prompts."""

    was_there: bool = False
    """Whether the files existed already, so that nothing was done."""


def prepare(
    kind: Kind,
    inputs: Sequence[Path | str],
    output: Path | str,
    *,
    split: str = "train",
    validation_output: Path | str | None = None,
    choice: Choice = _EVERYTHING,
    options: Mapping[str, Any] | None = None,
    source: str | None = None,
    agent: str | None = None,
    tokenizer: Tokenizer | None = None,
    skip_bad: bool = False,
    progress: Callable[[PrepareProgress], None] = lambda _: None,
) -> Prepared:
    """Convert files of records to one parquet file of rows, or to two.

    Args:
        inputs: files as `RecordFile` reads them, one after another; none for a kind that makes its
            records.
        output: `.parquet` file; an existing file is replaced when the new one is complete.
        split: `train` or `validation`, of the rows of `output`.
        validation_output: the second file; needed with `choice.validation`, and only then.
        options: the kind's options by name.
        source: `data_source` of the rows; None is the kind's name.
        agent: `agent_name` of the rows; None is the kind's.
        tokenizer: measures prompts; None counts characters.
        skip_bad: leave out and count records that break their schema.

    Raises:
        BadData: a record breaks its schema, a file is damaged, the kind's own code fails, or no row
            is left. No file remains, except new folders.
        ValueError: options contradict each other, or an output path is not possible.
        OSError: an input is missing, or an output cannot be written.
        KeyboardInterrupt: from the user; the draft remains, and the same call continues from there.
    """
    job = _job(
        kind,
        inputs,
        outputs_of(output, split, validation_output, choice.validation),
        options or {},
        source,
        agent,
        choice=choice,
        tokenizer=tokenizer,
        skip_bad=skip_bad,
        progress=progress,
    )
    job.check()
    fingerprint = job.fingerprint()
    summary = description(job.outputs, fingerprint)
    done = job.prepared(was_there=True, **summary) if summary is not None else None
    if done and not any(draft_folder(output.path).exists() for output in job.outputs):
        return done
    with ExitStack() as stack:
        # one of each file: nobody else writes it meanwhile, and a bad place is found at once
        drafts = [stack.enter_context(open_draft(each.path, fingerprint)) for each in job.outputs]
        try:
            done = done or job.run(drafts[0], fingerprint)
        except Exception:  # not KeyboardInterrupt: who interrupts may want to go on
            _remove(drafts)
            raise
        _remove(drafts)
        return done


def fingerprint_of(
    kind: Kind,
    inputs: Sequence[Path],
    *,
    split: str,
    options: Mapping[str, Any],
    source: str,
    agent: str | None,
) -> str:
    """Everything that decides the rows of `prepare`, as JSON; `inputs` are files by path, size and
    time.

    Raises:
        ValueError, OSError: as `prepare`.
    """
    return _job(kind, inputs, [Output(Path(), split)], options, source, agent).fingerprint()


def _job(
    kind: Kind,
    inputs: Sequence[Path | str],
    outputs: list[Output],
    options: Mapping[str, Any],
    source: str | None,
    agent: str | None,
    **rest: Any,
) -> "_Job":
    named = _options(kind, options)
    return _Job(
        kind=kind,
        files=_inputs_of(kind, inputs, outputs[0].split, named),
        outputs=outputs,
        options={**named, "source": source or kind.name, "agent": agent or kind.agent},
        **rest,
    )


def _remove(drafts: Iterable[Draft]) -> None:
    for draft in drafts:
        draft.remove()


class _Entry(NamedTuple):
    file: int
    number: int
    line: int
    outcome: Row | str | BadData
    """A row, the reason of a drop, or the error that ends the reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    kind: Kind
    files: list[RecordFile] | list[MadeRecords]
    outputs: list[Output]
    options: dict[str, Any]
    choice: Choice = _EVERYTHING
    tokenizer: Tokenizer | None = None
    skip_bad: bool = False
    progress: Callable[[PrepareProgress], None] = lambda _: None

    def check(self) -> None:
        failed = f"cannot prepare {self.outputs[0].path}"
        if not self.files:
            raise ValueError(f"{failed}: no input is named; give one file or more")
        if self.choice.max_prompt_tokens is not None and self.tokenizer is None:
            raise ValueError(f"{failed}: max_prompt_tokens needs a tokenizer; give one")
        paths = [os.path.realpath(output.path) for output in self.outputs]
        if len(set(paths)) < len(paths):
            raise ValueError(f"{failed}: validation rows need a file of their own; name another")
        for file in self.files:
            if isinstance(file, RecordFile) and os.path.realpath(file.path) in paths:
                raise ValueError(f"{failed}: it is an input as well; name another output")

    def fingerprint(self) -> str:
        """Everything that decides the rows, as JSON."""
        return json.dumps(
            {
                "format": _FORMAT,
                "kind": self.kind.name,
                "code": _code_of(self.kind.to_row) + _code_of_modules(self.kind.modules),
                "inputs": [_identity(file) for file in self.files],
                "splits": [output.split for output in self.outputs],
                "choice": asdict(self.choice),
                "options": self.options,
                "tokenizer": self.tokenizer and self.tokenizer.name,
                "skip_bad": self.skip_bad,
            },
            default=str,
            sort_keys=True,
        )

    def prepared(self, *, rows: Sequence[int], **account: Any) -> Prepared:
        files = {str(output.path): n for output, n in zip(self.outputs, rows, strict=True)}
        return Prepared(files=files, **account)

    def run(self, draft: Draft, fingerprint: str) -> Prepared:
        """Read the rest of the inputs, then write the files."""
        state, digests = draft.resume()
        seen = SeenIds(digests)
        entries = self._entries(state)
        while not state.done:
            self._read_part(entries, state, seen, draft)
        if not state.kept:
            raise self._nothing_left(state)
        if self.fingerprint() != fingerprint:
            raise BadData(
                f"cannot prepare {self.outputs[0].path}: {self._inputs} changed while it was read; "
                "run it again when it is complete"
            )
        return self._write(draft, state, fingerprint)

    # --- reading ---------------------------------------------------------------------------------

    def _entries(self, state: State) -> Iterator[_Entry]:
        start = state.record
        for number in range(state.file, len(self.files)):
            file = self.files[number]
            try:
                for record in file.records(start):
                    yield _Entry(number, record.number, record.line, self._outcome(file, record))
            except BadData as error:  # handed on, because a limit may be reached before it
                yield _Entry(number, 0, 0, error)
            start = 0

    def _outcome(self, file: RecordFile | MadeRecords, record: Record) -> Row | str | BadData:
        try:
            if isinstance(record.value, BadRecord):
                raise record.value
            split = self.outputs[0].split
            row = self.kind.to_row(record.value, split=split, index=record.number, **self.options)
            if not isinstance(row, Row):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"to_row gave {row!r}, which is no Row")
            return row
        except BadRecord as error:
            return self._bad(error, file.place(record.number, record.line))
        except UnusableRecord as error:
            return str(error)
        except Exception as error:  # of a kind's own code; say which record brought it about
            return self._failed(error, file.place(record.number, record.line))

    def _bad(self, error: BadRecord, place: str) -> str | BadData:
        if self.skip_bad:
            return f"bad record: {error.reason}"
        return BadData(
            f"cannot prepare {place}: {error}; mend it, or leave such records out with --skip-bad"
        )

    def _failed(self, error: Exception, place: str) -> BadData:
        last = traceback.extract_tb(error.__traceback__)[-1]
        failed = BadData(
            f"cannot prepare {place}: kind={self.kind.name!r} failed with {error!r} "
            f"({last.filename} line {last.lineno}); correct it, or raise BadRecord for a record "
            "that is not of its schema"
        )
        failed.__cause__ = error
        return failed

    def _read_part(
        self, entries: Iterator[_Entry], state: State, seen: SeenIds, draft: Draft
    ) -> None:
        """Read one part and save it. Where a part ends depends only on the records."""
        tables: list[Any] = []
        began, size_bytes = state.read, 0
        while not state.done and state.read - began < PART_RECORDS and size_bytes < PART_BYTES:
            table = self._take(_batch(entries), state, seen)
            if len(table):
                tables.append(table)
                size_bytes += table.nbytes
            self.progress(
                PrepareProgress(
                    read_bytes=sum(file.size_bytes for file in self.files[: state.file])
                    + self.files[state.file].read_bytes,
                    size_bytes=sum(file.size_bytes for file in self.files),
                    kept=state.kept,
                )
            )
        with _writing(self.outputs[:1]):
            draft.save(state, tables, seen.take_new())

    def _take(self, batch: Sequence[_Entry], state: State, seen: SeenIds) -> Any:
        """The kept rows of a batch as a table; all results are counted in `state`."""
        batch, table = self._columns(batch)
        rows = _rows(batch)
        lengths = self._lengths(rows)
        is_new = seen.add(digests_of([row.row_id for row in rows], "seen"))
        most = self.choice.max_prompt_tokens
        keep: list[bool] = []
        state.done = not batch
        for entry in batch:
            if isinstance(entry.outcome, BadData):
                raise entry.outcome
            if isinstance(entry.outcome, str):
                reason = entry.outcome
            else:
                at = len(keep)
                is_long = most is not None and lengths[at] > most
                reason = _COPY if not is_new[at] else f"{_LONG}={most}" if is_long else None
                keep.append(reason is None)
            state.read += 1
            state.file, state.record = entry.file, entry.number + 1
            if reason is None:
                state.kept += 1
            else:
                state.dropped[reason] = state.dropped.get(reason, 0) + 1
            if state.kept == self.choice.limit:
                state.done = True
                break
        table = table.append_column(_LENGTH, pa.array(lengths, pa.int64())).slice(0, len(keep))
        return table.filter(pa.array(keep, pa.bool_()))

    def _columns(self, batch: Sequence[_Entry]) -> tuple[Sequence[_Entry], Any]:
        """(the batch, with rows that cannot be written as faults; its rows)."""
        try:
            return batch, columns_of(_rows(batch))
        except (ValueError, TypeError, KeyError):
            batch = [entry._replace(outcome=self._writable(entry)) for entry in batch]
            return batch, columns_of(_rows(batch))

    def _writable(self, entry: _Entry) -> Row | str | BadData:
        if isinstance(entry.outcome, Row):
            place = self.files[entry.file].place(entry.number, entry.line)
            try:
                columns_of([entry.outcome])
            except (TypeError, KeyError) as error:  # a field of another type, a message's key
                return self._failed(error, place)
            except ValueError as error:
                fault = BadRecord(str(error), reason="it holds what is not Unicode or not JSON")
                return self._bad(fault, place)
        return entry.outcome

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        """(rows,) lengths of the prompts in tokens or characters."""
        prompts = [
            "\n".join(each["content"] for each in row.messages) or row.question for row in rows
        ]
        return self.tokenizer.lengths(prompts) if self.tokenizer else [*map(len, prompts)]

    def _nothing_left(self, state: State) -> BadData:
        reasons = "; ".join(
            f"{count} x {reason}"
            for reason, count in sorted(state.dropped.items(), key=lambda each: -each[1])
        )
        return BadData(
            f"cannot prepare {self.outputs[0].path} from {self._inputs}: no usable record "
            f"({reasons or 'there is none at all'}); check that the files are of "
            f"kind={self.kind.name}"
        )

    @property
    def _inputs(self) -> str:
        return ", ".join(map(str, self.files))

    # --- writing ---------------------------------------------------------------------------------

    def _write(self, draft: Draft, state: State, fingerprint: str) -> Prepared:
        side_of = self._sides(draft, state)
        lengths: list[NDArray[np.int64]] = []
        try:
            with _writing(self.outputs), ExitStack() as stack:
                files = [stack.enter_context(closing(RowFile(output))) for output in self.outputs]
                for part in draft.parts(state):
                    sides = side_of(part)
                    lengths.append(part[_LENGTH].to_numpy()[sides >= 0])
                    for side, file in enumerate(files):
                        file.add(part.drop_columns(_LENGTH).filter(pa.array(sides == side)))
                account = self._account(state, [file.rows for file in files], lengths)
                for file in files:
                    file.describe(fingerprint=fingerprint, summary=account)
            publish(self.outputs)
        finally:
            for output in self.outputs:
                output.unfinished.unlink(missing_ok=True)
        return self.prepared(**account)

    def _sides(self, draft: Draft, state: State) -> Callable[[Any], NDArray[np.int8]]:
        """The file of each row of a part: 0 or 1; -1 for a row that is not drawn."""
        sample, share = self.choice.sample, self.choice.validation
        last_sampled = last_validation = EVERY

        def digests(part: Any, purpose: str) -> NDArray[np.uint64]:
            ids = pc.struct_field(part["extra_info"], "row_id").to_pylist()
            return digests_of(ids, f"{purpose} {self.choice.seed}")

        if sample is not None:
            every = [digests(part, "sample") for part in draft.parts(state)]
            last_sampled = smallest(np.concatenate(every), sample)
        if isinstance(share, float):
            last_validation = np.uint64(share * 2.0**64)
        elif share is not None:
            drawn = [
                digests(part, "validation")[digests(part, "sample") <= last_sampled]
                for part in draft.parts(state)
            ]
            last_validation = smallest(np.concatenate(drawn), share)

        def side_of(part: Any) -> NDArray[np.int8]:
            sides = np.zeros(len(part), np.int8)
            if share is not None:
                sides[digests(part, "validation") <= last_validation] = 1
            if sample is not None:
                sides[digests(part, "sample") > last_sampled] = -1
            return sides

        return side_of

    def _account(
        self, state: State, rows: Sequence[int], lengths: Sequence[NDArray[np.int64]]
    ) -> dict[str, Any]:
        """The summary for the files' metadata and for `Prepared`."""
        if 0 in rows:
            empty = self.outputs[rows.index(0)].path
            raise BadData(
                f"cannot prepare {empty}: none of {sum(rows)} rows falls to it with "
                f"validation={self.choice.validation}; ask for a number of rows that leaves some"
            )
        dropped = state.dropped
        if state.kept > sum(rows):
            reason = f"it was not drawn for sample={self.choice.sample}"
            dropped = dropped | {reason: state.kept - sum(rows)}
        every = np.concatenate(lengths)
        # the length of a prompt that is there, not a mean of two
        shares = np.percentile(every, [50, 90, 99, 100], method="inverted_cdf")
        return {
            "rows": rows,
            "read": state.read,
            "dropped": dropped,
            "unit": "tokens" if self.tokenizer else "characters",
            "lengths": dict(zip(("p50", "p90", "p99", "max"), map(int, shares), strict=True)),
        }


def _batch(entries: Iterator[_Entry]) -> list[_Entry]:
    """The next batch of records; empty at the end."""
    batch: list[_Entry] = []
    size_bytes = 0
    for entry in entries:
        batch.append(entry)
        if isinstance(entry.outcome, Row):
            row = entry.outcome
            size_bytes += _size((row.question, row.messages, row.ground_truth, row.extras))
        if len(batch) == _BATCH_RECORDS or size_bytes >= _BATCH_BYTES:
            break
    return batch


def _size(value: Any) -> int:
    """Approximate size of a value as JSON, in bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, cast("dict[str, Any]", value).values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, cast(Sequence[Any], value)))
    return 8


def _rows(batch: Iterable[_Entry]) -> list[Row]:
    return [entry.outcome for entry in batch if isinstance(entry.outcome, Row)]


def _inputs_of(
    kind: Kind, inputs: Sequence[Path | str], split: str, options: Mapping[str, Any]
) -> list[RecordFile] | list[MadeRecords]:
    if kind.records is None:
        return [RecordFile(path) for path in inputs]
    if inputs:
        raise ValueError(
            f"cannot prepare kind={kind.name!r} from {inputs[0]}: it makes its records and reads "
            "no file; leave the files out"
        )
    return [MadeRecords(kind, split, options)]


def _identity(file: RecordFile | MadeRecords) -> list[Any]:
    """What changes when an input may have other records."""
    if isinstance(file, RecordFile):
        stat = file.path.stat()
        return [str(file.path.resolve()), stat.st_size, stat.st_mtime_ns]
    return [_code_of(file.maker), file.version]


def _options(kind: Kind, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the kind's options."""
    defaults = {option.name: option.default for option in kind.options}
    unknown = [name for name in given if name not in defaults]
    if unknown:
        raise ValueError(
            f"no option {unknown[0]!r} in kind={kind.name!r}: known are "
            f"{', '.join(defaults) or 'none'}; correct it"
        )
    return defaults | dict(given)


def _code_of(reader: object) -> list[Any]:
    """The code that decides a reader's result: the file of its function, and bound values."""
    bound: list[Any] = []
    while isinstance(reader, partial):
        reader = cast("partial[Any]", reader)
        bound.append([reader.args, reader.keywords])
        reader = reader.func
    code = inspect.unwrap(cast(Any, reader)) if inspect.isroutine(reader) else type(reader)
    file = inspect.getsourcefile(code)
    return [file and hashlib.sha256(Path(file).read_bytes()).hexdigest(), *bound]


def _code_of_modules(names: Iterable[str]) -> list[str]:
    files = [Path(str(importlib.import_module(name).__file__)) for name in names]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@contextmanager
def _writing(outputs: Sequence[Output]) -> Generator[None]:
    """Add the names of the outputs to an error of the disk."""
    try:
        yield
    except BadData:
        raise
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        names = ", ".join(str(output.path) for output in outputs)
        raise OSError(
            f"cannot write {names}: {why}; make room, or choose another folder"
        ) from error

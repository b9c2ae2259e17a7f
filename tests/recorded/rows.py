"""The rows that `verl-mixed prepare` makes of small made-up records: `rows.txt`.

    python -m tests.recorded.rows --write | --check

The recording holds its own input: `--write` makes each call again whose line begins with `$`, in a
folder of the files that are named above it. A new case is a block with a name and these lines.

    # file NAME [packed | open]   its lines follow, each after `> `, or after `>> ` with the escapes
                                  of a Python text of bytes; packed: gzip; open: no last line end
    # made NAME KEY               a file that `made` gives, mostly a table
    # each                        a call for each line after `> `, which is all that a.jsonl holds
    # twice                       the second of two calls is recorded

`$ read FILE...` is no command: it reads training files as a run does before it starts.
"""

import gzip
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import date, datetime, timezone
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.recorded.compare import RECORDED, joined, main, normalised, split

FILE = "rows.txt"
NOTE = """\
Rows that `verl-mixed prepare` makes of made-up records. Made again by
    python -m tests.recorded.rows --write
which makes each call again whose line begins with `$`; tests/recorded/rows.py says what the lines
above it mean. A row is a line of JSON with all its columns."""

_WIDTH = {"COLUMNS": "100", "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}

ROW_TYPES = pa.schema(
    [
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    *(("split", pa.string()), ("index", pa.int64())),
                    *(("row_id", pa.string()), ("extras", pa.string())),
                ]
            ),
        ),
    ]
)
"""The columns of prepared rows."""

# --- files that are no text ---------------------------------------------------------------------


def parquet_of(table: pa.Table, **options: Any) -> bytes:
    """A parquet file with two rows in a group."""
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=2, **options)
    return file.getvalue()


def arrow_of(table: pa.Table, make: Callable[..., Any] = pa.ipc.new_file) -> bytes:
    """An Arrow file with two rows in a batch."""
    file = io.BytesIO()
    with make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


def stream_of(table: pa.Table) -> bytes:
    """An Arrow stream, as the Hub's `.arrow` files are."""
    return arrow_of(table, pa.ipc.new_stream)


def _three() -> pa.Table:
    return pa.table(
        {
            "question": ["who?", "größe \u2028 \U0001f600", " open "],
            "answer": ["Ann\nLee", 'say "x", then\r\ny', "\tx\t"],
            "n": ["1", "2", "03"],
        }
    )


def _types() -> pa.Table:
    """A column of each type that JSON has, and of some that it lacks."""
    moment = datetime(2024, 1, 2, 3, 4, 5, 6, timezone.utc)
    return pa.table(
        {
            "question": pa.array(["a", "b", "c"]).dictionary_encode(),
            "answer": pa.array([1, 2, 3], pa.int32()),
            "int8": pa.array([1, None, -1], pa.int8()),
            "uint64": pa.array([2**64 - 1, 0, 1], pa.uint64()),
            "float": pa.array([0.5, 1.0, None], pa.float32()),
            "double": pa.array([0.1, 1e300, -0.0], pa.float64()),
            "bool": pa.array([True, None, False]),
            "text": pa.array(["größe", "", None], pa.large_string()),
            "day": pa.array([date(2024, 2, 29), None, date(1, 1, 1)]),
            "moment": pa.array([moment, None, moment], pa.timestamp("us", "UTC")),
            "decimal": pa.array([Decimal("1.50"), Decimal("2.00"), None], pa.decimal128(30, 2)),
            "list": pa.array([[1, 2], [], None], pa.list_(pa.int64())),
            "struct": pa.array([{"a": 1, "b": [{"c": "x"}]}, {"a": None, "b": []}, None]),
            "null": pa.nulls(3),
        }
    )


def _taco() -> pa.Table:
    """Two made-up problems in the columns of BAAI/TACO."""
    names = "question solutions starter_code input_output difficulty raw_tags name source tags "
    names += "skill_types url Expected_Auxiliary_Space time_limit date picture_num memory_limit "
    names += "Expected_Time_Complexity"
    columns: dict[str, Any] = {
        name.replace("_", " ") if name.startswith("Expected") else name: [None, None]
        for name in names.split()
    }
    columns |= {
        "question": ["Add one to n.", "Add two to n."],
        "solutions": ['["print(2)"]'] * 2,
        "starter_code": ["", ""],
        "input_output": ['{"inputs": ["1\\n"], "outputs": ["2\\n"]}'] * 2,
        "difficulty": [None, "HARD"],
        "tags": [None, "['a']"],
    }
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def _verl() -> pa.Table:
    """Rows as Search-R1 and verl's examples write them: without `row_id`; the last is a copy."""
    asked = {"role": "user", "content": "Answer it. Question: who wrote it?"}
    prompts = [[asked], [{"role": "system", "content": "Be brief."}, asked], [asked]]
    return pa.Table.from_pylist(
        [
            {
                "id": f"train_{number}",
                "data_source": "nq",
                "prompt": prompt,
                "ability": "fact-reasoning",
                "reward_model": {"ground_truth": {"target": ["Ann", "A. Lee"]}, "style": "rule"},
                "extra_info": {"index": number, "split": "train"},
                "metadata": None,
            }
            for number, prompt in zip((0, 1, 0), prompts, strict=True)
        ]
    )


def _prepared(sources: Sequence[str | None], ids: Sequence[str | None]) -> pa.Table:
    """Rows of which only source and id matter."""
    return pa.Table.from_pylist(
        [
            {"data_source": source, "extra_info": {"split": "train", "index": 0, "row_id": name}}
            for source, name in zip(sources, ids, strict=True)
        ],
        schema=ROW_TYPES,
    )


def _odd(**columns: Any) -> pa.Table:
    rows = len(next(iter(columns.values())))
    return pa.table({"question": list("abc"[:rows]), "answer": list(range(rows))} | columns)


_FACTORY = b"""\
import random
from dataclasses import dataclass


@dataclass
class SumConfig:
    most: int = 1000
    few: bool = False
    seed: "int | None" = None
    size: int = 500

    def validate(self):
        assert self.most > 0, "most must be positive"


class Sums:
    sign = "+"

    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        rng = random.Random(self.config.seed + index)
        a, b = rng.randint(0, self.config.most), rng.randint(0, self.config.most)
        return {
            "question": f"{a} {self.sign} {b}",
            "answer": str(a + b if self.sign == "+" else a - b),
            "metadata": {"pair": (a, b), "counts": {a: 1}, "pair_text": f"{a} and {b}"},
        }


class Differences(Sums):
    sign = "-"


class Curriculum:
    def set_global_level(self, level):
        self.level = level

    def generate_configuration(self):
        return SumConfig(most=10 ** (self.level + 2))


DATASETS = {"sums": (Sums, SumConfig), "differences": (Differences, SumConfig)}


def has_curriculum(task):
    return task == "sums"


def create_curriculum(task):
    return Curriculum()
"""
"""The module `reasoning_gym.factory` of a package with two made-up tasks."""

_RIDDLES = b"""\
from samplers.kind import BadRecord, Kind, Option, UnusableRecord
from samplers.rows.schema import Row, row_id


def to_row(record, *, split, index, source="riddles", agent="react_agent", suffix=""):
    if record["solution"] is None:
        raise UnusableRecord("solution is empty")
    if record["riddle"] == "bad":
        raise BadRecord("riddle='bad': must be good", reason="riddle: must be good")
    return Row(
        data_source=source, agent_name=agent, question=record["riddle"] + suffix, ability="riddles",
        ground_truth={"answer": record["solution"]}, split=split, index=index,
        row_id=row_id(source, record), extras={"length": len(record["riddle"])},
    )


KIND = Kind(
    name="riddles", agent="react_agent", to_row=to_row, help="riddles",
    options=(Option(name="suffix", type=str, default="", help="after each riddle"),),
)
"""
"""A kind of data in a file of the user's."""


@cache
def made() -> Mapping[str, bytes]:
    """Key -> content of a file that is no text, or that many cases have."""
    three, types = parquet_of(_three()), _types()
    bad_text = pa.array([b"x", b"\xff", b"y"], pa.binary()).view(pa.string())
    far = pa.array([0, 2**30, 1], pa.int32()).cast(pa.date32())
    pairs = pa.array([[("k", 1), ("l", 2)]], pa.map_(pa.string(), pa.int64()))
    twice = pa.table([pa.array(["a"])] * 3, names=["question", "question", "answer"])
    good = b'{"question": "a", "answer": 1}\n'
    deep = b"[" * 100_000 + b"\n"
    long = b'{"question": "b", "answer": ' + b"9" * 5000 + b"}\n"
    numbers = b"".join(b'{"question": "%d", "answer": 1}\n' % n**9 for n in range(9999))
    packed = gzip.compress(numbers, mtime=0)
    answers = pa.array([["Ann"], ["B", "C"]], pa.list_(pa.string()))
    toy = b"Metadata-Version: 2.1\nName: reasoning-gym\nVersion: 1.0\n"
    problem = {"level": "Level 5", "type": "Algebra", "solution": r"So \boxed{2}."}
    maths = {name: [value] * 2 for name, value in problem.items()}
    return {
        "three.parquet": three,
        "three zstd.parquet": parquet_of(_three(), compression="zstd"),
        "three.arrow": arrow_of(_three()),
        "three stream.arrow": stream_of(_three()),
        "types.parquet": parquet_of(types),
        "types.arrow": arrow_of(types),
        "types stream.arrow": stream_of(types),
        "bytes.parquet": parquet_of(_odd(blob=[b"ab"])),
        "map.parquet": parquet_of(_odd(map=pairs)),
        "far day.parquet": parquet_of(_odd(day=far)),
        "not UTF-8.arrow": arrow_of(_odd(text=bad_text)),
        "column twice.arrow": arrow_of(twice),
        "cut.parquet": three[: len(three) // 2],
        "cut.arrow": arrow_of(_three())[:200],
        "cut.gz": packed[: len(packed) // 2],
        "cut header.gz": packed[:5],
        "UTF-16": '{"question": "a", "answer": 1}'.encode("utf-16"),
        "deep line": good + deep + good.replace(b"1", b"3"),
        "long number": good + long + good.replace(b"1", b"3"),
        "taco.parquet": parquet_of(_taco()),
        "taco.arrow": stream_of(_taco()),
        "verl.parquet": parquet_of(_verl()),
        "nq.arrow": stream_of(pa.table({"question": ["who?", "what?"], "answer": answers})),
        "math.parquet": parquet_of(pa.table({"problem": ["1+1?", "2?"], **maths})),
        "rows.parquet": parquet_of(_prepared(["nq", "math", "nq"], ["nq:1", "math:2", "nq:3"])),
        "copies.parquet": parquet_of(_prepared(["nq"] * 3, ["nq:3", "nq:4", "nq:4"])),
        "no ids.parquet": parquet_of(_prepared(["nq"] * 3, ["nq:5", None, None])),
        "no sources.parquet": parquet_of(_prepared(["nq", None], ["nq:6", "nq:7"])),
        "no rows.parquet": parquet_of(_prepared([], [])),
        "riddles.py": _RIDDLES,
        "factory.py": _FACTORY,
        "METADATA": toy,
        "nothing": b"",
    }


# --- the input of a block -----------------------------------------------------------------------


def _files(lines: Sequence[str]) -> dict[str, bytes]:
    """The files that the lines above a call name."""
    found: dict[str, bytes] = {}
    for line, texts in _with_texts(lines):
        what, name, *more = line.removeprefix("# ").split(" ", 2)
        if what == "made":
            found[name] = made()[more[0]]
        elif what == "file":
            content = b"\n".join(texts) + (b"\n" if texts and more != ["open"] else b"")
            found[name] = gzip.compress(content, mtime=0) if more == ["packed"] else content
        else:
            raise ValueError(f"cannot prepare a case by {line!r}: see the head of rows.py")
    return found


def _with_texts(lines: Sequence[str]) -> Iterator[tuple[str, list[bytes]]]:
    """Each line with `#`, and the texts of the lines below it."""
    line, texts = "", list[bytes]()
    for each in [*lines, "# end"]:
        if each.startswith("# "):
            if line:
                yield line, texts
            line, texts = each, []
        elif each.startswith(">> "):
            text = each[3:].encode().decode("unicode_escape")
            texts.append(text.encode("latin-1"))
        else:
            texts.append(each[2:].encode())


@contextmanager
def _folder(inputs: Mapping[str, bytes]) -> Generator[Path]:
    """A temporary folder with some files, as the current one; `packages` is on the path."""
    before, path, environ = Path.cwd(), list(sys.path), os.environ.copy()
    with tempfile.TemporaryDirectory(prefix="rows") as name:
        folder = Path(name).resolve()
        for file, content in inputs.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        os.chdir(folder)
        os.environ |= _WIDTH
        if (folder / "packages").is_dir():
            sys.path.insert(0, str(folder / "packages"))
        for module in [each for each in sys.modules if each.partition(".")[0] == "reasoning_gym"]:
            del sys.modules[module]
        try:
            yield folder
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ |= environ
            sys.path[:] = path


# --- a call -------------------------------------------------------------------------------------


def _called(words: str, folder: Path) -> tuple[int, list[str]]:
    """Exit code and printed lines of `verl-mixed`, in this process."""
    from verl_mixed.cli import main as verl_mixed

    if words.startswith("read "):
        return _read(words.split()[1:], folder)
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            code = verl_mixed(shlex.split(words)[1:])
        except SystemExit as error:  # of argparse
            code = int(str(error.code))
    texts = [_plain(each.getvalue(), folder) for each in (out, errors)]
    return code, [line for text in texts if text for line in text.split("\n")]


def _read(files: Sequence[str], folder: Path) -> tuple[int, list[str]]:
    """What is said of training files: rows of each source, and what is wrong with their ids."""
    from samplers.rows.schema import read_sources, row_id_problems

    try:
        lines = [f"{file.path}: {file.rows_by_source}" for file in read_sources(files)]
        problems = row_id_problems(files)
    except ValueError as error:
        lines, problems = [], str(error).split("\n")
    return 1 if problems else 0, [_plain(line, folder) for line in (*lines, *problems)]


def _plain(text: str, folder: Path) -> str:
    """The text without what depends on the machine or on versions of other packages."""
    text = normalised(text, [(folder, "/site")])
    # words of pyarrow, gzip and Python
    damage = r"(file is damaged[^(\n]*|damaged, or of another kind) \([^;\n]*\);"
    text = re.sub(damage, r"\1 (...);", text)
    text = re.sub(r"(\(/site/\S+ line) \d+\)", r"\1 N)", text)
    text = re.sub(r"(not a parquet file) \([^;\n]*\);", r"\1 (...);", text)
    # argparse has quoted choices before Python 3.12
    text = re.sub(r"\(choose from [^)]*\)", lambda found: found[0].replace("'", ""), text)
    is_shown = re.compile(r"(?!usage: |\w.*━)").match  # not the bar of the progress
    return "\n".join(line.rstrip() for line in text.split("\n") if is_shown(line)).strip("\n")


def rows_in(path: Path) -> list[str]:
    """The rows of a parquet file as JSON."""
    return [json.dumps(row) for row in pq.read_table(path).to_pylist()]


def run(block: str) -> str:
    """A block with the call of its input made again."""
    given = [line for line in block.split("\n") if line.startswith(("# ", "$ ", "> ", ">> "))]
    calls = [line.removeprefix("$ ") for line in given if line.startswith("$ ")]
    if len(calls) != 1:
        raise ValueError(f"cannot make this call again: want one line with $, not {calls}")
    if "# each" in given:
        return _run_each(calls[0], [line[2:] for line in given if line.startswith("> ")])
    lines = [line for line in given if line != "# twice" and not line.startswith("$ ")]
    inputs = _files(lines)
    with _folder(inputs) as folder:
        if "# twice" in given:
            _called(calls[0], folder)
        code, printed = _called(calls[0], folder)
        found = [*given, f"exit {code}", *(f"| {line}" for line in printed)]
        for path in sorted(folder.rglob("*.parquet")):
            name = str(path.relative_to(folder))
            if path.read_bytes() != inputs.get(name):
                found += [f"{name}:", *rows_in(path)]
        found += [f"left: {path.relative_to(folder)}" for path in folder.rglob("*.draft")]
    return "\n".join(found)


def _run_each(words: str, texts: Sequence[str]) -> str:
    found = ["# each", f"$ {words}"]
    for text in texts:
        with _folder({"a.jsonl": f"{text}\n".encode()}) as folder:
            code, printed = _called(words, folder)
            found += ["", f"> {text}"]
            found += rows_in(folder / "rows.parquet") if code == 0 else [f"| {x}" for x in printed]
    return "\n".join(found)


def blocks(chosen: Sequence[str] | None = None) -> dict[str, str]:
    """Name -> block with its call made again; `chosen` are the names of some of them."""
    recorded = split((RECORDED / FILE).read_text(encoding="utf-8"))
    return {name: run(recorded[name]) for name in (chosen or recorded)}


def make() -> dict[str, str]:
    """File name -> text."""
    return {FILE: joined(blocks(), NOTE)}


if __name__ == "__main__":
    sys.exit(main(make, __doc__))

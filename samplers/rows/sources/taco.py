"""TACO: programming problems judged by hidden tests.

Reads records of the public dataset (BAAI/TACO; Li et al. 2023). The ground truth of a row is
`{"inputs": [...], "outputs": [...]}`, one of each a test, both texts. Where `input_output` has a
`fn_name`, the answer is a function, and the ground truth is:

- `fn_name`: the function, or the method of a `class Solution`.
- `inputs`: a list of arguments each, JSON values: `fn_name(*arguments)`.
- `outputs`: the result each, a JSON value. A result is right when it equals it, tuples being lists.
- `outputs_wrapped`: true where the data had each result in a list of its own, which was taken off.
  That cannot be told from a function whose results are lists of one, so `[output]` is right too.

JSON has no keys but text. What the dataset's own judge makes of that: a dictionary as first
argument or as result whose keys all read as integers has integer keys.

Source of both forms: FlagOpen/TACO, metrics/testing_util.py; of arguments as text, a line of JSON
each: LiveCodeBench, lcb_runner/evaluation/testing_util.py.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from samplers.kind import Kind, Option, UnusableRecord
from samplers.rows.schema import Row, row_id
from samplers.rows.sources.cells import bad, is_blank, items_of, literal_list, present, text_of

SOURCE = "taco"
AGENT = "code_execution_agent"

COLUMNS = (
    "question",
    "solutions",
    "starter_code",
    "input_output",
    "difficulty",
    "raw_tags",
    "name",
    "source",
    "tags",
    "skill_types",
    "url",
    "Expected Auxiliary Space",
    "time_limit",
    "date",
    "picture_num",
    "memory_limit",
    "Expected Time Complexity",
)

DIFFICULTIES = ("EASY", "MEDIUM", "MEDIUM_HARD", "HARD", "VERY_HARD", "UNKNOWN_DIFFICULTY")

MAX_TESTS = 32
MAX_TEST_BYTES = 1 << 20

_FUNCTION_PROMPT = "Your program is judged by calling `{fn_name}` and comparing what it returns."

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)\.?", re.IGNORECASE)
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "ms": 1e-3, "millisecond": 1e-3}
_MEGABYTES = {
    **{"": 1.0, "mb": 1.0, "megabyte": 1.0, "gb": 1024.0, "gigabyte": 1024.0},
    **{"kb": 2**-10, "kilobyte": 2**-10, "byte": 2**-20},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    input: Any
    output: Any
    size_bytes: int


def to_row(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    source: str = SOURCE,
    agent: str = AGENT,
    max_tests: int = MAX_TESTS,
    max_test_bytes: int = MAX_TEST_BYTES,
    difficulty: Collection[str] = (),
) -> Row:
    """Turn one raw record into a row.

    The first tests are kept; a test that does not fit into what the earlier ones left of
    `max_test_bytes` is passed over. `extras` have the number of tests in the record (`tests`), the
    number and size of the kept ones (`tests_kept`, `test_bytes`), what else is known of the
    problem, and the first test's `example_input` where the problem reads its input.

    Args:
        record: the 17 public columns; `input_output` is JSON text, or an object already.
        max_tests: tests of a row at most.
        max_test_bytes: their texts together at most.
        difficulty: only problems of these; empty means all.
    """
    question = text_of("question", present(record, "question"))
    level = text_of("difficulty", record.get("difficulty"))
    text_of("starter_code", record.get("starter_code"))
    starter_code = str(record.get("starter_code") or "").strip("\r\n").rstrip()
    content = present(record, "input_output")
    if difficulty and level not in difficulty:
        raise UnusableRecord("difficulty is not one of those asked for")
    if not question:
        raise UnusableRecord("question is empty")
    found = _input_output(content)
    fn_name = found.get("fn_name") or None
    if fn_name is None and "class Solution" in starter_code:
        # the GeeksforGeeks part: "n = 5\narr[] = {1, 2}" as input of a method that nothing names
        raise UnusableRecord("starter_code asks for a method, input_output names none")
    tests, total, wrapped = _tests(found, fn_name, max_tests, max_test_bytes)
    truth: dict[str, Any] = {
        "inputs": [test.input for test in tests],
        "outputs": [test.output for test in tests],
    }
    if fn_name is not None:
        truth |= {"fn_name": fn_name} | ({"outputs_wrapped": True} if wrapped else {})
    extras: dict[str, Any] = {} if fn_name is not None else {"example_input": tests[0].input}
    extras |= {
        "tests": total,
        "tests_kept": len(tests),
        "test_bytes": sum(test.size_bytes for test in tests),
    }
    return Row(
        data_source=source,
        agent_name=agent,
        question=_prompt(question, starter_code, fn_name),
        ability="code",
        ground_truth=truth,
        split=split,
        index=index,
        row_id=row_id(source, record),
        extras=extras | _about(record, level),
    )


def _prompt(question: str, starter_code: str, fn_name: str | None) -> str:
    parts = [question]
    if starter_code:
        parts.append(f"```python\n{starter_code}\n```")
    if fn_name is not None:
        parts.append(_FUNCTION_PROMPT.format(fn_name=fn_name))
    return "\n\n".join(parts)


# --- tests --------------------------------------------------------------------------------------


def _input_output(content: object) -> Mapping[str, Any]:
    """The object in the cell; what is broken in it is so in the public data."""
    if is_blank(content):
        raise UnusableRecord("input_output is empty")
    if isinstance(content, str):
        try:
            content = json.loads(content, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise UnusableRecord("input_output is broken JSON") from error
        if not isinstance(content, dict):
            raise UnusableRecord("input_output is no object")
    if not isinstance(content, Mapping):
        raise bad("input_output", content, "must be JSON text or an object")
    return cast(Mapping[str, Any], content)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _tests(
    found: Mapping[str, Any], fn_name: object, max_tests: int, max_test_bytes: int
) -> tuple[list[_Test], int, bool]:
    """The tests to keep, how many there are, and whether results stood in lists of their own."""
    inputs, outputs = items_of(found.get("inputs")), items_of(found.get("outputs"))
    if not inputs or not outputs:
        raise UnusableRecord("input_output has no tests")
    if len(inputs) != len(outputs):
        raise UnusableRecord("input_output has another number of outputs than of inputs")
    wrapped = False
    if fn_name is None:
        make = _text_test
    elif isinstance(fn_name, str) and fn_name.isidentifier():
        make = _call_test
        wrapped = _wrapped(inputs, outputs)
        if wrapped:
            outputs = [output[0] for output in outputs]
    else:
        raise UnusableRecord("fn_name of input_output is no name of a function")
    kept: list[_Test] = []
    left = max_test_bytes
    for given, wanted in zip(inputs, outputs, strict=True):
        test = make(given, wanted)
        if test.size_bytes <= left:
            kept.append(test)
            left -= test.size_bytes
        if len(kept) == max_tests:
            break
    if not kept:
        raise UnusableRecord("every test is larger than max_test_bytes")
    if fn_name is None and not any(test.output.strip() for test in kept):
        raise UnusableRecord("every test expects empty output")  # any program would pass
    return kept, len(inputs), wrapped


def _text_test(given: object, wanted: object) -> _Test:
    stdin, stdout = _lines(given), _lines(wanted)
    return _Test(input=stdin, output=stdout, size_bytes=_size(stdin) + _size(stdout))


def _lines(item: object) -> str:
    """A test's text; some records hold a list of lines in its place, or a number."""
    lines = items_of(item)
    texts = [item] if lines is None else lines
    if any(isinstance(text, bool) or not isinstance(text, str | int | float) for text in texts):
        raise UnusableRecord("a test of input_output is neither text nor lines")
    return "\n".join(map(str, texts))


def _call_test(given: object, wanted: object) -> _Test:
    """Arguments and result; those that are text hold a line of JSON for each argument."""
    arguments = items_of(given)
    try:
        if arguments is None:
            if not isinstance(given, str):
                raise UnusableRecord("arguments of input_output are neither a list nor text")
            lines = given.strip().split("\n") if given.strip() else []
            arguments = [json.loads(line, parse_constant=_no_constant) for line in lines]
            if isinstance(wanted, str):
                wanted = json.loads(wanted, parse_constant=_no_constant)
        size = len(json.dumps([arguments, wanted], allow_nan=False))
    except UnusableRecord:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise UnusableRecord("arguments or results of input_output are not JSON") from error
    return _Test(input=arguments, output=wanted, size_bytes=size)


def _wrapped(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Whether each result stands in a list of its own, beside arguments that are lists."""
    return all(items_of(given) is not None for given in inputs) and all(
        isinstance(output, list) and len(cast(list[Any], output)) == 1 for output in outputs
    )


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


# --- what else is known -------------------------------------------------------------------------


def _about(record: Mapping[str, Any], difficulty: str) -> dict[str, Any]:
    """Columns that rewards and reports may ask for; those that are empty are left out."""
    about: dict[str, Any] = {"difficulty": difficulty}
    for field in ("tags", "raw_tags", "skill_types"):
        about[field] = _list_of(field, record.get(field))
    for field in ("name", "source", "url"):
        about[field] = text_of(field, record.get(field))
    for field, unit, units in (
        ("time_limit", "s", _SECONDS),
        ("memory_limit", "mb", _MEGABYTES),
    ):
        value = record.get(field)
        quantity = _quantity(field, value, units)
        about |= {field: value} if quantity is None else {f"{field}_{unit}": quantity}
    return {name: value for name, value in about.items() if value not in (None, "", [])}


def _list_of(field: str, value: object) -> list[str] | str:
    """The public data has Python's way of writing a list; what is broken stays the text it is."""
    items = items_of(value)
    if items is not None:
        return [text_of(field, item) for item in items]
    text = text_of(field, value)
    listed = literal_list(text)
    return text if listed is None else listed


def _quantity(field: str, value: object, units: Mapping[str, float]) -> float | None:
    """`2.0 seconds` is 2.0; None where the text says something else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = _QUANTITY.fullmatch(text_of(field, value))
    if found is None:
        return None
    unit = found[2].lower()
    factor = units.get(unit, units.get(unit.removesuffix("s")))
    return None if factor is None else float(found[1]) * factor


# --- options ------------------------------------------------------------------------------------


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number


def _difficulties(words: str) -> tuple[str, ...]:
    """`EASY,MEDIUM`, in any case."""
    names = tuple(word.strip().upper() for word in words.split(",") if word.strip())
    if unknown := [name for name in names if name not in DIFFICULTIES]:
        raise ValueError(f"{', '.join(unknown)} is none of {', '.join(DIFFICULTIES)}")
    return names


KIND = Kind(
    name=SOURCE,
    agent=AGENT,
    to_row=to_row,
    help="TACO: the 17 public columns, with tests for programs or functions",
    options=(
        Option(name="max_tests", type=_count, default=MAX_TESTS, help="tests of a row at most"),
        Option(
            name="max_test_bytes",
            type=_count,
            default=MAX_TEST_BYTES,
            help="size of a row's tests together at most",
        ),
        Option(
            name="difficulty",
            type=_difficulties,
            default=(),
            help="only problems of these, as EASY,MEDIUM; all by default",
        ),
    ),
)

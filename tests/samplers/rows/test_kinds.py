"""Each kind of data: the corners of its public schema, and what is refused with which words."""

import json
import math as maths
import sys
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplers.kind import BadRecord, Kind, UnusableRecord
from samplers.rows.schema import Row, columns_of
from samplers.rows.sources import KINDS, kind_of, taco
from samplers.rows.sources.math import boxed_answer

READ = sorted(name for name, kind in KINDS.items() if kind.records is None)
"""The kinds that read their records from files."""


def row_of(kind: str, record: Mapping[str, Any], **options: Any) -> Row:
    return KINDS[kind].to_row(record, split="train", index=0, **options)


def taco_record(**columns: Any) -> dict[str, Any]:
    """A problem in the 17 public columns."""
    filled: dict[str, Any] = dict.fromkeys(taco.COLUMNS)
    filled |= {"question": "Add one.", "starter_code": "", "solutions": '["print(2)"]'}
    filled |= {"input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})}
    return filled | columns


def cell_of(inputs: object, outputs: object, fn_name: object = None) -> str:
    found = {"inputs": inputs, "outputs": outputs}
    return json.dumps(found if fn_name is None else found | {"fn_name": fn_name})


# --- taco ---------------------------------------------------------------------------------------


def test_a_list_of_lines_and_a_number_are_the_text_of_a_test() -> None:
    cell = cell_of(["1\n", ["2", "3"], 4], ["2\n", ["x", "y"], 5])

    row = row_of("taco", taco_record(input_output=cell))

    assert row.ground_truth == {"inputs": ["1\n", "2\n3", "4"], "outputs": ["2\n", "x\ny", "5"]}
    assert row.extras["example_input"] == "1\n"


def test_the_tests_may_be_an_object_already(tmp_path: Path) -> None:
    record = taco_record(input_output={"inputs": ["1"], "outputs": ["2"], "fn_name": None})
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "raw.parquet")
    (read,) = pq.read_table(tmp_path / "raw.parquet").to_pylist()

    assert row_of("taco", read).ground_truth == {"inputs": ["1"], "outputs": ["2"]}


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (None, "is empty"),
        ("", "is empty"),
        ("{", "broken JSON"),
        ('{"inputs": [NaN], "outputs": [1]}', "broken JSON"),
        ('{"inputs": [' + "9" * 5000 + '], "outputs": [1]}', "broken JSON"),
        ("[" * 100_000, "broken JSON"),
        ("[1]", "no object"),
        ("null", "no object"),
        ("{}", "no tests"),
        (cell_of([], []), "no tests"),
        (cell_of("1", "2"), "no tests"),
        (cell_of(["1", "2"], ["2"]), "another number of outputs"),
        (cell_of([None], ["2"]), "neither text nor lines"),
        (cell_of(["1"], [{"a": 1}]), "neither text nor lines"),
        (cell_of([["1", ["2"]]], ["2"]), "neither text nor lines"),
        (cell_of(["1"], [" \n"]), "expects empty output"),
        (cell_of([[1]], [2], fn_name="not a name"), "no name of a function"),
        (cell_of([[1]], [2], fn_name=["f"]), "no name of a function"),
        (cell_of([1], [2], fn_name="f"), "neither a list nor text"),
        (cell_of(["n = 5"], ["2"], fn_name="f"), "are not JSON"),
    ],
)
def test_broken_tests_are_unusable(cell: str | None, why: str) -> None:
    with pytest.raises(UnusableRecord, match=why):
        row_of("taco", taco_record(input_output=cell))


@pytest.mark.parametrize(
    ("inputs", "outputs", "wanted_inputs", "wanted_outputs"),
    [
        ([["121"]], [True], [["121"]], [True]),  # as LeetCode's
        ([[[1, 2], 2]], [[0, 1]], [[[1, 2], 2]], [[0, 1]]),
        (['[1, 2]\n"a"', "[]\n0"], ["3", "[]"], [[[1, 2], "a"], [[], 0]], [3, []]),
        (["", '"\u2028"'], ["1", "2"], [[], ["\u2028"]], [1, 2]),  # no arguments; no end of line
        ([[{"1": 2}]], [{"1": 2}], [[{"1": 2}]], [{"1": 2}]),
        ([["a"], ["b"]], [[1], [1, 2]], [["a"], ["b"]], [[1], [1, 2]]),  # lists of any length
    ],
)
def test_calls_are_arguments_and_results(
    inputs: Any, outputs: Any, wanted_inputs: Any, wanted_outputs: Any
) -> None:
    row = row_of("taco", taco_record(input_output=cell_of(inputs, outputs, fn_name="solve")))

    assert row.ground_truth == {
        "inputs": wanted_inputs,
        "outputs": wanted_outputs,
        "fn_name": "solve",
    }
    assert "example_input" not in row.extras


def test_results_in_lists_of_their_own_are_taken_out_and_that_is_said() -> None:
    cell = cell_of([[1, 2], [3, 4]], [[3], [[7]]], fn_name="add")

    truth = row_of("taco", taco_record(input_output=cell)).ground_truth

    assert (truth["outputs"], truth["outputs_wrapped"]) == ([3, [7]], True)


def test_a_function_is_named_in_the_prompt_with_the_code_to_start_from() -> None:
    record = taco_record(
        input_output=cell_of([[1]], [[2]], fn_name="inc"), starter_code="\ndef inc(n):\n\t"
    )

    assert row_of("taco", record).question == (
        "Add one.\n\n```python\ndef inc(n):\n```\n\n"
        "Your program is judged by calling `inc` and comparing what it returns."
    )


def test_a_method_that_no_test_names_is_unusable() -> None:
    record = taco_record(starter_code="#User function\n\nclass Solution:\n    def f(self, n):")

    with pytest.raises(UnusableRecord, match="names none"):
        row_of("taco", record)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    max_tests=st.integers(1, 6),
    max_test_bytes=st.integers(2, 80),
)
def test_the_first_tests_that_fit_are_kept(
    sizes: list[int], max_tests: int, max_test_bytes: int
) -> None:
    inputs = [f"{number:x}" * size for number, size in enumerate(sizes)]
    record = taco_record(input_output=cell_of(inputs, ["y"] * len(inputs)))
    wanted: list[str] = []
    for text in inputs:
        fits = sum(len(kept) + 1 for kept in wanted) + len(text) + 1 <= max_test_bytes
        if fits and len(wanted) < max_tests:
            wanted.append(text)

    caps = {"max_tests": max_tests, "max_test_bytes": max_test_bytes}
    if not wanted:
        with pytest.raises(UnusableRecord, match="larger than max_test_bytes"):
            row_of("taco", record, **caps)
        return
    row = row_of("taco", record, **caps)

    assert row.ground_truth["inputs"] == wanted
    assert (row.extras["tests"], row.extras["tests_kept"]) == (len(inputs), len(wanted))
    assert row.extras["test_bytes"] == sum(len(text) + 1 for text in wanted) <= max_test_bytes


def test_a_cell_of_50_mb_becomes_a_row_of_what_fits() -> None:
    cell = cell_of(["1 " * 25_000_000, "ü"], ["1", "2"])

    row = row_of("taco", taco_record(input_output=cell))

    assert row.ground_truth == {"inputs": ["ü"], "outputs": ["2"]}
    assert (row.extras["tests"], row.extras["tests_kept"], row.extras["test_bytes"]) == (2, 1, 3)


def test_what_is_known_of_a_problem_is_kept() -> None:
    record = taco_record(
        difficulty="EASY",
        tags="['Greedy', \"Euler's\"]",
        raw_tags="[]",
        skill_types=["Sorting"],
        source="codeforces",
        url="https://example.org/1",
        name=" ",
        time_limit="2.0 seconds",
        memory_limit="256.0 megabytes",
    )

    extras = row_of("taco", record).extras

    for computed in ("example_input", "tests", "tests_kept", "test_bytes"):
        del extras[computed]  # type: ignore[attr-defined]
    assert extras == {
        "difficulty": "EASY",
        "tags": ["Greedy", "Euler's"],
        "skill_types": ["Sorting"],
        "source": "codeforces",
        "url": "https://example.org/1",
        "time_limit_s": 2.0,
        "memory_limit_mb": 256.0,
    }


@pytest.mark.parametrize(
    "tags",
    [
        "['open",
        "[__import__('os').getcwd()]",
        "[" * 5000,
        "['a', 1]",
        r"['\d']x",
        "[" + "'a'," * 50000,
    ],
)
def test_tags_that_are_no_list_of_texts_stay_what_they_are_and_nothing_in_them_runs(
    tags: str,
) -> None:
    assert row_of("taco", taco_record(tags=tags)).extras["tags"] == tags


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        ("1 second", {"time_limit_s": 1.0}),
        ("0.5 sec.", {"time_limit_s": 0.5}),
        ("500 ms", {"time_limit_s": 0.5}),
        (3, {"time_limit_s": 3.0}),
        ("0.5 - 1 seconds", {"time_limit": "0.5 - 1 seconds"}),
        (None, {}),
    ],
)
def test_a_time_limit_is_read_where_it_can_be(limit: object, wanted: dict[str, Any]) -> None:
    extras = row_of("taco", taco_record(time_limit=limit)).extras

    assert {key: extras[key] for key in extras if key.startswith("time_limit")} == wanted


def test_problems_of_another_difficulty_are_left_out() -> None:
    (option,) = [option for option in taco.KIND.options if option.name == "difficulty"]
    wanted = option.type("easy, MEDIUM")

    assert row_of("taco", taco_record(difficulty="EASY"), difficulty=wanted)
    with pytest.raises(UnusableRecord, match="not one of those asked for"):
        row_of("taco", taco_record(difficulty="HARD"), difficulty=wanted)
    with pytest.raises(ValueError, match="SIMPLE is none of EASY, MEDIUM"):
        option.type("EASY,SIMPLE")


# --- nq -----------------------------------------------------------------------------------------

PROMPT = [{"role": "user", "content": "Answer it. Question: who wrote it?"}]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "who wrote it?", "answer": ["Ann Lee", "A. Lee"]},  # nq_open
        {"question": "who wrote it?", "answer": "['Ann Lee', 'A. Lee']"},  # as csv
        {"question": "who wrote it?", "answer": '["Ann Lee", "A. Lee"]'},
        {"id": "train_0", "question": "who wrote it?", "golden_answers": ["Ann Lee", "A. Lee"]},
        {"question": "who wrote it?", "golden_answers": np.array(["Ann Lee", "A. Lee"])},
        {"question": "who wrote it?", "answer": None, "golden_answers": ["Ann Lee", "A. Lee", ""]},
        {"prompt": PROMPT, "reward_model": {"ground_truth": {"target": ["Ann Lee", "A. Lee"]}}},
        {
            "prompt": np.array(PROMPT),
            "reward_model": {"ground_truth": {"target": np.array(["Ann Lee", "A. Lee"])}},
        },
        {
            "prompt": json.dumps(PROMPT),
            "reward_model": {"ground_truth": json.dumps({"target": ["Ann Lee", "A. Lee"]})},
        },
    ],
)
def test_every_public_form_of_nq_is_read(record: dict[str, Any]) -> None:
    row = row_of("nq", record)

    assert row.ground_truth == {"target": ["Ann Lee", "A. Lee"]}
    assert row.question == record.get("question", PROMPT[0]["content"])
    assert row.extras == ({"id": "train_0"} if "id" in record else {})
    assert columns_of([row]).num_rows == 1


def test_one_answer_may_be_a_text_or_a_number() -> None:
    assert row_of("nq", {"question": "?", "answer": " Ann "}).ground_truth == {"target": ["Ann"]}
    assert row_of("nq", {"question": "?", "answer": [1972]}).ground_truth == {"target": ["1972"]}
    truth = {"ground_truth": {"target": "[sic"}}
    assert row_of("nq", {"question": "?", "reward_model": truth}).ground_truth == {
        "target": ["[sic"]
    }


def test_a_prompt_of_several_messages_is_kept_whole() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, *PROMPT]
    row = row_of("nq", {"prompt": prompt, "reward_model": {"ground_truth": {"target": "x"}}})

    assert (row.question, row.messages) == (PROMPT[0]["content"], prompt)
    assert columns_of([row]).to_pylist()[0]["prompt"] == prompt


# --- math ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{7}", "7"),
        (r"a \boxed{1} b \boxed{\sqrt{2}}", r"\sqrt{2}"),
        (r"\boxed 9$ is", "9"),
        (r"\boxed{unclosed", None),
        (r"\boxed{1} then \boxed{unclosed", "1"),
        (r"\boxed{1} then \boxed{ }", "1"),
        (r"\boxed{1} then \boxed", "1"),
        (r"\fbox{3}", "3"),
        (r"\fboxsep3pt \boxed{4}", "4"),
        (r"\boxed{4} \boxedtext{5}", "4"),
        (r"\boxed  {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\} b}", r"a \\"),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"{\boxed{\frac{1}{2}}} }", r"\frac{1}{2}"),
        (r"\boxed\frac12 $", r"\frac12"),
        ("none", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_balanced_box(solution: str, answer: str | None) -> None:
    assert boxed_answer(solution) == answer


PIECES = st.sampled_from(["\\boxed", "\\fbox", "{", "}", "\\{", "\\\\", "x", " ", "$"])


@given(st.lists(PIECES, max_size=20), st.text("abc^_0123", min_size=1))
def test_a_balanced_box_after_anything_is_the_answer(before: list[str], content: str) -> None:
    assert boxed_answer("".join(before) + f" \\boxed{{{content}}}") == content


def test_boxes_are_read_in_one_pass() -> None:
    assert boxed_answer("\\boxed{1}" + "\\boxed{" * 300_000) == "1"  # hours, box by box


@pytest.mark.parametrize(
    ("change", "answer", "extras"),
    [
        ({}, "2", {"level": 5, "type": "Algebra"}),
        ({"level": "Level ?"}, "2", {"type": "Algebra"}),
        ({"level": 3, "type": None, "subject": "Geometry"}, "2", {"level": 3, "type": "Geometry"}),
        ({"answer": "another"}, "2", {"level": 5, "type": "Algebra"}),
        ({"solution": "So 4.", "answer": "4"}, "4", {"level": 5, "type": "Algebra"}),
        ({"solution": None, "answer": 4}, "4", {"level": 5, "type": "Algebra"}),
    ],
)
def test_math_and_its_offspring_are_read(
    change: dict[str, Any], answer: str, extras: dict[str, Any]
) -> None:
    record = {"problem": "1+1?", "level": "Level 5", "type": "Algebra", "solution": r"\boxed{2}"}

    row = row_of("math", record | change)

    assert (row.ground_truth, row.extras) == ({"answer": answer}, extras)


def test_a_solution_without_an_answer_is_unusable() -> None:
    with pytest.raises(UnusableRecord, match="no \\\\boxed"):
        row_of("math", {"problem": "1+1?", "solution": "two", "answer": None})


# --- json ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        ("72", ["72"]),
        (72, ["72"]),
        (0.5, ["0.5"]),
        (Decimal("1.50"), ["1.50"]),
        (np.int64(3), ["3"]),
        (True, ["true"]),
        (["a", 1, False, " "], ["a", "1", "false"]),
        (0, ["0"]),
    ],
)
def test_an_answer_serves_rewards_of_one_and_of_several(answer: Any, target: list[str]) -> None:
    row = row_of("json", {"question": "how many?", "answer": answer})

    assert row.ground_truth == {"answer": target[0], "target": target}


def test_other_entries_are_kept_under_their_own_names() -> None:
    more = {"task_id": 111, "price_upper": 30.0, "goals": ["a", {"b": None}], "id": "x"}

    row = row_of("json", {"question": "find it", "answer": "yes", **more})

    assert row.extras == more


def test_entries_that_json_lacks_are_written_without_loss() -> None:
    record: dict[str, Any] = {
        "question": "?",
        "answer": "x",
        "day": date(2024, 2, 29),
        "price": Decimal("1.5"),
        "exact": Decimal("0.1000000000000000000000001"),
        "whole": Decimal("12345678901234567890123"),
        "board": np.array([[1, 2], [3, 4]]),
        "pair": (np.float64(0.5), np.bool_(True)),
        "half": "\ud800",
    }

    row = row_of("json", record)

    assert row.extras == {
        "day": "2024-02-29",
        "price": 1.5,
        "exact": "0.1000000000000000000000001",
        "whole": 12345678901234567890123,
        "board": [[1, 2], [3, 4]],
        "pair": [0.5, True],
        "half": "\ud800",
    }
    assert json.loads(columns_of([row]).to_pylist()[0]["extra_info"]["extras"]) == row.extras


def test_fields_can_be_mapped() -> None:
    record = {"query": "how many?", "gold": 4, "question": "kept", "chat": ""}
    mapping = {"question_field": "query", "answer_field": "gold", "messages_field": "chat"}

    row = row_of("json", record, **mapping)

    assert (row.question, row.ground_truth["answer"]) == ("how many?", "4")
    assert row.extras == {"question": "kept"}


def test_records_without_answers_are_read_when_told() -> None:
    row = row_of("json", {"question": "boil water", "task_name": "boil"}, answer_field="")

    assert (row.ground_truth, row.extras) == ({}, {"task_name": "boil"})


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "go on"},
    {"role": "user", "content": "last"},
]


@pytest.mark.parametrize("given_as", [MESSAGES, json.dumps(MESSAGES), np.array(MESSAGES)])
def test_messages_go_before_the_question(given_as: Any) -> None:
    row = row_of("json", {"question": "same", "messages": given_as, "answer": "x"})

    assert (row.question, row.messages) == ("last", MESSAGES)
    assert row.extras == {"question": "same"}
    assert columns_of([row]).to_pylist()[0]["prompt"] == MESSAGES


def test_parts_of_text_are_one_message() -> None:
    parts = [{"type": "text", "text": "Look."}, {"type": "text", "text": "What is it?"}]

    row = row_of("json", {"messages": [{"role": "user", "content": parts}], "answer": "a dog"})

    assert (row.question, row.messages) == ("Look.\nWhat is it?", ())


# --- what is refused ----------------------------------------------------------------------------

Q = {"question": "who?"}
DEEP: Any = []
for _ in range(sys.getrecursionlimit() + 10):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        ("taco", {"question": "x"}, "column input_output is missing: the record has ['question']"),
        ("taco", {}, "column question is missing: the record has []"),
        ("taco", taco_record(question=5), "question=5: must be text"),
        ("taco", taco_record(input_output=5), "input_output=5: must be JSON text or an object"),
        ("taco", taco_record(starter_code=[]), "starter_code=[]: must be text"),
        ("taco", taco_record(tags=7), "tags=7: must be text"),
        ("taco", taco_record(question="\ud800"), "question='\\ud800': must be Unicode"),
        ("nq", Q, "column answer or golden_answers or reward_model is missing"),
        ("nq", {"answer": "x"}, "column question or prompt is missing"),
        ("nq", {"question": " ", "answer": "x"}, "question=' ': must not be empty"),
        ("nq", Q | {"answer": []}, "answer=[]: must hold an answer"),
        ("nq", Q | {"answer": "[]"}, "answer=[]: must hold an answer"),
        ("nq", Q | {"answer": None}, "answer=None: must hold an answer"),
        ("nq", Q | {"answer": ["", " "]}, "answer=['', ' ']: must hold an answer"),
        ("nq", Q | {"answer": [["a"]]}, "answer=['a']: must be text, a number, or a list of those"),
        ("nq", Q | {"reward_model": 3}, "reward_model=3: must be an object with ground_truth"),
        ("nq", Q | {"reward_model": "{"}, "reward_model='{': must be JSON"),
        (
            "nq",
            Q | {"reward_model": {"ground_truth": {}}},
            "reward_model.ground_truth.target=None: must hold an answer",
        ),
        ("math", {"problem": "1+1?"}, "column solution is missing"),
        ("math", {"problem": "", "solution": "x"}, "problem='': must not be empty"),
        ("math", {"problem": "1", "solution": 2}, "solution=2: must be text"),
        ("math", {"problem": "1", "solution": r"\boxed{1}", "level": []}, "level=[]: must be text"),
        ("json", Q, "column answer is missing: the record has ['question']"),
        ("json", Q | {"answer": maths.nan}, "answer=nan: must be text, a number"),
        ("json", Q | {"answer": {"a": 1}}, "answer={'a': 1}: must be text, a number"),
        ("json", Q | {"answer": "x", "blob": b"ab"}, "blob=b'ab': must be JSON, not bytes"),
        ("json", Q | {"answer": "x", "n": [maths.inf]}, "n[0]=inf: must be a finite number"),
        ("json", Q | {"answer": "x", "m": {"k": {3: 1}}}, "key of m.k=3: must be text"),
        ("json", Q | {"answer": "x", None: ["y"]}, "key of the record=None: must be text"),
        ("json", Q | {"answer": "x", "deep": DEEP}, "must not be nested that deeply"),
        ("json", {"answer": "x", "messages": "[{"}, "messages='[{': must be JSON"),
        ("json", {"answer": "x", "messages": []}, "column question is missing"),
        ("json", {"answer": "x", "messages": {}}, "messages={}: must be a list of messages"),
        (
            "json",
            {"answer": "x", "messages": ["hi"]},
            "messages[0]='hi': must have role and content",
        ),
        (
            "json",
            {"answer": "x", "messages": [{"role": "bot", "content": "hi"}]},
            "messages[0].role='bot': must be one of system, user, assistant",
        ),
        (
            "json",
            {"answer": "x", "messages": [{"role": "system", "content": "hi"}]},
            "must hold a message of the user",
        ),
        (
            "json",
            {"answer": "x", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content={'type': 'image'}: must be text: images",
        ),
        (
            "json",
            {"answer": "x", "messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
            "messages[0]=['tool_calls']: must have no more than role and content",
        ),
    ],
)
def test_a_cell_that_breaks_the_schema_is_named_with_value_and_rule(
    kind: str, record: dict[Any, Any], message: str
) -> None:
    with pytest.raises(BadRecord) as told:
        row_of(kind, record)

    assert message in str(told.value)
    assert len(str(told.value)) < 300
    assert told.value.reason
    str(told.value).encode()  # can be printed


def test_a_long_value_is_cut_in_the_message_and_absent_from_the_reason() -> None:
    with pytest.raises(BadRecord) as told:
        row_of("json", Q | {"answer": "x", "messages": "[" * 50_000_000})

    assert len(str(told.value)) < 200
    assert told.value.reason == "messages: must be JSON"


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)  # halves of surrogate pairs too
    | st.binary(max_size=4)
    | st.decimals()
    | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [*taco.COLUMNS, "answer", "golden_answers", "reward_model", "prompt", "messages", "problem"]
)


@given(st.sampled_from(READ), st.dictionaries(FIELDS, ANYTHING))
def test_any_record_becomes_a_row_that_can_be_written_or_is_refused_in_words(
    kind: str, record: dict[str, Any]
) -> None:
    full = taco_record(answer="x", problem="p", solution=r"\boxed{1}") | record
    before = repr(full)
    try:
        row = row_of(kind, full)
    except (BadRecord, UnusableRecord) as error:
        assert str(error)
    else:
        assert columns_of([row]).num_rows == 1
    assert repr(full) == before


# --- finding a kind -----------------------------------------------------------------------------

OWN = """
from samplers.kind import Kind
from samplers.rows.schema import Row, row_id

def to_row(record, *, split, index, source="riddles", agent="react_agent"):
    return Row(
        data_source=source, agent_name=agent, question=record["riddle"], ability="riddles",
        ground_truth={"answer": record["solution"]}, split=split, index=index,
        row_id=row_id(source, record), extras={},
    )

KIND = Kind(name="riddles", agent="react_agent", to_row=to_row, help="riddles")
"""


def test_a_kind_of_ones_own_is_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "riddles.py").write_text(OWN)

    kind = kind_of(str(tmp_path / "riddles.py"))
    row = kind.to_row({"riddle": "?", "solution": "!"}, split="train", index=0, source="mine")

    assert isinstance(kind, Kind) and kind.name == "riddles"
    assert (row.data_source, row.row_id.split(":")[0]) == ("mine", "mine")


def test_a_kind_of_ones_own_may_hold_what_looks_its_module_up(tmp_path: Path) -> None:
    looks_up = "from dataclasses import dataclass\n@dataclass\nclass Riddle:\n    text: str\n"
    (tmp_path / "own.py").write_text("from __future__ import annotations\n" + looks_up + OWN)

    assert kind_of(str(tmp_path / "own.py")).name == "riddles"


def test_a_kind_of_ones_own_can_import_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "riddles_beside.py").write_text(OWN)
    (tmp_path / "own.py").write_text("from riddles_beside import KIND")

    assert kind_of(str(tmp_path / "own.py")).name == "riddles"


def test_a_kind_is_found_by_its_name() -> None:
    assert sorted(KINDS) == ["json", "math", "nq", "reasoning_gym", "seeds", "taco"]
    assert all(kind_of(name) is kind for name, kind in KINDS.items())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no such file"),
        ("x = 1", "it has no KIND"),
        ("KIND = 'taco'", "its KIND is a str"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit('no')", "SystemExit: no"),
        ("raise OSError('two\\nlines')", "OSError: two lines"),
    ],
)
def test_a_file_without_a_kind_is_told(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "own.py"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ValueError, match=why) as told:
        kind_of(str(path))
    assert str(path) in str(told.value)


def test_an_unknown_kind_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="known are taco, nq, math, json, reasoning_gym, seeds"):
        kind_of("tacco")


@pytest.mark.parametrize("name", READ)
def test_source_and_agent_are_those_told(name: str) -> None:
    record = taco_record(answer="x", problem="p", solution=r"\boxed{1}")

    own, told = row_of(name, record), row_of(name, record, source="mine", agent="other")

    assert (own.data_source, own.agent_name) == (name, KINDS[name].agent)
    assert (told.data_source, told.agent_name) == ("mine", "other")
    assert told.row_id == "mine" + own.row_id.removeprefix(name)

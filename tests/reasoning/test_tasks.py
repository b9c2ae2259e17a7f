"""Every task of the real reasoning-gym: made, kept as JSON, judged in the confined processes."""

import asyncio
import importlib
import importlib.util
import json
import math
import os
import re
import socket
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pytest

from agent_loop.rewards import reasoning_gym
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.reasoning_gym import EVALUATES, PARSES, judged
from agent_loop.rewards.registry import reward_for
from samplers.rows.sources.reasoning_gym import records, to_row
from samplers.rows.sources.reasoning_tasks import REFUSED, TaskOptions, dataset_of
from samplers.rows.tagged_json import tagged, untagged
from verl_mixed.checks.config.answer_forms import wrong_answers

pytestmark = [
    *(pytest.mark.reasoning, pytest.mark.slow, pytest.mark.timeout(600)),
    # packages of tasks leave their files open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
if importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed here", allow_module_level=True)

factory: Any = importlib.import_module("reasoning_gym.factory")
DATASETS, has_curriculum = factory.DATASETS, factory.has_curriculum

TASKS = sorted(DATASETS.keys() - REFUSED.keys())
TRUSTED_EVALS = {
    "algorithmic/number_sorting.py",  # the entry's own answer
    "arithmetic/basic_arithmetic.py",  # when an item is made
    "arithmetic/bitwise_arithmetic.py",  # the entry's own problem
    "arithmetic/gsm_symbolic/generators_00_49.py",
    "arithmetic/gsm_symbolic/generators_50_99.py",
    "code/codeio.py",  # the package's own programs, when an item is made
}
MANY_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks without one answer in their entries."""


def score(function: Any, answer: Any, entry: Any) -> Any:
    try:
        return function(answer, entry)
    except Exception as error:
        return type(error)


def test_there_are_as_many_tasks_as_the_page_says() -> None:
    assert len(TASKS) == 104


@pytest.mark.parametrize("task", TASKS)
def test_an_entry_is_equal_and_scores_the_same_after_json(task: str) -> None:
    dataset = dataset_of(task, TaskOptions(), seed=11, size=8)
    scorer = factory.get_score_answer_fn(task)
    items = [dataset[number] for number in range(8)]
    for item, other in zip(items, items[1:] + items[:1], strict=True):
        back = untagged(json.loads(json.dumps(tagged(item), allow_nan=False)))
        assert back == item
        for answer in (item["answer"], other["answer"], "0", "", "abc", "1 2\n3 4", "[[1, 0]]"):
            assert score(scorer, answer, back) == score(dataset.score_answer, answer, item)


NO_LEVEL_1 = {"knight_swap", "modulo_grid"}
"""Tasks whose level 1 breaks the rules of their own config."""

CONFIGS = {
    "decimal_arithmetic": {"min_num_decimal_places": 9, "max_num_decimal_places": 9},
    "time_intervals": {"max_time_difference_seconds": 60, "max_date_difference_days": 2},
    "puzzle24": {"max_value": 6},
}
"""Of tasks whose scorers depend on the config, another config."""


@pytest.mark.parametrize(
    ("task", "level", "config"),
    [
        *(
            (task, 1 if has_curriculum(task) else None, {})
            for task in TASKS
            if task not in NO_LEVEL_1
        ),
        *((task, None, config) for task, config in CONFIGS.items()),
    ],
)
def test_a_row_is_judged_with_the_config_that_made_it(
    task: str, level: int | None, config: dict[str, Any]
) -> None:
    made = records(split="validation", task=task, level=level, config=config, val_size=4)
    rows = [to_row(record, split="validation", index=0) for record in made]
    truths = [json.loads(json.dumps(row.ground_truth, allow_nan=False)) for row in rows]
    dataset = dataset_of(task, TaskOptions(level=level, config=config), seed=3, size=8)
    entries = [untagged(truth["entry"]) for truth in truths]
    for truth, entry, other in zip(truths, entries, entries[1:] + entries[:1], strict=True):
        own = entry["answer"]
        for answer in (own, other["answer"], *near(own), "0", "", "abc", "1 2\n3 4", "(6+6)*(7-5)"):
            expected = score(dataset.score_answer, answer, entry)
            found = judged(truth, answer)
            assert found == expected or (math.isnan(found) and isinstance(expected, type))


def near(answer: Any) -> list[str]:
    """Answers that are almost right."""
    try:
        return [str(Decimal(answer) + Decimal(off)) for off in ("1e-8", "0.04", "1")]
    except (InvalidOperation, TypeError, ValueError):
        return [f"{answer} ", f"{answer}, 7", str(answer)[:-1]]


@pytest.mark.parametrize(("places", "off", "right"), [(9, "1e-8", 0.0), (1, "0.04", 1.0)])
def test_the_precision_of_decimals_is_that_of_the_row(places: int, off: str, right: float) -> None:
    config = {"min_num_decimal_places": places, "max_num_decimal_places": places}
    options: dict[str, Any] = {"task": "decimal_arithmetic", "config": config, "val_size": 1}
    [record] = records(split="validation", **options)
    truth = to_row(record, split="validation", index=0).ground_truth
    answer = str(Decimal(record["entry"]["answer"]) + Decimal(off))
    assert (judged(truth, answer) == 1.0) == (right == 1.0)
    assert judged(truth, record["entry"]["answer"]) == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_made_and_their_own_answers_score_one(task: str) -> None:
    options: dict[str, Any] = {"task": task, "size": 4, "val_size": 3}
    made = [
        to_row(record, split=split, index=0)
        for split in ("validation", "train")
        for record in records(split=split, **options)
    ]
    assert len({row.question for row in made}) == 7
    reward = reward_for("reasoning_gym")

    async def judge() -> list[float]:
        found: list[float] = []
        for row in made:
            truth = json.loads(json.dumps(row.ground_truth))
            assert reward.truth_problem(truth) is None
            answer = untagged(truth["entry"])["answer"] or "none"
            judged = await reward.judge(Attempt(answer=answer, ground_truth=truth), None)  # type: ignore[arg-type]
            assert not judged["timeout"]
            found.append(judged["score"])
            attempts = [Attempt(answer=w, ground_truth=truth) for w in wrong_answers(answer, [])]
            others = [await reward.judge(attempt, None) for attempt in attempts]  # type: ignore[arg-type]
            assert min(other["score"] for other in others) < 1.0
        return found

    scores = asyncio.run(judge())
    assert scores == [1.0] * 7 or task in MANY_ANSWERS, scores


BROKEN_LEVELS = {"knight_swap"}
"""Tasks whose lowest level breaks the rules of their own config."""


@pytest.mark.parametrize("task", sorted(BROKEN_LEVELS))
def test_a_level_that_the_task_itself_refuses_is_told(task: str) -> None:
    with pytest.raises(ValueError, match=r"with level=0 .* min_nodes must be >= 6"):
        dataset_of(task, TaskOptions(level=0), seed=5, size=2)


@pytest.mark.parametrize(
    "task", [task for task in TASKS if has_curriculum(task) and task not in BROKEN_LEVELS]
)
def test_every_other_curriculum_has_a_lowest_level(task: str) -> None:
    assert dataset_of(task, TaskOptions(level=0), seed=5, size=2)[0]["question"]
    assert factory.create_curriculum(task).name


def test_no_other_scorer_evaluates_an_answer() -> None:
    package = Path(str(importlib.util.find_spec("reasoning_gym").origin)).parent  # type: ignore[union-attr]
    evaluates, parses = set[str](), set[str]()
    for path in package.rglob("*.py"):
        name, text = str(path.relative_to(package)), path.read_text()
        if re.search(r"(?<![\w.])(eval|exec)\(", text):
            evaluates.add(name)
        if re.search(r"\b(sympify|parse_expr)\(|\bsp(y|ympy)?\.S\(", text):
            parses.add(name)
    ours = {f"{name.replace('.', '/')}.py" for name in EVALUATES}
    assert evaluates - TRUSTED_EVALS == ours
    assert parses - {"logic/propositional_logic.py"} == {
        f"{name.replace('.', '/')}.py" for name in PARSES
    }


HOSTILE = (
    "__import__('sys')._getframe(1).f_locals['entry']['answer']",
    "[__import__('os').system('touch {file}')]",
    "().__class__.__base__.__subclasses__()",
    "9**9**9**9",
    "(10**9999999)**9999",
    "[" * 3000,
    "1" * 20000,
    "\0",
)


@pytest.mark.parametrize(
    "task", [*(name.split(".")[1] for name in (*EVALUATES, *PARSES)), "chain_sum", "codeio", "bf"]
)
def test_a_hostile_answer_earns_nothing_and_does_nothing(task: str, tmp_path: Path) -> None:
    (row,) = (
        to_row(record, split="validation", index=0)
        for record in records(split="validation", task=task, val_size=1)
    )
    reward = reward_for("reasoning_gym")

    async def judge(answer: str) -> float:
        attempt = Attempt(answer=answer, ground_truth=json.loads(json.dumps(row.ground_truth)))
        return (await reward.judge(attempt, None))["score"]  # type: ignore[arg-type]

    for answer in HOSTILE:
        assert asyncio.run(judge(answer.format(file=tmp_path / "made"))) <= 0.05, answer
    assert asyncio.run(judge(row.ground_truth["entry"]["answer"])) == 1.0
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (open, ("/etc/passwd",)),
        (open, (f"{os.getcwd()}/pyproject.toml",)),
        (open, ("/tmp/written-by-a-scorer", "w")),
        (os.listdir, ("/proc/self",)),
        (socket.socket, ()),
        (os.fork, ()),
        (os.kill, (os.getpid(), 0)),
        (eval, ("open('/proc/self/environ').read()",)),
    ],
)
async def test_a_process_of_scorers_has_no_rights(function: Any, arguments: Any) -> None:
    with pytest.raises(OSError):
        await reasoning_gym._SCORER.run(function, *arguments)


async def test_a_process_of_scorers_has_no_environment() -> None:
    assert os.getenv("PATH")
    assert await reasoning_gym._SCORER.run(os.getenv, "PATH", "none") == "none"


async def test_what_hangs_or_fills_the_memory_is_ended() -> None:
    run = reasoning_gym._SCORER.run
    assert await run(eval, "[0 for i in iter(int, 1)]") is None  # Python that never ends
    assert await run(eval, "9**9**9") is None  # C that never ends: the kernel kills it
    with pytest.raises(MemoryError):
        await run(eval, "bytearray(8 << 30)")
    assert await run(eval, "1 + 1") == 2

r"""Three small generated datasets in the shapes of TACO, NQ and MATH, for the laptop profile.

Decides what the demo asks: one-line programs, authors of invented works, sums in words. Each is
easy for a model of half a million parameters that uses its tool, and next to impossible without:
the numbers are too awkward to guess and the works are invented. Records have the public datasets'
own columns and pass through the same readers. Pure functions of the seed.
"""

# JSON values and literals of mixed types, narrowed where they are used.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from samplers.rows.schema import write_rows
from samplers.rows.sources import KINDS, math, nq, taco


def _words(text: str) -> list[str]:
    return text.split()


TRAIN_ROWS = {taco.SOURCE: 2400, nq.SOURCE: 800, math.SOURCE: 2000}
DEMO_SOURCES = tuple(sorted(TRAIN_ROWS))
VALIDATION_ROWS = 100
HIDDEN_TESTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A raw record, and what a careful solver hands to the tool of its source."""

    record: dict[str, Any]
    work: str
    """The program, the search query or the expression."""

    fact: str
    """What validation must not share with training: the program, the work's title, the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoData:
    """Tasks of each source, and what can be searched."""

    train: dict[str, list[Task]]
    validation: dict[str, list[Task]]
    corpus: list[dict[str, str]]
    """Passages as Search-R1 has them: `id`, and `contents` (quoted title, line break, text)."""


def make_demo(seed: int) -> DemoData:
    """Generate the three datasets and the corpus.

    Args:
        seed: another seed gives other facts, another order and another split.

    Returns:
        Per source `TRAIN_ROWS[source]` training and `VALIDATION_ROWS` validation tasks that share
        no question and no fact.
    """
    rng = random.Random(f"demo:{seed}")
    works = _works(rng)
    pools = {
        taco.SOURCE: _taco_tasks(rng),
        nq.SOURCE: [_nq_task(*work) for work in works],
        math.SOURCE: _math_tasks(rng),
    }
    train, validation = {}, {}
    for source, tasks in pools.items():
        train[source], validation[source] = _split(tasks, TRAIN_ROWS[source], rng)
    return DemoData(train=train, validation=validation, corpus=_corpus(works))


def write_demo(data: DemoData, folder: Path) -> None:
    """Write `<source>_train.parquet`, `<source>_val.parquet` and `corpus.jsonl` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in data.train:
        for name, split, tasks in (
            ("train", "train", data.train[source]),
            ("val", "validation", data.validation[source]),
        ):
            rows = [
                KINDS[source].to_row(task.record, split=split, index=index)
                for index, task in enumerate(tasks)
            ]
            write_rows(folder / f"{source}_{name}.parquet", rows)
    with (folder / "corpus.jsonl").open("w") as file:
        for passage in data.corpus:
            file.write(json.dumps(passage, ensure_ascii=False) + "\n")


def _split(tasks: list[Task], train_rows: int, rng: random.Random) -> tuple[list[Task], list[Task]]:
    """Deal shuffled tasks into training and validation; a fact stays on one side."""
    shuffled = rng.sample(tasks, len(tasks))
    validation = shuffled[:VALIDATION_ROWS]
    held_out = {task.fact for task in validation}
    train = [task for task in shuffled[VALIDATION_ROWS:] if task.fact not in held_out]
    assert len(train) >= train_rows, f"only {len(train)} tasks for {train_rows} rows"
    return train[:train_rows], validation


# --- taco: one-line programs --------------------------------------------------------------------

_PROGRAMS: tuple[tuple[str, str, Callable[[int, int, int], int]], ...] = (
    # question, program, what it prints for n; the constants are j in 2..9 and k in 12..98
    ("n plus {k}", "print(int(input())+{k})", lambda n, j, k: n + k),
    ("n minus {k}", "print(int(input())-{k})", lambda n, j, k: n - k),
    ("n times {k}", "print(int(input())*{k})", lambda n, j, k: n * k),
    ("{k} minus n", "print({k}-int(input()))", lambda n, j, k: k - n),
    ("the remainder of n by {k}", "print(int(input())%{k})", lambda n, j, k: n % k),
    ("n times {j} plus {k}", "print(int(input())*{j}+{k})", lambda n, j, k: n * j + k),
    ("n times {j} minus {k}", "print(int(input())*{j}-{k})", lambda n, j, k: n * j - k),
    ("{k} plus n times {j}", "print({k}+int(input())*{j})", lambda n, j, k: k + n * j),
    ("{k} minus n times {j}", "print({k}-int(input())*{j})", lambda n, j, k: k - n * j),
)


def _taco_tasks(rng: random.Random) -> list[Task]:
    """Every program once, over all constants."""
    tasks = []
    for wanted, program, compute in _PROGRAMS:
        for j, k in product(range(2, 10) if "{j}" in program else [0], range(12, 99)):
            solution = program.format(j=j, k=k)
            numbers = rng.sample(range(11, 100), HIDDEN_TESTS)
            tests = {
                "inputs": [f"{n}\n" for n in numbers],
                "outputs": [f"{compute(n, j, k)}\n" for n in numbers],
            }
            question = f"Read an integer n and print {wanted.format(j=j, k=k)}."
            record = _taco_record(question, solution, tests)
            tasks.append(Task(record=record, work=solution, fact=solution))
    return tasks


def _taco_record(question: str, solution: str, tests: Mapping[str, list[str]]) -> dict[str, Any]:
    """The public dataset's 17 columns, in its order."""
    filled = {
        "question": question,
        "solutions": json.dumps([solution]),
        "starter_code": "",
        "input_output": json.dumps(tests),
        "difficulty": "EASY",
        "raw_tags": "[]",
        "source": "demo",
        "tags": "[]",
        "skill_types": "[]",
    }
    return {column: filled.get(column) for column in taco.COLUMNS}


# --- nq: authors of invented works --------------------------------------------------------------

_KINDS = {"wrote": "novel", "painted": "painting", "composed": "song", "built": "clock"}
_ADJECTIVES = _words(
    """
    Amber Ancient Autumn Broken Copper Crimson Crystal Distant Emerald Empty Frozen Gentle
    Golden Hidden Hollow Iron Ivory Jade Lonely Marble Midnight Misty Northern Paper Purple
    Quiet Sapphire Scarlet Secret Silent Silver Stolen Summer Velvet Violet Wandering Western
    Whispering Winter Wooden
    """
)
_NOUNS = _words(
    """
    Anchor Arrow Bridge Castle Circus Compass Desert Dragon Engine Falcon Feather Forest
    Fountain Garden Harbor Horizon Island Journey Kingdom Lantern Library Lighthouse Meadow
    Mirror Mountain Ocean Orchard Palace Raven River Shadow Station Temple Theatre Tower Valley
    Village Voyage Window Wizard
    """
)
_FIRST_NAMES = _words(
    """
    Ada Bruno Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Lukas Maria Nadia Oscar Paula
    Quentin Rosa Simon Tilda Ursula Victor Wanda Xavier Yvonne Zeno
    """
)
_LAST_NAMES = _words(
    """
    Abbott Barrow Carver Dalton Easton Fisher Garner Holloway Ingram Jarvis Keller Lambert
    Mercer Norwood Osborne Porter Quimby Ramsey Sawyer Thorne Upton Vance Walker Yardley Zeller
    """
)


def _works(rng: random.Random) -> list[tuple[str, str, str]]:
    """(title, verb, author) of every invented work; a title stands once."""
    count = TRAIN_ROWS[nq.SOURCE] + VALIDATION_ROWS
    titles = rng.sample([f"{a} {n}" for a, n in product(_ADJECTIVES, _NOUNS)], count)
    return [(title, rng.choice(list(_KINDS)), random_author(rng)) for title in titles]


def random_author(rng: random.Random) -> str:
    """A name of the kind that every author has."""
    return f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}"


def _nq_task(title: str, verb: str, author: str) -> Task:
    record = {"question": f"Who {verb} {title}?", "answer": [author]}
    return Task(record=record, work=title, fact=title)


def _corpus(works: list[tuple[str, str, str]]) -> list[dict[str, str]]:
    return [
        {"id": str(number), "contents": f'"{title}"\nA {_KINDS[verb]} by {author}.'}
        for number, (title, verb, author) in enumerate(works)
    ]


# --- math: sums in words ------------------------------------------------------------------------

_SUMS = (
    # problem, expression; a and b are numbers of `_operands`, c is one more
    ("What is {a} times {b}?", "{a}*{b}"),
    ("{who} has {a} boxes with {b} {things} each. How many {things} is that?", "{a}*{b}"),
    ("A ticket costs {a} coins. What do {b} tickets cost?", "{a}*{b}"),
    ("What is {a} plus {b}?", "{a}+{b}"),
    ("{who} has {a} {things} and finds {b} more. How many {things} is that?", "{a}+{b}"),
    ("What is {a} minus {b}?", "{a}-{b}"),
    ("{who} has {a} {things} and loses {b}. How many {things} are left?", "{a}-{b}"),
    ("What is {a} times {b} plus {c}?", "{a}*{b}+{c}"),
    ("{who} packs {a} bags of {b} {things} and keeps {c}. How many is that?", "{a}*{b}+{c}"),
)
_THINGS = _words(
    """
    apples beads books cards coins eggs pears plums shells stamps
    """
)


def _math_tasks(rng: random.Random) -> list[Task]:
    """Sums over all templates in equal parts, every expression once."""
    needed = 2 * (TRAIN_ROWS[math.SOURCE] + VALIDATION_ROWS)
    tasks: dict[str, Task] = {}
    while len(tasks) < needed:
        problem, pattern = _SUMS[len(tasks) % len(_SUMS)]
        a, b, c = _operands(pattern, rng)
        work = pattern.format(a=a, b=b, c=c)
        value = a * b + c if "{c}" in pattern else {"*": a * b, "+": a + b, "-": a - b}[pattern[3]]
        record = {
            "problem": problem.format(
                a=a, b=b, c=c, who=rng.choice(_FIRST_NAMES), things=rng.choice(_THINGS)
            ),
            "level": "Level 1",
            "type": "Prealgebra",
            "solution": f"${work} = \\boxed{{{value}}}$",
        }
        tasks.setdefault(work, Task(record=record, work=work, fact=work))
    return list(tasks.values())


def _operands(pattern: str, rng: random.Random) -> tuple[int, int, int]:
    """Numbers of two or three digits, with results above zero."""
    if "*" in pattern:
        return rng.randint(12, 99), rng.randint(12, 99), rng.randint(12, 99)
    first, second = rng.randint(112, 989), rng.randint(112, 989)
    return max(first, second) + 1, min(first, second), 0

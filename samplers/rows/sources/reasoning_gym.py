"""Tasks of reasoning-gym: rows that are made, with the entry that the task's own scorer judges by.

The ground truth of a row is `{"task": ..., "entry": {question, answer, metadata}, "config": ...}`.
The config has what differs from the task's defaults. `tagged_json` writes the entry and the config,
because scorers distinguish tuples and keys that are numbers. An `answer` of None is of a task with
many right answers. Validation questions are made first, and training rows leave them out: another
number of training rows leaves the validation rows as they are.

Source: Stojanovski et al. 2025, Reasoning Gym; the package reasoning-gym (Apache-2.0).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import ValidationError

from samplers.apportionment import apportion, exact_shares
from samplers.kind import Kind, Option
from samplers.rows.schema import Row, row_id
from samplers.rows.sources.reasoning_tasks import TaskOptions, config_of, distinct_items
from samplers.rows.tagged_json import tagged

SOURCE = "reasoning_gym"
AGENT = "math_agent"
SIZE, VAL_SIZE = 500, 50


def records(
    *,
    split: str,
    task: str | None = None,
    tasks: Mapping[str, Any] | list[str] | None = None,
    size: int = SIZE,
    val_size: int = VAL_SIZE,
    seed: int = 0,
    level: int | None = None,
    config: Mapping[str, Any] | None = None,
    question: str | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Make `{"task", "question", "entry", "config"}` of each row; see `samplers.kind.Maker`.

    Args:
        task: name of the only task, made with `level`, `config` and `question`.
        tasks: task -> its `weight`, `level`, `config` and `question`; or a list of names.
        size: number of training rows, shared out by weight in exact proportion.
        val_size: number of validation rows, shared out in the same way.
        seed: another seed gives other rows.
    """
    for name, number, least in (("size", size, 1), ("val_size", val_size, 1), ("seed", seed, 0)):
        whole = isinstance(number, int) and not isinstance(number, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not whole or number < least:
            raise ValueError(
                f"{name}={number!r} of kind='reasoning_gym': it is a whole number >= {least}"
            )
    own = {"level": level, "config": config or {}, "question": question}
    wanted = _wanted(task, tasks, own)
    seen = set[bytes]()
    validation = _made(wanted, "validation", val_size, seed, seen)
    if split == "validation":
        yield from validation
        return
    for _ in validation:  # their questions are in `seen` then
        pass
    yield from _made(wanted, "train", size, seed, seen)


def _wanted(task: object, tasks: object, own: Mapping[str, Any]) -> dict[str, TaskOptions]:
    """Task -> its options; `own` are those of the single `task`."""
    if (task is None) == (tasks is None):
        raise ValueError(
            f"task={task!r} and tasks={tasks!r} of kind='reasoning_gym': give one of them, as "
            "task=chain_sum or tasks=[chain_sum, gcd]"
        )
    if tasks is None:
        tasks = {task: own}
    elif given := [f"{name}={value!r}" for name, value in own.items() if value not in (None, {})]:
        raise ValueError(
            f"{', '.join(given)} of kind='reasoning_gym': this is of a single task; give each of "
            "tasks its own, as tasks={chain_sum: {level: 1}}"
        )
    if isinstance(tasks, list):
        tasks = cast("dict[Any, Any]", {name: {} for name in cast("list[Any]", tasks)})
    if not isinstance(tasks, Mapping) or not tasks:
        raise ValueError(
            f"tasks={tasks!r} of kind='reasoning_gym': it is a list of names, or task -> its "
            "weight, level, config and question"
        )
    wanted: dict[str, TaskOptions] = {}
    for name, options in cast("Mapping[Any, Any]", tasks).items():
        try:
            wanted[str(name)] = TaskOptions.model_validate(options or {})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ValueError(
                f"tasks.{name}.{key} of kind='reasoning_gym': {first['msg']}; a task has "
                f"{', '.join(TaskOptions.model_fields)}"
            ) from error
    return wanted


def _made(
    wanted: Mapping[str, TaskOptions], split: str, size: int, seed: int, seen: set[bytes]
) -> Iterator[Mapping[str, Any]]:
    """The rows of all tasks, each task spread evenly."""
    shares = exact_shares({name: options.weight for name, options in wanted.items()})
    counts = apportion(shares, size)
    if empty := [name for name, count in counts.items() if not count]:
        raise ValueError(
            f"none of {size} rows for split={split} falls to task={', '.join(empty)} of "
            "kind='reasoning_gym': ask for more rows (size, val_size), or leave the task out"
        )
    items = {
        name: distinct_items(name, wanted[name], seed=seed, split=split, count=count, seen=seen)
        for name, count in counts.items()
    }
    configs = {name: config_of(name, wanted[name]) for name in counts}
    places = [((2 * i + 1) / counts[name], name) for name in counts for i in range(counts[name])]
    for _, name in sorted(places):
        prompt, item = next(items[name])
        yield {"task": name, "question": prompt, "entry": item, "config": configs[name]}


def to_row(
    record: Mapping[str, Any],
    *,
    split: str,
    index: int,
    source: str = SOURCE,
    agent: str = AGENT,
    **_: Any,
) -> Row:
    """Turn one made record into a row."""
    task, question, entry = record["task"], record["question"], record["entry"]
    kept = {key: entry[key] for key in ("question", "answer", "metadata")}
    return Row(
        data_source=source,
        agent_name=agent,
        question=question,
        ability="reasoning",
        ground_truth={"task": task, "entry": tagged(kept), "config": record["config"]},
        split=split,
        index=index,
        row_id=row_id(source, {"task": task, "question": question}),
        extras={"task": task},
    )


# --- options ------------------------------------------------------------------------------------


def names_or_json_object(text: str) -> Any:
    """`chain_sum,gcd`, or a JSON object of tasks."""
    return json_object(text) if text.lstrip().startswith("{") else text.split(",")


def json_object(text: str) -> Any:
    """`{"max_terms": 3}`; argparse puts this function's name into its message."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text} is no JSON object")
    return cast("dict[str, Any]", found)


KIND = Kind(
    name=SOURCE,
    agent=AGENT,
    to_row=to_row,
    help="Tasks of reasoning-gym, made and not read, with the tasks' own scorers",
    records=records,
    package="reasoning-gym",
    modules=("samplers.rows.sources.reasoning_tasks", "samplers.rows.tagged_json"),
    extra="reasoning",
    options=(
        Option(name="task", type=str, default=None, help="name of the only task"),
        Option(
            name="tasks",
            type=names_or_json_object,
            default=None,
            help="several: names with commas, or a JSON object: task -> its weight, level, config "
            "and question",
        ),
        Option(name="size", type=int, default=SIZE, help="training rows"),
        Option(name="val_size", type=int, default=VAL_SIZE, help="rows with --split validation"),
        Option(name="seed", type=int, default=0, help="another seed gives other rows"),
        Option(name="level", type=int, default=None, help="level of the curriculum of --task"),
        Option(name="config", type=json_object, default=None, help="JSON object, of --task"),
        Option(name="question", type=str, default=None, help="as 'What is {expression}?'"),
    ),
)

"""The tasks of the package reasoning-gym: their configs, and distinct items of one task.

reasoning-gym (Stojanovski et al. 2025) makes the item with number i of a dataset of seed s from
`Random(s + i)`, so that datasets of neighbouring seeds share most items. The seeds here are hashes,
and no question is taken twice.
"""

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from typing import Any

from pydantic import Field

from config.section import Section
from samplers.rows.tagged_json import tagged

OWN = ("seed", "size")
"""Keys of every task's config that follow from the options of the source."""

REFUSED = {
    "composite": "it mixes other tasks and has none of its own; name those in tasks={...}",
    "game_of_life_halting": "its scorer (reasoning-gym 0.1.25) gives 1 to any answer, because it "
    "compares bool(answer) with the truth; take another task",
}
"""Task -> why it is refused. All others make their items from the files of the package."""

BLOCK = 256
"""Items of one dataset, that is of one seed. Some tasks make all items of a dataset at once."""

ATTEMPTS = 20
"""Items that are tried for each distinct one, before a task counts as exhausted."""


class TaskOptions(Section):
    """How one task makes its items."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the source's rows, relative to its other tasks."""

    level: int | None = Field(default=None, ge=0)
    """Level of the task's curriculum, from 0; above its highest level, the highest. None: the
    defaults of the task."""

    config: dict[str, Any] = Field(default={})
    """Keys of the task's own config, for example `{max_terms: 3}`; they win over the level."""

    question: str | None = None
    """The prompt, with names of the item's metadata or `question` in braces, for example
    `What is {expression}?`. None: the item's own question."""

    def prompt_of(self, task: str, item: Mapping[str, Any]) -> str:
        """The text of an item's prompt.

        Raises:
            ValueError: the item lacks a name, or the braces are wrong.
        """
        if self.question is None:
            return item["question"]
        names = {**item["metadata"], "question": item["question"]}
        known = {name: str(value) for name, value in names.items() if isinstance(value, str | int)}
        try:
            return self.question.format_map(known)
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(
                f"question={self.question!r} for task={task!r} of kind='reasoning_gym': {error!r}; "
                f"its items have {', '.join(sorted(known))}, each in braces"
            ) from error


def dataset_of(task: str, options: TaskOptions, seed: int, size: int) -> Any:
    """A dataset of a task, which has `size` items and their scorer.

    Raises:
        ValueError: the task or its config is wrong.
    """
    factory: Any = importlib.import_module("reasoning_gym.factory")
    known = sorted(factory.DATASETS)
    if task in REFUSED:
        raise ValueError(f"task={task!r} of kind='reasoning_gym': {REFUSED[task]}")
    if task not in known:
        near = get_close_matches(task, known, n=3, cutoff=0.4) or known
        raise ValueError(
            f"no task={task!r} of kind='reasoning_gym': correct it to one of {', '.join(near)}"
        )
    make, config_type = factory.DATASETS[task]
    given = _checked(task, options.config, config_type)
    try:
        config: Any = config_type(**given) if options.level is None else None
        if options.level is not None:
            if not factory.has_curriculum(task):
                raise ValueError("the task has no curriculum; leave the level out")
            curriculum = factory.create_curriculum(task)
            curriculum.set_global_level(options.level)
            config = replace(curriculum.generate_configuration(), **given)
        config = replace(config, seed=seed, size=size)
        if hasattr(config, "validate"):  # not every task has it
            config.validate()
        return make(config=config)
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"cannot make task={task!r} with level={options.level} and config={options.config}: "
            f"{' '.join(str(error).split()) or type(error).__name__}; its config is "
            f"{_allowed(config_type)}"
        ) from error


def config_of(task: str, options: TaskOptions) -> dict[str, Any]:
    """What the config of a task has of its level and of the given keys: each key whose value
    differs from the task's default. Some scorers depend on it.

    Raises:
        ValueError: the task or its config is wrong, or JSON cannot hold it.
    """
    config = dataset_of(task, options, 0, 1).config
    default = type(config)()
    names = [field.name for field in fields(config) if field.name not in OWN]
    found = {name: getattr(config, name) for name in names}
    changed = {name: value for name, value in found.items() if value != getattr(default, name)}
    try:
        return {name: tagged(value) for name, value in changed.items()}
    except TypeError as error:
        raise ValueError(
            f"cannot keep the config of task={task!r} for its scorer: {error}; leave this key out"
        ) from error


def _checked(task: str, given: Mapping[str, Any], config_type: Any) -> dict[str, Any]:
    """The given keys of a task's config."""
    names = {field.name for field in fields(config_type)} - {*OWN}
    for key in given:
        if key in OWN:
            raise ValueError(
                f"{key}={given[key]!r} in the config of task={task!r}: it follows from the "
                "source's own size, val_size and seed; set those"
            )
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            raise ValueError(
                f"no key {key!r} in the config of task={task!r}: "
                f"{f'did you mean {near[0]}? ' if near else ''}it has {_allowed(config_type)}"
            )
    return dict(given)


def _allowed(config_type: Any) -> str:
    """The keys of a task's config with their defaults, as text."""
    shown: list[str] = []
    for field in fields(config_type):
        if field.name in OWN:
            continue
        default: Any = field.default
        if default is MISSING:
            default = "" if field.default_factory is MISSING else field.default_factory()
        shown.append(f"{field.name}={default!r:.40}")
    return ", ".join(shown) or "no keys"


def distinct_items(
    task: str, options: TaskOptions, *, seed: int, split: str, count: int, seen: set[bytes]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `count` prompts and items of a task; no prompt is in `seen`, to which each is added.

    Args:
        seed: of the source; each seed, task and split has items of its own.
        seen: hashes of prompts.

    Raises:
        ValueError: the task has not so many questions, or it or its config is wrong.
    """
    named = hashlib.sha256(f"{seed} {task} {split}".encode()).digest()
    base, made, tried = int.from_bytes(named[:4], "big") >> 1, 0, 0
    while made < count:
        dataset = dataset_of(task, options, base + tried, BLOCK)
        for number in range(BLOCK):
            tried += 1
            item = dataset[number]
            prompt = options.prompt_of(task, item)
            digest = hashlib.sha1(prompt.encode("utf-8", "surrogatepass")).digest()
            if digest not in seen:
                seen.add(digest)
                made += 1
                yield prompt, item
            if made == count:
                return
        if tried >= ATTEMPTS * (count + BLOCK):
            raise ValueError(
                f"task={task!r} of kind='reasoning_gym' has only {made} new questions for split="
                f"{split} among {tried} items, and {count} are wanted: ask for fewer (size, "
                "val_size), or for a config with more questions (level, config)"
            )

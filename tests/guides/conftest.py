"""A folder with the data that the guides name, and what typed words become in it."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from verl_mixed.cli import parser_for
from verl_mixed.commands.arguments import config_overrides
from verl_mixed.launch.plan import Plan, make_plan

QA: list[dict[str, Any]] = [
    {"question": f"What is {n} + {n}?", "answer": str(2 * n), "id": f"{n}"} for n in range(8)
]
CONTEST: list[dict[str, Any]] = [
    {"id": "0", "question": "The roots of $p$ add up to $n$. Determine $n$.", "answer": "n = 4"},
    {"id": "1", "question": "How long is the chord $AB$?", "answer": "65"},
    *QA[2:],
]
"""As the rows of the training example: some answers are no plain numbers."""

OTHERS: list[dict[str, Any]] = [
    {"question": f"What is {n} * 7?", "answer": str(7 * n)} for n in range(100, 104)
]
CODE: list[dict[str, Any]] = [
    {"question": f"Write a program that prints {n} + {n}.", "answer": str(2 * n)} for n in range(8)
]

FILES: Mapping[str, list[dict[str, Any]]] = {
    "data/train.json": CONTEST,
    "data/val.json": [*OTHERS],
    "data/large_train.json": [*QA],
    "data/large_val.json": [*OTHERS],
    "data/rlhf/math/gsm8k_train.json": [*QA],
    "data/rlhf/math/gsm8k_test.json": [*OTHERS],
    "data/rlhf/qa/train_random_8000.json": [*QA],
    "data/rlhf/qa/dev_random_500.json": [*OTHERS],
    "data/rlhf/code/train.json": CODE,
    "data/rlhf/code/val.json": [{"question": "Write a program that prints 100.", "answer": "100"}],
}

GPU = {"PROFILE": "gpu", "SERPER_API_KEY": "not a key"}
"""The environment of a user of AgentFly's guides: a machine with GPUs, Serper as search engine."""

Planned = Callable[..., tuple[Plan, str]]
"""typed -> what a start would do, and the lines about the translation."""


@pytest.fixture(scope="session")
def guides_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guides")
    for name, rows in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows))
    return folder


@pytest.fixture
def planned(guides_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planned]:
    monkeypatch.chdir(guides_folder)
    for name, value in GPU.items():
        monkeypatch.setenv(name, value)
    yield _planned


@lru_cache(maxsize=64)
def _planned(typed: str) -> tuple[Plan, str]:
    screen = StringIO()
    words = shlex.split(typed)
    arguments = parser_for(["train"]).parse_args(["train", *words])
    with redirect_stdout(screen):
        plan = make_plan(config_overrides(arguments, screen), GPU)
    return plan, screen.getvalue()

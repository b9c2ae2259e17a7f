"""A package `reasoning_gym` of two toy tasks, for tests where the real one is not installed.

As the real one, an item with number i of a dataset of seed s is a function of s + i.
"""

import random
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class SumConfig:
    most: int = 1000
    few: bool = False
    near: float = 0.01
    """Score of a wrong number."""

    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.most > 0, "most must be positive"


class Sums:
    sign = "+"

    def __init__(self, config: SumConfig) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.config.seed is not None and index < self.config.size
        rng = random.Random(self.config.seed + index)
        a, b = rng.randint(0, self.config.most), rng.randint(0, self.config.most)
        return {
            "question": f"{a} {self.sign} {b}",
            "answer": str(a + b if self.sign == "+" else a - b),
            "metadata": {"pair": (a, b), "counts": {a: 1}, "pair_text": f"{a} and {b}"},
        }

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        assert isinstance(entry["metadata"]["pair"], tuple)
        return 1.0 if answer == entry["answer"] else self.config.near if answer.isdigit() else 0.0


class Differences(Sums):
    sign = "-"


class Curriculum:
    def set_global_level(self, level: int) -> None:
        self.level = level

    def generate_configuration(self) -> SumConfig:
        return SumConfig(most=10 ** (self.level + 2))


DATASETS = {"sums": (Sums, SumConfig), "differences": (Differences, SumConfig)}


def install_toy(monkeypatch: pytest.MonkeyPatch, version: str = "1.0") -> None:
    """Make the toy tasks those of the package, in this process."""
    factory: Any = ModuleType("reasoning_gym.factory")
    factory.DATASETS = DATASETS
    factory.has_curriculum = lambda task: task == "sums"
    factory.create_curriculum = lambda task: Curriculum()
    package: Any = SimpleNamespace(factory=factory)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    monkeypatch.setattr("samplers.rows.made_records.importlib.metadata.version", lambda _: version)

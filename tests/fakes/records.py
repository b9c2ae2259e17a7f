"""Records of a validation, as short to write as they are to read."""

import random
from collections.abc import Sequence

from agent_loop.records.evaluation_records import Record


def record(
    source: str = "nq",
    row: str = "0",
    sample: int = 0,
    reward: float = 1.0,
    *,
    acc: float | None = None,
    lost: bool = False,
    step: int = 0,
) -> Record:
    """A trajectory of two turns and one call; it solves its prompt if its reward is 1."""
    return Record(
        step=step,
        source=source,
        row_id=f"{source}:{row}",
        sample=sample,
        reward=reward,
        acc=float(reward >= 1) if acc is None else acc,
        lost=lost,
        stop_reason="infra_error" if lost else "answered",
        prompt_tokens=30,
        response_tokens=20,
        sampled_tokens=12,
        turns=2,
        tool_calls=1,
        fault="search: no answer" if lost else None,
        tokens=f"{source}{row}{sample}{reward}",
        question=f"What is {row}?",
    )


def of_policy(
    chances: Sequence[float], samples: int, seed: int, source: str = "nq", step: int = 0
) -> list[Record]:
    """A validation by a policy that solves prompt i with the probability `chances[i]`."""
    chance = random.Random(f"{source} {seed}")
    return [
        record(source, str(row), sample, float(chance.random() < p), step=step)
        for row, p in enumerate(chances)
        for sample in range(samples)
    ]

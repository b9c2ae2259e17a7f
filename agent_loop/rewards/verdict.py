"""The keys that every reward gives, see `agent_loop.rewards`."""


def verdict(score: float, *, acc: float | None = None) -> dict[str, float]:
    """Of an answer; `acc` is the score where they are one."""
    return {"score": score, "acc": score if acc is None else acc, "format": 1.0}


def no_answer() -> dict[str, float]:
    """Where there is nothing to judge."""
    return {"score": 0.0, "acc": 0.0, "format": 0.0}

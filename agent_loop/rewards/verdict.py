"""The keys that every reward returns; see `agent_loop.rewards`."""


def verdict(score: float, *, acc: float | None = None) -> dict[str, float]:
    """The result for an answer; `acc` defaults to the score."""
    return {"score": score, "acc": score if acc is None else acc, "format": 1.0}


def no_answer() -> dict[str, float]:
    """The result without an answer."""
    return {"score": 0.0, "acc": 0.0, "format": 0.0}

"""Mathematical answers: equal text first, then math-verify in processes that can be killed.

math-verify (Kydlicek 2025) parses with sympy, which can run for ever on hostile input; its own
alarms work in a main thread only. So it runs in a pebble pool with a deadline, started when first
needed.
"""

import asyncio
import multiprocessing
import re
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cache
from typing import Any

from pebble import ProcessExpired, ProcessPool

from agent_loop.rewards.verdict import no_answer, verdict
from agent_loop.tools.protocol import ToolBackend

VERIFY_TIMEOUT_S = 5.0
MAX_ANSWER_LENGTH = 2000
"""Characters; a longer answer is wrong."""

_BOXED = re.compile(r"^\\boxed\s*\{(.*)\}$", re.DOTALL)
_DROPPED = re.compile(r"\\(?:left|right|!|,|;|:|displaystyle)|[\s$]|(?<=\d),(?=\d{3}(?!\d))")


def normalise(text: str) -> str:
    """A form in which answers that differ in LaTeX spacing and boxes only are equal."""
    text = text.strip().rstrip(".")
    if boxed := _BOXED.match(text.strip("$ ")):
        text = boxed.group(1)
    return _DROPPED.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


async def score(
    answer: str | None, ground_truth: dict[str, Any], tools: ToolBackend
) -> dict[str, float]:
    """1 when `answer` is mathematically equal to `ground_truth["answer"]`."""
    if answer is None:
        return no_answer()
    right = float(await is_equal(answer, str(ground_truth["answer"])))
    return verdict(right)


async def score_with_format(
    answer: str | None, ground_truth: dict[str, Any], tools: ToolBackend
) -> dict[str, float]:
    """Nine tenths for a right answer, one tenth for having answered in the asked form."""
    judged = await score(answer, ground_truth, tools)
    return judged | {"score": 0.9 * judged["acc"] + 0.1 * judged["format"]}


async def score_string_equal(
    answer: str | None, ground_truth: dict[str, Any], tools: ToolBackend
) -> dict[str, float]:
    """1 when both answers are the same text after `normalise`."""
    if answer is None:
        return no_answer()
    same = float(normalise(answer) == normalise(str(ground_truth["answer"])))
    return verdict(same)


async def is_equal(answer: str, target: str) -> bool:
    """Whether two answers are equal as text or as mathematics.

    An answer that cannot be parsed, or whose check takes longer than `VERIFY_TIMEOUT_S`, is wrong.
    """
    ours, theirs = normalise(answer), normalise(target)
    if ours == theirs:
        return True
    if not ours or len(answer) > MAX_ANSWER_LENGTH or (_is_integer(ours) and _is_integer(theirs)):
        return False
    future = _pool().schedule(_verify, args=[target, answer], timeout=VERIFY_TIMEOUT_S)
    try:
        return bool(await asyncio.wrap_future(future))
    except (FutureTimeoutError, ProcessExpired):
        return False


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", text) is not None


@cache
def _pool() -> ProcessPool:
    # Spawned: the processes that judge hold threads (Ray, torch), and forking those can hang.
    # The initializer pays for the imports, which would else count against the first answer.
    return ProcessPool(
        max_workers=1, context=multiprocessing.get_context("spawn"), initializer=_import_verifier
    )


def _import_verifier() -> None:
    import math_verify  # noqa: F401


def _verify(target: str, answer: str) -> bool:
    """Runs in the pool: parses both and compares; whatever math-verify trips over is wrong."""
    from math_verify import parse, verify

    def parsed(text: str) -> Any:
        return parse(f"${text.strip().strip('$')}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    return verify(parsed(target), parsed(answer), timeout_seconds=None)

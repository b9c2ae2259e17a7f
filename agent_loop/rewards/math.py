"""The reward for mathematical answers: equal as text, as numbers, or by math-verify."""

import re
from dataclasses import dataclass
from typing import Any

from agent_loop.rewards.attempt import Attempt, no_answer, verdict
from agent_loop.rewards.math_forms import MAX_LENGTH, compare, normalise
from agent_loop.rewards.math_pool import SCORER, holds
from tool_server.wire.protocol import ToolBackend

_NO_ANSWER = " \t\n$%.\\"
"""A text of only these characters is no answer."""


async def is_equal(answer: str, target: str) -> bool | None:
    """Whether two answers are equal; None if the check took too long.

    An answer that is too long or cannot be parsed is wrong. See `agent_loop.rewards.math_forms` for
    the rules and `scoring` for the limits.

    Raises:
        ToolTimeout, RuntimeError: as `Scorer.run`; this says nothing about the answer.
    """
    found = compare(answer, target)
    return found if isinstance(found, bool) else await SCORER.run(holds, found)


_VALUES = re.compile(
    r"\$([^$\n]*\w[^$\n]*)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    r"|((?:(?<![\w)\]}.])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?)",
    re.DOTALL,
)
"""A formula between LaTeX's delimiters, or a number outside of one."""

_SAID = re.compile(r"\b(?:answer|result)\b(?: is)?[:*\s]+([^\n]+?)[\s.*]*\Z", re.IGNORECASE)
"""What stands behind "The answer is", at the end."""


def last_values(message: str) -> list[str]:
    """What may be the answer of a message in words: what stands behind "The answer is" at its end;
    its last formula or number; the last one with a digit, behind its last `=`. Only the last
    `MAX_LENGTH` characters count.

    Source: `extract_last_number` of AgentFly at 1256586 (rewards/math_reward.py), which reads the
    last digits only.

    >>> last_values("Altogether she sold 48+24 = 72 clips.")
    ['72']
    """
    end = message[-MAX_LENGTH:]
    said = _SAID.search(end)
    values = [each[each.lastindex or 0].strip() for each in _VALUES.finditer(end)]
    with_digit = [each.rpartition("=")[2].strip() for each in values if re.search(r"\d", each)]
    found = [*([said[1]] if said else []), *values[-1:], *with_digit[-1:]]
    return [*dict.fromkeys(found)]


_TEXT = re.compile(r"\\text\w*\s*\{[^{}]*\}|\\[A-Za-z]+")
"""Words of LaTeX, which are no prose."""


def _is_worked_solution(answer: str) -> bool:
    """Whether a ground truth is a rationale: GSM8K's `####`, or several lines with prose.

    Several lines alone are no sign: a matrix, or `(1,\\n 2)`, equals the same in one line.
    """
    prose = re.findall(r"[A-Za-z]{2,}", _TEXT.sub(" ", answer))
    return "####" in answer or ("\n" in answer and len(prose) >= 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward:
    """1 if the answer equals the `answer` of the ground truth. The part `timeout` is 1 if the check
    took too long, which counts as wrong."""

    name: str
    by_text: bool = False
    """Compare as text only, after normalising LaTeX."""

    format_weight: float = 0.0
    """Share of the score for giving any answer."""

    asks_for_call: bool = False
    """Whether a trajectory without a tool call earns nothing. The part `called` is 1 if it has one.

    Source: AgentFly at 1256586, math_equal_reward_tool. One difference: there a trajectory with a
    call and without an answer earns 0.1, and here nothing.
    """

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        answer, target = attempt.answer, str(attempt.ground_truth["answer"])
        called = float(attempt.tool_calls > 0)
        own = {"called": called} if self.asks_for_call else {}
        if answer is None:
            return no_answer() | {"timeout": 0.0} | own
        found = await self._is_equal(answer, target)
        for value in last_values(answer) if attempt.answer_is_message else ():
            if found is not True:
                found = await self._is_equal(value, target)
        acc = float(found is True)
        score = (1 - self.format_weight) * acc + self.format_weight
        score = score * called if self.asks_for_call else score
        return verdict(score, acc=acc) | {"timeout": float(found is None)} | own

    async def _is_equal(self, answer: str, target: str) -> bool | None:
        if self.by_text:
            return len(answer) <= MAX_LENGTH and normalise(answer) == normalise(target)
        return await is_equal(answer, target)

    def truth_problem(self, ground_truth: Any) -> str | None:
        if not isinstance(ground_truth, dict) or "answer" not in ground_truth:
            return "ground_truth has no `answer`"
        answer = ground_truth["answer"]
        if not isinstance(answer, str | int | float) or not str(answer).strip(_NO_ANSWER):
            return f"ground_truth.answer={answer!r} is no answer: a number or a text is needed"
        if _is_worked_solution(str(answer).strip()):
            return (
                f"ground_truth.answer={str(answer)[:60]!r} is a worked solution: no final answer "
                "equals it"
            )
        if len(str(answer)) > MAX_LENGTH:
            return f"ground_truth.answer has {len(str(answer))} characters, more than {MAX_LENGTH}"
        return None

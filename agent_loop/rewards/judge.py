"""The reward `judge`: a language model grades the work by a rubric.

The judge is any server with OpenAI's `POST /chat/completions`. `judge_prompt` writes the prompt, in
which the policy's text is quoted data, and reads the verdict; `judge_http` sends the request. A
judge that is down, refuses the request or gives no readable verdict is a fault: the trajectory is
an `infra_error`, and never has the score 0.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.judge_options import TOOL, JudgeOptions
from agent_loop.rewards.judge_prompt import JudgePrompt, Rubric
from config.compat import gather_all
from config.schema import load_section
from tool_server.wire.protocol import ToolBackend, ToolCall, ToolUnavailable

SAMPLED = 0.7
"""Default temperature of several votes, and the least one where an unreadable verdict is asked for
again: at 0 the judge would write the same again."""


@dataclass(slots=True)
class Verdict:
    """One vote, with what it took to get it."""

    score: float = 0.0
    """From 0 to 1."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cached: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class JudgeReward:
    """Ask a judge. Its parts are listed in docs/judges.md."""

    name: str
    options: JudgeOptions

    @cached_property
    def rubric(self) -> Rubric:
        score = self.options.score
        return Rubric(
            text=self.options.rubric,
            scale=self.options.scale,
            pattern=score.pattern,
            schema=score.json_schema,
            field=score.field,
            max_chars=self.options.max_chars,
        )

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        sees_response = "response" in self.rubric.fields and not attempt.text.isspace()
        if attempt.answer is None and not (sees_response and attempt.text):
            return self._parts(attempt, [])
        from agent_loop.rewards.judge_http import client_of  # imports aiohttp

        client = client_of(tools, self)
        prompt = self.rubric.prompt(_texts(attempt))
        asks = client.route.max_retries + 1
        votes = [self._vote(prompt, vote, asks, client) for vote in range(self.options.votes)]
        return self._parts(attempt, await gather_all(votes))

    async def _vote(
        self, prompt: JudgePrompt, vote: int, asks: int, client: ToolBackend
    ) -> Verdict:
        """One verdict. An unreadable one is asked for again, as a fresh sample.

        Raises:
            ToolUnavailable: the judge gives no answer, or none with a readable verdict.
        """
        verdict, said = Verdict(), ""
        for ask in range(asks):
            result = await client.call(self.call(prompt, vote, ask))
            if not result.cached:
                verdict.prompt_tokens += result.body["prompt_tokens"]
                verdict.completion_tokens += result.body["completion_tokens"]
            if (score := self.read(result.body, prompt.code)) is not None:
                verdict.score, verdict.is_cached = score, result.cached
                return verdict
            said = f"{result.body['finish_reason']}, {result.body['text'][-200:]!r}"
        options = self.options
        raise ToolUnavailable(
            f"no readable verdict of judge={options.model!r} at {options.url} in {asks} answers, "
            f"last: {said}; raise max_tokens if it was cut, or change rubric or score in "
            "reward_options",
            tool=TOOL,
        )

    def call(self, prompt: JudgePrompt, vote: int, ask: int) -> ToolCall:
        """The call of a vote; each vote and each further ask is a call of its own for the cache."""
        options = self.options
        temperature = options.temperature
        if temperature is None:
            temperature = 0.0 if options.votes == 1 else SAMPLED
        body: dict[str, Any] = {
            "model": options.model,
            "messages": prompt.messages,
            "temperature": max(temperature, SAMPLED) if ask else temperature,
            "max_tokens": options.max_tokens,
            "seed": vote + options.votes * ask,
            **options.body,
        }
        if (schema := options.score.json_schema) is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "schema": schema},
            }
        sent = {name: value for name, value in body.items() if value is not None}
        payload = {"body": sent, "vote": vote, "ask": ask, "code": prompt.code}
        return ToolCall(tool=TOOL, payload=payload)

    def read(self, body: Mapping[str, Any], code: str) -> float | None:
        """The score from 0 to 1 in an answer; None if its verdict is unreadable."""
        if body["finish_reason"] not in ("stop", ""):  # it was cut, or a filter ended it
            return None
        return self.rubric.score(body["text"], code)

    def _parts(self, attempt: Attempt, votes: Sequence[Verdict]) -> dict[str, float]:
        options, scores = self.options, [vote.score for vote in votes]
        score = aggregate(scores, options.aggregate) if scores else 0.0
        prompt_tokens = sum(vote.prompt_tokens for vote in votes)
        completion_tokens = sum(vote.completion_tokens for vote in votes)
        parts: dict[str, float] = {
            "score": score,
            "acc": float(bool(votes) and score >= options.pass_at),
            "format": float(attempt.answer is not None),
            "judge_votes": len(votes),
            "judge_disagreement": statistics.pstdev(scores) if scores else 0.0,
            "judge_prompt_tokens": prompt_tokens,
            "judge_completion_tokens": completion_tokens,
            "judge_cached": sum(vote.is_cached for vote in votes) / max(1, len(votes)),
        }
        if (price := options.price) is not None:
            usd = price.input * prompt_tokens + price.output * completion_tokens
            parts["judge_cost"] = usd / 1e6
        return {name: float(value) for name, value in parts.items()}

    def truth_problem(self, ground_truth: Any) -> str | None:
        if "reference" in self.rubric.fields and not reference_of(ground_truth).strip():
            return "ground_truth has no text for the rubric's {reference}"
        return None


def aggregate(scores: Sequence[float], how: str) -> float:
    """One score of several, at least one; see `JudgeOptions.aggregate`."""
    if how == "median":
        return statistics.median(scores)
    if how == "majority":
        counts = Counter(scores)
        return min(scores, key=lambda score: (-counts[score], score))
    return statistics.fmean(scores)


def reference_of(ground_truth: Any) -> str:
    """The right answer as a text: of `answer` or `target` if there is one, several in lines, and
    anything else as JSON."""
    if isinstance(ground_truth, Mapping):
        for name in ("answer", "target"):
            if name in ground_truth:
                return reference_of(ground_truth[name])
    if isinstance(ground_truth, str):
        return ground_truth
    if isinstance(ground_truth, list) and all(isinstance(each, str) for each in ground_truth):
        return "\n".join(ground_truth)
    return json.dumps(ground_truth, ensure_ascii=False) if ground_truth else ""


def _texts(attempt: Attempt) -> dict[str, str]:
    return {
        "question": attempt.question,
        "answer": attempt.answer or "",
        "reference": reference_of(attempt.ground_truth),
        "response": attempt.text,
    }


def judge_reward(name: str, options: Mapping[str, Any]) -> JudgeReward:
    """The reward with its options.

    Raises:
        ConfigError: an option is wrong or missing, or the judge has no address.
    """
    return JudgeReward(
        name=name, options=load_section(JudgeOptions, dict(options), "reward_options")
    )

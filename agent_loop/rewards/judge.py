"""The reward `judge`: a language model grades the work by a rubric.

The judge is any server with OpenAI's `POST /chat/completions`. `judge_prompt` writes the prompt, in
which the policy's text is quoted data. Requests go on a route of the tool client, so they pass
limiter, slots, deadline, retries and cache. A judge that is down, refuses the request (the policy
does not write it) or gives no readable verdict is a fault: the trajectory is an `infra_error`, and
never has the score 0.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import msgspec

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import Route, local_route
from agent_loop.calls.servers import Server
from agent_loop.json_schemas import CheckTooLong, broken_rule, validator_of
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.judge_options import KEY_VARIABLE, TOOL, JudgeOptions, judge_key
from agent_loop.rewards.judge_prompt import SYSTEM, fields_of, number_on_line, prompt_of
from agent_loop.rewards.number import reward_number
from config.compat import gather_all
from config.schema import load_section
from tool_server.wire.http import Peer, post, unreadable
from tool_server.wire.protocol import ToolBackend, ToolCall, ToolResult, ToolUnavailable
from tool_server.wire.responses import dumps, max_answer_bytes

SAMPLED = 0.7
"""Default temperature of several votes, and the least one where an unreadable verdict is asked for
again: at 0 the judge would write the same again."""

CHECK_S = 1.0
"""CPU seconds for the check of an answer by its schema."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class _Completion(msgspec.Struct):
    """The fields of a `ChatCompletion` that are read."""

    choices: list[_Choice]
    usage: _Usage | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)


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

    async def judge(self, attempt: Attempt, tools: ToolBackend) -> dict[str, float]:
        options, votes = self.options, list[Verdict]()
        if attempt.answer is not None or (
            attempt.text.strip() and "response" in fields_of(options.rubric)
        ):
            client = self._client(tools)
            asks = client.route.max_retries + 1
            message, code = prompt_of(
                options.rubric,
                _texts(attempt),
                options.scale,
                field=None if options.score.json_schema is None else options.score.field,
                max_chars=options.max_chars,
            )
            votes = await gather_all(
                [self._vote(message, code, vote, asks, client) for vote in range(options.votes)]
            )
        scores = [vote.score for vote in votes]
        score = statistics.fmean(scores) if scores else 0.0
        parts = {
            "score": score,
            "acc": bool(votes) and score >= options.pass_at,
            "format": attempt.answer is not None,
            "judge_votes": len(votes),
            "judge_disagreement": statistics.pstdev(scores) if scores else 0.0,
            "judge_prompt_tokens": sum(vote.prompt_tokens for vote in votes),
            "judge_completion_tokens": sum(vote.completion_tokens for vote in votes),
            "judge_cached": sum(vote.is_cached for vote in votes) / max(1, len(votes)),
        }
        return {name: float(value) for name, value in parts.items()}

    async def _vote(
        self, message: str, code: str, vote: int, asks: int, client: ToolBackend
    ) -> Verdict:
        """One verdict. An unreadable one is asked for again, as a fresh sample.

        Raises:
            ToolUnavailable: the judge gives no answer, or none with a readable verdict.
        """
        verdict, said = Verdict(), ""
        for ask in range(asks):
            # for the cache, each vote and each further ask is a call of its own
            payload = {"body": self._request(message, vote, ask), "vote": vote, "ask": ask}
            result = await client.call(ToolCall(tool=TOOL, payload=payload | {"code": code}))
            if not result.cached:
                verdict.prompt_tokens += result.body["prompt_tokens"]
                verdict.completion_tokens += result.body["completion_tokens"]
            if (score := self.read(result.body, code)) is not None:
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

    def _request(self, message: str, vote: int, ask: int) -> dict[str, Any]:
        options, temperature = self.options, self.options.temperature
        if temperature is None:
            temperature = 0.0 if options.votes == 1 else SAMPLED
        body: dict[str, Any] = {
            "model": options.model,
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": message},
            ],
            "temperature": max(temperature, SAMPLED) if ask else temperature,
            "max_tokens": options.max_tokens,
            "seed": vote + options.votes * ask,
        }
        if (schema := options.score.json_schema) is not None:
            named = {"name": "verdict", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        body |= options.body
        return {name: value for name, value in body.items() if value is not None}

    def read(self, body: Mapping[str, Any], code: str) -> float | None:
        """The score from 0 to 1 in an answer; None if its verdict is missing, cannot be parsed, is
        outside the scale, or if the answer was cut or filtered."""
        if body["finish_reason"] not in ("stop", ""):
            return None
        said = body["text"].rpartition("</think>")[2]  # of a server that does not take thoughts out
        by_line = self.options.score.json_schema is None
        given = number_on_line(said, code) if by_line else self._number_in_json(said)
        low, high = self.options.scale
        return None if given is None or not low <= given <= high else (given - low) / (high - low)

    @cached_property
    def _validator(self) -> Any:
        return validator_of(self.options.score.json_schema or {})

    def _number_in_json(self, said: str) -> float | None:
        try:
            answer = json.loads(said)
            if broken_rule(self._validator, answer, CHECK_S) is not None:
                return None
            given = answer[self.options.score.field]
        except (CheckTooLong, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            return None
        return None if isinstance(given, bool) else reward_number(given)  # true: not on a scale

    def truth_problem(self, ground_truth: Any) -> str | None:
        if "reference" in fields_of(self.options.rubric) and not reference_of(ground_truth).strip():
            return "ground_truth has no text for the rubric's {reference}"
        return None

    def _client(self, tools: ToolBackend) -> ToolClient:
        """The client whose calls go to the judge."""
        assert isinstance(tools, ToolClient), "agent loops give rewards the tool client"
        return tools.on(tools.resource(self, partial(self._route, tools)))

    def _route(self, tools: ToolClient) -> Route:
        url = self.options.url
        route = local_route(
            url,
            partial(self._post, tools),
            key=f"judge:{sha256(url.encode()).hexdigest()[:32]}",
            timeout_s=tools.route.timeout_s,
            clock=tools.clock,
            max_retries=tools.route.max_retries,
            caches=True,
            advice=f"is the judge up? ask {url}/models; its limits are in reward_options",
        )
        return tools.limits(route, self.options)

    async def _post(self, tools: ToolClient, call: ToolCall, server: Server) -> ToolResult:
        """Ask the judge once; an answer may be cached if its verdict can be read.

        Raises:
            ToolUnavailable: the judge refuses the request, or gives no answer.
        """
        peer = Peer(
            name=f"judge model={self.options.model!r} at {server.url}",
            tool=TOOL,
            address_key="base_url",
            remedy=f"has this server the model, and is {KEY_VARIABLE} its key?",
            secret=judge_key(),
            refused="correct reward_options, for example model, max_tokens, max_chars or body",
        )
        url, data = f"{server.url}/chat/completions", dumps(call.payload["body"])
        raw, _ = await post(tools.session, url, data, peer, limit=max_answer_bytes(TOOL))
        try:
            answer = _COMPLETION.decode(raw)
            if not answer.choices:
                raise ValueError("the answer has no choices")
        except (ValueError, RecursionError) as error:
            raise unreadable(error, peer) from error
        choice, usage = answer.choices[0], answer.usage or _Usage()
        body = {
            "text": choice.message.content or "",
            "finish_reason": choice.finish_reason or "",
            "prompt_tokens": usage.prompt_tokens or 0,
            "completion_tokens": usage.completion_tokens or 0,
        }
        is_readable = self.read(body, call.payload["code"]) is not None
        return ToolResult(body=body, tool=TOOL, cacheable=is_readable)


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

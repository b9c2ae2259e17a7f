"""The sampled reward of the demo model: its trajectories with the demo's tools, in this process."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from agent_loop.calls.cache import content_key
from agent_loop.rewards.attempt import Attempt
from agent_loop.rewards.registry import reward_for
from agent_loop.turns.tags import Action
from agent_loop.turns.turn_loop import Budget, Generated, Observation, Stop, run_turns
from config.schema import default_reward
from cpu_engine.async_decoder import AsyncDecoder
from cpu_engine.decoder import BatchDecoder, Request
from cpu_engine.sampling import Sampling
from samplers.rows.schema import Row
from tool_server.calculator import CalculationError, calculate
from tool_server.retrieve import retrieve_answer
from tool_server.run_code import run_answer
from tool_server.sandbox import Sandbox
from tool_server.search import PassageIndex
from tool_server.wire.protocol import ToolCall, ToolResult
from verl_mixed.demo.forms import Form, TagForm
from verl_mixed.demo.warm_start import Codec

BUDGET = Budget(max_turns=3, response_length=160, max_turn_length=32)
LONGER_BUDGET = Budget(max_turns=3, response_length=320, max_turn_length=64)
"""As in config/profile/laptop.yaml, for tags and for the other forms."""


class LocalTools:
    """The tool server's answers without HTTP, each computed once.

    All calls must come from one event loop.
    """

    def __init__(self, index: PassageIndex, sandbox: Sandbox) -> None:
        self.index, self.sandbox = index, sandbox
        self._answers: dict[str, dict[str, Any]] = {}
        self._runs = asyncio.Semaphore(2)

    async def call(self, call: ToolCall) -> ToolResult:
        key = content_key(call)
        if key not in self._answers:
            self._answers[key] = await self._answer(call.tool, call.payload)
        return ToolResult(body=self._answers[key])

    async def _answer(self, tool: str, payload: dict[str, Any]) -> dict[str, Any]:
        if tool == "calculate":
            try:
                return {"result": calculate(payload["expression"])}
            except CalculationError as error:
                return {"error": str(error)}
        if tool == "retrieve":
            hits = [self.index.search(query, payload["topk"]) for query in payload["queries"]]
            return retrieve_answer(hits, return_scores=True)
        async with self._runs:
            return run_answer(await self.sandbox.run_python(payload["code"], payload["stdin"]))


async def sampled_rewards(
    model: Any,
    codec: Codec,
    tokenizer: Any,
    prompts: dict[str, list[Row]],
    tools: LocalTools,
    forms: Mapping[str, Form],
    seed: int,
) -> dict[str, float]:
    """Source -> mean reward of one trajectory per prompt, sampled at temperature 1."""
    is_short = all(isinstance(form, TagForm) for form in forms.values())
    engine = AsyncDecoder(BatchDecoder(model, eos_token_ids=[tokenizer.eos_token_id], seed=seed))

    async def generate(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=frozenset(stop.token_ids))
        done = await engine.generate(Request(prompt_ids=prompt_ids, sampling=sampling))
        return Generated(token_ids=done.token_ids, log_probs=done.log_probs)

    async def reward(source: str, row: Row) -> float:
        form = forms[source]

        async def environment(action: Action) -> Observation:
            return await form.act(action, row.extras, tools)

        language, glue = form.dialogue(codec, tokenizer)
        rollout = await run_turns(
            prompt_ids=codec.prompt(*form.messages(row.question)),
            generate=generate,
            environment=environment,
            language=language,
            glue=glue,
            codec=codec,
            budget=BUDGET if is_short else LONGER_BUDGET,
            filler_id=tokenizer.eos_token_id,
        )
        attempt = Attempt(answer=rollout.answer, ground_truth=dict(row.ground_truth))
        judged = await reward_for(default_reward(source)).judge(attempt, tools)
        return judged["score"]

    means = {}
    for source, rows in prompts.items():
        rewards = await asyncio.gather(*(reward(source, row) for row in rows))
        means[source] = float(np.mean(rewards))
    return means

"""How well a model does on demo tasks, sampled at temperature 1, within this process.

Runs the very turn loop and rewards of training, over the batching decoder of the CPU rollout; only
the HTTP between loop and tools is left out. A program that the model wrote runs in the sandbox and
nowhere else.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.cpu.decoder import BatchDecoder, Request, Sampling
from agent_loop.demo_teacher import ACTIONS, act
from agent_loop.rewards import reward_for
from agent_loop.tags import Action, Tags
from agent_loop.tools.calculator import CalculationError, calculate
from agent_loop.tools.protocol import ToolCall, ToolResult
from agent_loop.tools.sandbox import Limits, Sandbox, choose_sandbox
from agent_loop.tools.search import PassageIndex
from agent_loop.turn_loop import Budget, Generated, Observation, Rollout, run_turns
from config.schema import ToolConfig
from samplers.rows import Row

BUDGET = Budget(max_turns=3, response_length=160, max_turn_length=32)
"""As in config/profile/laptop.yaml."""

# The answers of the demo are whole numbers, so equal text decides; math-verify would only be slower.
REWARDS = {"taco": "code", "nq": "qa", "math": "math_reward_string_equal"}

_RUNS_AT_ONCE = 2


class LocalTools:
    """The tools of the tool server as a `ToolBackend` without HTTP; equal calls run once."""

    def __init__(self, corpus: Path, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or choose_sandbox()
        self._index = PassageIndex.build(corpus)
        self._runs_at_once = asyncio.Semaphore(_RUNS_AT_ONCE)
        self._answers: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call, or wait for the equal one that runs already."""
        key = json.dumps([call.tool, call.payload], sort_keys=True)
        if key not in self._answers:
            self._answers[key] = asyncio.create_task(self._answer(call.tool, call.payload))
        return ToolResult(body=await self._answers[key])

    async def _answer(self, tool: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        if tool == "calculate":
            try:
                return {"result": calculate(payload["expression"])}
            except CalculationError as error:
                return {"error": str(error)}
        if tool == "retrieve":
            found = [self._index.search(q, payload["topk"]) for q in payload["queries"]]
            return {
                "result": [
                    [
                        {"document": {"id": p.id, "contents": p.contents}, "score": p.score}
                        for p in passages
                    ]
                    for passages in found
                ]
            }
        assert tool == "run_code", tool
        async with self._runs_at_once:
            run = await self._sandbox.run_python(payload["code"], payload["stdin"], Limits())
        good = run.status == "Finished" and run.return_code == 0
        return {
            "status": "Success" if good else "Failed",
            "run_result": {"status": run.status, "stdout": run.stdout, "stderr": run.stderr},
        }


class Codec:
    """`turn_loop.TokenCodec` over a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


class _Engine:
    """`turn_loop.Generate` for many loops at once: all wait for one decoder."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self._decoder = decoder
        self._arrived: list[Request] = []
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def __call__(
        self, prompt_ids: list[int], *, max_tokens: int, stop_token_ids: list[int]
    ) -> Generated:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids))
        request = Request(prompt_ids=prompt_ids, sampling=sampling)
        self._arrived.append(request)
        done = self._waiting[id(request)] = asyncio.get_running_loop().create_future()
        await done
        return Generated(token_ids=request.token_ids, log_probs=request.log_probs)

    async def run(self) -> None:
        """Decode whatever waits, until cancelled."""
        while True:
            arrived, self._arrived = self._arrived, []
            finished = self._decoder.admit(arrived)
            if len(self._decoder):
                finished = finished + self._decoder.step()
            for request in finished:
                self._waiting.pop(id(request)).set_result(None)
            await asyncio.sleep(0 if len(self._decoder) or self._arrived else 0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One sampled trajectory and its reward."""

    row: Row
    rollout: Rollout
    reward: float


def prompt_ids_of(question: str, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, up to where the assistant's words begin."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )


async def sample_rows(
    model: Any, tokenizer: Any, rows: Sequence[Row], tools: LocalTools, *, seed: int
) -> list[Outcome]:
    """Sample one trajectory per row and judge it.

    Args:
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer.
        rows: demo rows of any sources; the same row may stand several times.
        tools: what the trajectories call.
        seed: of the sampling.

    Returns:
        One outcome per row, in order.
    """
    config = ToolConfig(server_url="http://127.0.0.1")
    codec = Codec(tokenizer)
    decoder = BatchDecoder(
        model,
        eos_token_ids=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
    )
    engine = _Engine(decoder)

    async def sample(row: Row) -> Outcome:
        async def environment(action: Action) -> Observation:
            return await act(row.data_source, action, row.extras, tools)

        rollout = await run_turns(
            prompt_ids=prompt_ids_of(row.question, tokenizer),
            generate=engine,
            environment=environment,
            tags=Tags.from_config(config, ACTIONS[row.data_source]),
            codec=codec,
            budget=BUDGET,
            filler_id=tokenizer.eos_token_id,
        )
        reward = reward_for(REWARDS[row.data_source])
        scores = await reward(rollout.answer, dict(row.ground_truth), tools)
        return Outcome(row=row, rollout=rollout, reward=scores["score"])

    decoding = asyncio.create_task(engine.run())
    sampling = asyncio.gather(*(sample(row) for row in rows))
    try:
        await asyncio.wait([decoding, sampling], return_when=asyncio.FIRST_COMPLETED)
        if decoding.done():
            sampling.cancel()
            decoding.result()
        return await sampling
    finally:
        decoding.cancel()


def mean_rewards(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """source -> mean reward."""
    by_source: dict[str, list[float]] = {}
    for outcome in outcomes:
        by_source.setdefault(outcome.row.data_source, []).append(outcome.reward)
    return {source: sum(values) / len(values) for source, values in by_source.items()}

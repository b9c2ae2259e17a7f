"""What an agent loop costs beside verl's ToolAgentLoop, when engine and tools answer at once.

    python -m benchmarks.agent_loop [--model FOLDER] [--quick]
    python -m benchmarks.agent_loop --latency [--at-once 2048] [--tokens 512] [--token-ms 25]

One trajectory after the other, and 1,000 at once that wait for each other in every turn. Each is
run as its worker runs it: ours by `MixedAgentLoopWorker`, verl's by `AgentLoopWorkerTQ`, without
the transfer queue. Both sample 64 tokens a turn, read 64 of a tool, and answer in the last turn.
What differs: ours judges the answer (one hidden test; verl leaves that to another process) and
writes the trajectory's record. The loop with native calls puts the tool's schema into the prompt,
as verl's does, and speaks the same format; the loop with tags puts as much text on tags.
CPU is of the process, threads included. The tokenizer is trained here unless a folder
names one with a Qwen template.

With `--latency`: so many trajectories at once in one worker, with an engine and a tool that take as
long as real ones (lognormal), and verl's tensors for the transfer queue, without the queue. Printed
are the CPU of a turn, and how late the event loop ran, from the start of all of them to the end of
the last.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import statistics
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, _agent_loop_registry
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from agent_loop.calls import client as tool_client
from agent_loop.calls.client import ToolClient
from agent_loop.loop_lag import LoopLag, spare_full_collections
from agent_loop.loop_settings import settings_of
from agent_loop.records.trajectory_record import Call, StopReason, Turn, to_columns
from agent_loop.rewards.judging import judge
from agent_loop.row import Row
from agent_loop.training.verl_adapters.engine_client import RecordingClient
from agent_loop.training.verl_adapters.loop_worker import MixedAgentLoopWorker
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout
from tool_server.wire.protocol import ToolCall, ToolResult
from verl_mixed.run.compose import compose_config, resolve

TURNS = (1, 3, 8)
TOKENS = 64
"""Sampled in a turn; as many are read of a tool."""

TOGETHER = 1000
TOGETHER_ROUNDS = 3
TOGETHER_TURNS = 3
TRACED = 200
"""At once where memory is counted, which takes time."""

ROUNDS = 7
TRAJECTORIES = 24
"""One after the other in a round."""

AT_ONCE = 2048
TOOL_S = 0.5
"""Median time of a call where latencies are real."""

SPREAD = 0.5
"""Of the logarithm of a latency: one in a hundred takes three times the median."""

GROUP = 16
"""Trajectories of a prompt, which start together."""

MOST_LAG_MS = 100

VOCABULARY = 8192
MODEL_TYPE = "qwen2"

WORD = " number"
"""Repeated to fill turns and results."""

# Qwen2.5's, shortened: https://huggingface.co/Qwen/Qwen2.5-7B-Instruct tokenizer_config.json
CHAT_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and " }}
    {{- "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": " }}
    {{- "<function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not (tools and loop.first))
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QUESTION = (
    "Read a number n on the first line and n numbers on the second. Print the largest sum of "
    "numbers that stand next to each other. There are at most 100000 numbers, and none is larger "
    "than 1000000000 or smaller than -1000000000. The program has two seconds."
)

INSTRUCTIONS = (
    "You are a helpful assistant that writes programs. You may try a program before you hand it "
    "in: write it between <code> and </code>. It is run on the example input, and what it prints "
    "is shown to you between <information> and </information>. If it fails, you see the last line "
    "of its error. You may do so as often as you need, within the turns that are left; think about "
    "what you saw before you write the next program. When you are sure, write the whole program "
    "between <answer> and </answer>. It reads its input from the standard input and prints the "
    "result to the standard output, and is judged by hidden tests, each of which has two seconds. "
    "Nothing after the answer is read."
)

PROGRAM = "n = int(input())\nprint(max(map(int, input().split())))"

SCHEMA = {
    "type": "function",
    "function": {
        "name": "run_code",
        "description": "Run a Python program on the example input and see what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {
                    "type": "string",
                    "description": "The program; it reads its input from the standard input.",
                }
            },
            "required": ["code"],
        },
    },
}


# --- what answers at once -------------------------------------------------------------------------


class Gate:
    """Holds who comes until so many wait, then lets all of them pass; again and again."""

    def __init__(self, size: int, on_full: Callable[[], None]) -> None:
        self._size, self._on_full = size, on_full
        self._waiting, self._open = 0, asyncio.Event()

    async def wait(self) -> None:
        self._waiting += 1
        opened = self._open
        if self._waiting == self._size:
            self._on_full()
            self._waiting, self._open = 0, asyncio.Event()
            opened.set()
        await opened.wait()


class Engine:
    """verl's server client: says the next turn of a script, for each request."""

    _acquire_server = None
    """What our worker wraps, and what nobody calls here."""

    def __init__(self, script: Sequence[list[int]], gate: Gate | None = None) -> None:
        self._script, self._gate = script, gate
        self._said: Counter[str] = Counter()

    async def generate(self, request_id: str, *, prompt_ids: list[int], **rest: Any) -> TokenOutput:
        if self._gate is not None:
            await self._gate.wait()
        ids = self._script[self._said[request_id]]
        self._said[request_id] += 1
        return TokenOutput(
            token_ids=list(ids),
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1},
        )


class LatentEngine(Engine):
    """Answers after the time that a real engine takes for the tokens."""

    def __init__(self, script: Sequence[list[int]], token_s: float) -> None:
        super().__init__(script)
        self._token_s, self._rng = token_s, random.Random(0)

    async def generate(self, request_id: str, *, prompt_ids: list[int], **rest: Any) -> TokenOutput:
        tokens = len(self._script[self._said[request_id]])
        await asyncio.sleep(tokens * self._token_s * self._rng.lognormvariate(0.0, SPREAD))
        return await super().generate(request_id, prompt_ids=prompt_ids, **rest)


class InstantTools(ToolClient):
    """Our tool client without its server."""

    answer = ""
    rng = random.Random(0)

    median_s = 0.0
    """Of a call's time."""

    async def call(self, call: ToolCall) -> ToolResult:
        if not self.route.is_http:  # verl's tool, which answers at once itself
            return await super().call(call)
        if self.median_s:
            await asyncio.sleep(self.median_s * self.rng.lognormvariate(0.0, SPREAD))
        run = {"status": "Finished", "stdout": self.answer}
        return ToolResult(body={"status": "Success", "run_result": run})


async def run_code(code: str) -> str:
    """verl's tool."""
    if InstantTools.median_s:
        await asyncio.sleep(InstantTools.median_s * InstantTools.rng.lognormvariate(0.0, SPREAD))
    return InstantTools.answer


# --- workers --------------------------------------------------------------------------------------


class Unqueued:
    """A worker that keeps nothing in the transfer queue."""

    last: AgentLoopOutput | None = None
    sampled = 0
    """Tokens of the policy in all outputs so far."""

    makes_tensors = False

    reward_loop_worker_handles = None
    distillation_enabled = False

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **row: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        self.last = outputs[-1]
        self.sampled += sum(sum(each.response_mask) for each in outputs)
        if self.makes_tensors:
            await super()._agent_loop_postprocess(output, validate, **row)  # pyright: ignore


class OurWorker(Unqueued, MixedAgentLoopWorker):
    """Ours."""


class VerlWorker(Unqueued, cast(Any, AgentLoopWorkerTQ).__ray_metadata__.modified_class):
    """verl's."""


def make_worker(kind: type[Any], config: DictConfig, tokenizer: Any) -> Any:
    """A worker without Ray, model and transfer queue; its engine is set later."""
    worker: Any = object.__new__(kind)
    worker.config, worker.tokenizer, worker.processor = config, tokenizer, None
    worker.hf_model_type, worker.dataset_cls = MODEL_TYPE, RLHFDataset
    worker.tools = [FUNCTION_TOOL_REGISTRY["run_code"]]
    if kind is OurWorker:
        worker.settings = settings_of(config)
        worker._is_seeded, worker._baselines, worker._route_shape = False, {}, None
        worker._written = defaultdict(list)
    return worker


def without_verls_tools(worker: Any) -> Any:
    """The worker, whose native loop calls the tool server's `run_code`."""
    worker.tools = []
    return worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run a trajectory."""

    name: str
    worker: Any
    agent: str
    speaks: str
    """How it asks: `tags` or `hermes`."""

    messages: list[dict[str, str]]

    def plug(self, engine: Engine) -> None:
        is_ours = isinstance(self.worker, MixedAgentLoopWorker)
        self.worker.llm_client = RecordingClient(engine) if is_ours else engine

    async def run(self, session: int = 0) -> None:
        """One trajectory, as its worker runs it."""
        await self.worker._run_agent_loop(
            {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True},
            {"step": 0, "sample_index": 0, "rollout_n": session, "validate": False},
            agent_name=self.agent,
            trace=False,
            **row(self.messages, session),
        )


def row(messages: list[dict[str, str]], session: int = 0) -> dict[str, Any]:
    """A row as the dataset gives it."""
    truth = {"inputs": ["2\n1 2\n"], "outputs": [InstantTools.answer]}
    return {
        "raw_prompt": messages,
        "data_source": "taco",
        "extra_info": {"row_id": "taco-0", "extras": json.dumps({"example_input": "2\n1 2\n"})},
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "uid": "taco-0",
        "session_id": session,
        "global_steps": 1,
    }


# --- tokens ---------------------------------------------------------------------------------------


def train_tokenizer() -> Any:
    """Byte-level BPE as Qwen's, over this repository's own text."""
    root = Path(__file__).resolve().parent.parent
    folders = [each for each in sorted(root.iterdir()) if each.name[0] != "."]  # no environment
    paths = [p for end in ("py", "md", "sh") for each in folders for p in each.rglob(f"*.{end}")]
    texts = [path.read_text() for path in sorted(paths)] + [WORD * 1000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tags = ["<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def words(tokenizer: Any, count: int) -> list[int]:
    """So many tokens that ask for nothing."""
    return (tokenizer.encode(WORD, add_special_tokens=False) * count)[:count]


def script(tokenizer: Any, speaks: str, turns: int, tokens: int = TOKENS) -> list[list[int]]:
    """Token ids of each turn: words, then what it asks for; the last turn answers."""

    def filled(text: str) -> list[int]:
        tail = tokenizer.encode(text, add_special_tokens=False)
        if len(tail) >= tokens:
            raise ValueError(
                f"no room for {len(tail)} tokens in a turn of {tokens}: {text!r}; this tokenizer's "
                "tokens are too short"
            )
        return words(tokenizer, tokens - len(tail)) + tail

    if speaks == "tags":  # a message that ends at a tag is stopped there
        ask, answer = f"\n<code>{PROGRAM}</code>", f"\n<answer>{PROGRAM}</answer>"
    else:
        call = json.dumps({"name": "run_code", "arguments": {"code": PROGRAM}})
        ask, answer = f"\n<tool_call>\n{call}\n</tool_call><|im_end|>", f"\n{PROGRAM}<|im_end|>"
    return [filled(ask)] * (turns - 1) + [filled(answer)]


# --- measuring ------------------------------------------------------------------------------------


def one_after_the_other(
    contenders: Sequence[Contender], scripts: dict[str, list[list[int]]], rounds: int, each: int
) -> dict[str, float]:
    """Median CPU milliseconds of a trajectory, per contender."""
    seen: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    async def play() -> None:
        await keep_tools_at_hand(contenders)
        for round_number in range(-1, rounds):
            for contender in contenders:
                contender.plug(Engine(scripts[contender.speaks]))
                gc.collect()
                started = time.process_time()
                for _ in range(each):
                    await contender.run()
                if round_number >= 0:  # the first warms up
                    seen[contender.name].append(1e3 * (time.process_time() - started) / each)

    asyncio.run(play())
    return {name: statistics.median(values) for name, values in seen.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Many trajectories at once."""

    wall_s: float
    cpu_s: float
    waiting_bytes: float
    """Of one that waits for the engine in its last turn."""


def all_at_once(contender: Contender, turns: list[list[int]], count: int, traced: bool) -> Crowd:
    """So many trajectories whose engine answers when all have asked.

    Args:
        contender: who runs.
        turns: what the engine says.
        count: trajectories.
        traced: whether to count memory, which takes time.
    """
    held: list[int] = []

    async def play() -> tuple[float, float]:
        await keep_tools_at_hand([contender])
        contender.plug(Engine(turns))
        await contender.run()
        on_full = (lambda: held.append(memory())) if traced else (lambda: None)
        contender.plug(Engine(turns, Gate(count, on_full)))
        gc.collect()
        if traced:
            tracemalloc.start()
            held.append(memory())
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(contender.run(session) for session in range(count)))
        return time.perf_counter() - wall, time.process_time() - cpu

    wall_s, cpu_s = asyncio.run(play())
    tracemalloc.stop()
    return Crowd(
        wall_s=wall_s,
        cpu_s=cpu_s,
        waiting_bytes=(held[-1] - held[0]) / count if traced else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What so many trajectories with real latencies cost one event loop."""

    wall_s: float
    cpu_s: float
    lags_ms: Sequence[float]
    """p50, p99 and the largest, from the first to the last."""


def with_latencies(
    contender: Contender, turns: list[list[int]], count: int, token_s: float
) -> Load:
    """Run so many trajectories at once, in groups as verl's worker starts them.

    Raises:
        RuntimeError: a token that was sampled is in no output.
    """

    async def put(**_: Any) -> None:
        await asyncio.sleep(0)

    async def group(first: int) -> None:
        sessions = range(first, min(first + GROUP, count))
        await asyncio.gather(*[asyncio.create_task(contender.run(each)) for each in sessions])

    async def play() -> Load:
        await keep_tools_at_hand([contender])
        contender.plug(Engine(turns))
        await contender.run()
        contender.plug(LatentEngine(turns, token_s))
        if isinstance(contender.worker, MixedAgentLoopWorker):  # as its constructor does
            spare_full_collections()
        lag = LoopLag()
        lag.start()
        before = contender.worker.sampled
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*[asyncio.create_task(group(i)) for i in range(0, count, GROUP)])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        lag.stop()
        lost = count * sum(map(len, turns)) - (contender.worker.sampled - before)
        if lost:
            raise RuntimeError(f"{contender.name} lost {lost} sampled tokens")
        nothing = (0,) * len(lag.now())
        lags = [lag.since(nothing, share) for share in (0.5, 0.99, 1.0)]
        return Load(wall_s=wall, cpu_s=cpu, lags_ms=[1e3 * each for each in lags])

    InstantTools.median_s, contender.worker.makes_tensors = TOOL_S, True
    thresholds = gc.get_threshold()
    keep, tq.async_kv_batch_put = tq.async_kv_batch_put, put
    try:
        return asyncio.run(play())
    finally:
        tq.async_kv_batch_put = keep
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        InstantTools.median_s, contender.worker.makes_tensors = 0.0, False


def memory() -> int:
    """Bytes that Python holds."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def keep_tools_at_hand(contenders: Sequence[Contender]) -> None:
    """Make the shared tool client of this event loop one that answers at once."""
    loop = asyncio.get_running_loop()
    for contender in contenders:
        settings = settings_of(contender.worker.config)
        key = (os.getpid(), loop, settings.tools, settings.mixed.run_dir)
        tools = InstantTools("http://127.0.0.1:1", limiter=None)
        tool_client._shared[key] = tools


def check(contender: Contender, turns: list[list[int]], tokenizer: Any) -> str:
    """Run one trajectory and say what it was.

    Raises:
        RuntimeError: it has other turns or tokens than the script.
    """

    async def play() -> None:
        await keep_tools_at_hand([contender])
        contender.plug(Engine(turns))
        await contender.run()

    asyncio.run(play())
    output = contender.worker.last
    sampled, read = sum(output.response_mask), output.response_mask.count(0)
    if (
        sampled != TOKENS * len(turns)
        or tokenizer.decode(output.response_ids).count(InstantTools.answer) != len(turns) - 1
    ):
        raise RuntimeError(
            f"{contender.name} sampled {sampled} tokens in {len(turns)} turns and read {read}: "
            f"{tokenizer.decode(output.response_ids)!r}"
        )
    return (
        f"{contender.name}: a prompt of {len(output.prompt_ids)} tokens; of {len(turns)} turns "
        f"{sampled} sampled, {read} read"
    )


Part = tuple[str, float, float | None]
"""(part of a trajectory, ours, verl's) in CPU milliseconds; None where verl's has no such part."""


def parts_ms(ours: Contender, verls: Contender, each: int) -> list[Part]:
    """What the parts of a trajectory cost by themselves."""

    def of(action: Callable[[], Any]) -> float:
        values = []
        for _ in range(5):
            started = time.process_time()
            for _ in range(each):
                action()
            values.append(1e3 * (time.process_time() - started) / each)
        return statistics.median(values)

    async def play() -> list[Part]:
        await keep_tools_at_hand([ours])
        our_worker, verl_worker = ours.worker, verls.worker
        loop = our_worker._make_loop(ours.agent)
        builder = loop.continuous_token_builder
        make = our_worker._make_loop

        def verls_make() -> Any:
            return instantiate(verl_worker, verls.agent)

        settings = settings_of(our_worker.config)
        tools = InstantTools("http://127.0.0.1:1", limiter=None)
        source_row = Row.from_columns(row(ours.messages))
        rollout = a_rollout()

        judging = []
        for _ in range(5):
            started = time.process_time()
            for _ in range(each):
                await judge(rollout, source_row, settings, tools)
            judging.append(1e3 * (time.process_time() - started) / each)
        return [
            ("make the loop", of(lambda: make(ours.agent)), of(verls_make)),
            (
                "render the prompt",
                of(lambda: builder.build_initial_tokens(ours.messages)),
                of(lambda: builder.build_initial_tokens(verls.messages, tools=[SCHEMA])),
            ),
            ("judge, one hidden test", statistics.median(judging), None),
            ("record, three turns", of(lambda: to_columns(rollout.record())), None),
        ]

    return asyncio.run(play())


def instantiate(worker: Any, agent: str) -> Any:
    """An agent loop as verl's worker makes it (experimental/agent_loop/agent_loop.py at 0.9.1)."""
    import hydra
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap

    return hydra.utils.instantiate(
        config=_agent_loop_registry[agent],
        trainer_config=DictConfigWrap(config=worker.config),
        server_manager=worker.llm_client,
        tokenizer=worker.tokenizer,
        processor=worker.processor,
        hf_model_type=worker.hf_model_type,
        dataset_cls=worker.dataset_cls,
        data_config=DictConfigWrap(worker.config.data),
        tools=ToolListWrap(worker.tools),
    )


def a_rollout() -> Rollout:
    """Three turns with two calls."""
    trajectory = Trajectory(range(300))
    for number in range(3):
        trajectory.add_model_tokens(range(TOKENS), [-0.5] * TOKENS)
        trajectory.cut_turn(TOKENS, WORD * TOKENS)
        if number < 2:
            trajectory.add_tool_tokens(range(TOKENS), WORD * TOKENS)
    return Rollout(
        trajectory=trajectory,
        stop_reason=StopReason.ANSWERED,
        answer=PROGRAM,
        turns=[Turn(tokens=TOKENS) for _ in range(3)],
        calls=[Call(turn=turn, action="code", arguments=PROGRAM) for turn in (1, 2)],
    )


# --- tables ---------------------------------------------------------------------------------------


def config_with(style: str, tokens: int = TOKENS) -> DictConfig:
    """The run config with room for eight turns of so many tokens."""
    turn = 4 * tokens
    response = 8 * turn
    overrides = [
        "mixed.run_dir=/tmp/benchmark",
        "data.train_files=[a]",
        "data.val_files=[b]",
        "actor_rollout_ref.model.path=c",
        "data.max_prompt_length=1024",
        f"data.max_response_length={response}",
        f"mixed.turns.observation_style={style}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=9",
        f"actor_rollout_ref.rollout.multi_turn.max_turn_length={turn}",
        "mixed.deadlines.trajectory_s=3600",
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=4096",
        "actor_rollout_ref.rollout.multi_turn.format=hermes",
    ]
    return cast(DictConfig, OmegaConf.create(cast(Any, resolve(compose_config(overrides)))))


def verdict(ours: float, verls: float) -> str:
    """How ours stands to verl's."""
    ratio = ours / verls
    return f"{ratio:.2f}x | {'met' if ratio <= 1 else 'MISSED'}"


def print_latencies(
    contenders: Sequence[Contender], tokenizer: Any, count: int, tokens: int, token_s: float
) -> None:
    """The table of `--latency`."""
    turns = TOGETHER_TURNS
    print(
        f"{os.cpu_count()} cores. **{count:,} at once in one worker**, {turns} turns of {tokens} "
        f"sampled tokens, {1e3 * token_s:g} ms a token and {TOOL_S:g} s a call in the median\n"
    )
    print("| contender | wall | turns a second | CPU per turn | lag p50 | p99 | goal | longest |")
    print("|---|---:|---:|---:|---:|---:|---|---:|")
    for contender in contenders:
        told = script(tokenizer, contender.speaks, turns, tokens)
        seen = with_latencies(contender, told, count, token_s)
        p50, p99, longest = seen.lags_ms
        end = "met" if p99 < MOST_LAG_MS else "MISSED"
        print(
            f"| {contender.name} | {seen.wall_s:.0f} s | {turns * count / seen.wall_s:.0f} "
            f"| {1e3 * seen.cpu_s / (turns * count):.2f} ms | {p50:.0f} ms | {p99:.0f} ms | {end} "
            f"| {longest:.0f} ms |",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder with a tokenizer that has a Qwen chat template")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--latency", action="store_true", help="only: real latencies")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="trajectories of --latency")
    parser.add_argument("--tokens", type=int, default=512, help="of a turn of --latency")
    parser.add_argument("--token-ms", type=float, default=25.0, help="of a token of --latency")
    arguments = parser.parse_args()
    rounds, each = (3, 8) if arguments.quick else (ROUNDS, TRAJECTORIES)
    logging.getLogger("verl").setLevel(logging.ERROR)

    tokenizer = (
        AutoTokenizer.from_pretrained(arguments.model) if arguments.model else train_tokenizer()
    )
    InstantTools.answer = tokenizer.decode(words(tokenizer, TOKENS)).strip()
    function_tool("run_code", schema=SCHEMA)(run_code)
    for name, loop in (
        ("code_execution_agent", "agent_loop.code_execution_agent_loop.CodeExecutionAgentLoop"),
        ("tool_agent", "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop"),
    ):
        _agent_loop_registry[name] = {"_target_": loop}
    native = "agent_loop.native_agent_loop.NativeAgentLoop"
    _agent_loop_registry["native_agent"] = {"_target_": native, "tool_names": ["run_code"]}
    _agent_loop_registry["gateway"] = {
        "_target_": "agent_loop.gateway_agent_loop.GatewayAgentLoop",
        "function": f"{Path(__file__).with_name('gateway_agent.py')}:solve",
    }
    question = {"role": "user", "content": QUESTION}
    asked = [{"role": "system", "content": INSTRUCTIONS}, question]
    sampled = arguments.tokens if arguments.latency else TOKENS
    inline, chat = config_with("inline", sampled), config_with("chat", sampled)
    contenders = [
        Contender(
            name="verl: ToolAgentLoop",
            worker=make_worker(VerlWorker, inline, tokenizer),
            agent="tool_agent",
            speaks="hermes",
            messages=[question],
        ),
        *(
            Contender(
                name=f"ours: CodeExecutionAgentLoop, {style}",
                worker=make_worker(OurWorker, config, tokenizer),
                agent="code_execution_agent",
                speaks="tags",
                messages=asked,
            )
            for style, config in (("inline", inline), ("chat", chat))
        ),
        Contender(
            name="ours: NativeAgentLoop",
            worker=without_verls_tools(make_worker(OurWorker, inline, tokenizer)),
            agent="native_agent",
            speaks="hermes",
            messages=[question],
        ),
        Contender(
            name="ours: gateway, a function",
            worker=without_verls_tools(make_worker(OurWorker, inline, tokenizer)),
            agent="gateway",
            speaks="hermes",
            messages=[question],
        ),
        Contender(
            name="verl: ToolAgentLoop in our worker",
            worker=make_worker(OurWorker, inline, tokenizer),
            agent="tool_agent",
            speaks="hermes",
            messages=[question],
        ),
    ]
    if arguments.latency:
        token_s = arguments.token_ms / 1e3
        print_latencies(contenders, tokenizer, arguments.at_once, arguments.tokens, token_s)
        return
    scripts = {
        turns: {how: script(tokenizer, how, turns) for how in ("tags", "hermes")} for turns in TURNS
    }
    notes = [check(c, scripts[max(TURNS)][c.speaks], tokenizer) for c in contenders]

    print(
        f"{os.cpu_count()} cores, medians of {rounds} rounds in turn; {TOKENS} sampled tokens a "
        f"turn and {TOKENS} of a tool between two turns\n"
    )
    print("**One after the other**: CPU of the process per turn\n")
    print("| turns | contender | CPU per turn | of verl's | goal: <= 1.0x verl |")
    print("|---:|---|---:|---:|---|")
    for turns in TURNS:
        ms = one_after_the_other(contenders, scripts[turns], rounds, each)
        verls = ms[contenders[0].name]
        for contender in contenders:
            own = ms[contender.name]
            end = verdict(own, verls) if contender.name.startswith("ours") else "|"
            print(f"| {turns} | {contender.name} | {own / turns:.3f} ms | {end} |")

    count = TOGETHER // 10 if arguments.quick else TOGETHER
    turns = TOGETHER_TURNS
    print(
        f"\n**{count:,} at once in one process**, {turns} turns; the engine answers all together\n"
    )
    print(
        "| contender | wall | CPU | CPU of verl's | goal | memory of one that waits | of verl's |"
    )
    print("|---|---:|---:|---:|---|---:|---:|")
    crowds: dict[str, list[Crowd]] = {contender.name: [] for contender in contenders}
    for _ in range(2 if arguments.quick else TOGETHER_ROUNDS):
        for contender in contenders:
            told = scripts[turns][contender.speaks]
            crowds[contender.name].append(all_at_once(contender, told, count, traced=False))
    waiting = {
        c.name: all_at_once(
            c, scripts[turns][c.speaks], min(count, TRACED), traced=True
        ).waiting_bytes
        for c in contenders
    }

    def cpu_of(name: str) -> float:
        return statistics.median(crowd.cpu_s for crowd in crowds[name])

    first = contenders[0].name
    for name, seen in crowds.items():
        wall_s = statistics.median(crowd.wall_s for crowd in seen)
        ratio = waiting[name] / waiting[first]
        end = verdict(cpu_of(name), cpu_of(first)) if name.startswith("ours") else "|"
        print(
            f"| {name} | {wall_s:.2f} s | {cpu_of(name):.2f} s | {end} "
            f"| {waiting[name] / 1024:.1f} kB | {ratio:.2f}x |"
        )

    print("\n**Parts of a trajectory**, CPU\n\n| part | ours | verl |\n|---|---:|---:|")
    contenders[0].plug(Engine([]))
    contenders[1].plug(Engine([]))
    for part, mine, theirs in parts_ms(contenders[1], contenders[0], 40):
        print(f"| {part} | {mine:.3f} ms | {'' if theirs is None else f'{theirs:.3f} ms'} |")
    print("\n" + "\n".join(f"- {note}" for note in notes))


if __name__ == "__main__":
    from benchmarks import agent_loop  # gateway_agent.py has its tool from the module of this name

    agent_loop.main()

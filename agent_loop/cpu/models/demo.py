"""The demo model: half a million parameters that know how to use their tools, badly.

A short supervised run imitates a deliberately careless teacher: it speaks the tags, calls the
tools and copies what they say, but skips the tool, mistypes or forgets about half of the time.
What is left for reinforcement learning is a gap of reliability, not of ability. Rewards and curves
come from training; nothing here knows an answer that the data does not.

Two things decide whether such a small model learns to read a tool's answer at all: some loss on
prompt and tool tokens, and a copy drill (random tokens that repeat). Both are in `Recipe`.
"""

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent_loop.cpu.decoder import AsyncDecoder, BatchDecoder, Request, Sampling
from agent_loop.cpu.models.made_folder import made_whole, read_note
from agent_loop.rewards import Attempt, default_reward, reward_for
from agent_loop.tool_actions import calculate, run_code, search
from agent_loop.tools import calculator
from agent_loop.tools.cache import content_key
from agent_loop.tools.protocol import ToolCall, ToolResult
from agent_loop.tools.sandbox import Sandbox, choose_sandbox
from agent_loop.tools.search import PassageIndex
from agent_loop.tools.server.calculate import calculation_answer
from agent_loop.tools.server.retrieve import search_answer
from agent_loop.tools.server.run_code import run_answer
from agent_loop.turns.observation_style import HFCodec, InlineStyle
from agent_loop.turns.observations import render_passages
from agent_loop.turns.tags import Action, ActionKind, Tags, all_tags
from agent_loop.turns.turn_loop import Budget, Generated, Observation, Stop, run_turns
from config.schema import ToolConfig
from samplers.rows.schema import Row
from samplers.rows.sources import KINDS
from samplers.rows.sources.demo import DemoData, Task, make_demo, write_demo

NOTE = "demo.json"
"""Says what a folder was made from; a folder without it is no demo."""

TOPK = 2
"""Passages a search shows, as config/agent_loops.yaml says."""

BUDGET = Budget(max_turns=3, response_length=160, max_turn_length=32)
"""As config/profile/laptop.yaml says."""

ACTIONS = {
    "taco": (ActionKind.CODE, ActionKind.ANSWER),
    "nq": (ActionKind.SEARCH, ActionKind.ANSWER),
    "math": (ActionKind.CODE, ActionKind.ANSWER),
}

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that shapes the demo model; part of the cache's fingerprint."""

    vocabulary: int = 800
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    traces: int = 16_000
    shares: dict[str, float] = field(default_factory=lambda: {"math": 0.4, "nq": 0.3, "taco": 0.3})
    careful: dict[str, float] = field(
        default_factory=lambda: {"math": 0.45, "nq": 0.5, "taco": 0.45}
    )
    """How often the teacher does it right."""

    batch: int = 32
    drill_rows: int = 16
    drill_weight: float = 0.5
    context_weight: float = 0.3
    """Loss weight of prompt and tool tokens; the model's own have 1."""

    learning_rate: float = 3e-3
    warm_up_steps: int = 30
    min_steps: int = 1000
    max_steps: int = 1600
    probe_every: int = 100

    probe_prompts: int = 48
    floor: float = 0.25
    """Sampled reward that every source must reach before reinforcement learning can take over."""

    @property
    def passes(self) -> int:
        """Over the traces, in `max_steps`."""
        return math.ceil(self.max_steps * self.batch / self.traces)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPaths:
    """What `prepare_demo` made."""

    folder: Path
    model: Path
    train_files: list[Path]
    val_files: list[Path]
    corpus: Path
    probe: dict[str, float]
    """Sampled reward of each source after the warm start."""


class WarmStartError(RuntimeError):
    """The supervised run ended below the floor: nothing for RL to lift."""


# --- tokenizer ------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str], tags: Sequence[str], size: int) -> Any:
    """Byte-level BPE over words; every digit and space is a token of its own, and so is every tag.

    Tags are ordinary added tokens, so that they survive `decode(skip_special_tokens=True)`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[A-Za-z]+|\s|[^\sA-Za-z\d]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size - len(tags),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


class Codec(HFCodec):
    """The tokenizer as `turn_loop` and the teacher need it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._tokenizer = tokenizer

    def prompt(self, question: str) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        return self.encode(rendered)


# --- the careless teacher -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A worked example: what the model says (True) and what tools say (False), in turn."""

    question: str
    parts: list[tuple[bool, str]]


class Teacher:
    """Solves tasks, carelessly.

    Args:
        data: the demo.
        config: tags.
        index: search over the demo's corpus.
        recipe: how careful it is.
    """

    def __init__(
        self, data: DemoData, config: ToolConfig, index: PassageIndex, recipe: Recipe
    ) -> None:
        self.data, self.config, self.index, self.recipe = data, config, index, recipe
        self.authors = sorted({task.record["answer"][0] for task in data.train["nq"]})

    def trace(self, source: str, task: Task, rng: random.Random) -> Trace:
        careful = rng.random() < self.recipe.careful[source]
        make = {"math": self._math, "nq": self._nq, "taco": self._taco}[source]
        question = KINDS[source].to_row(task.record, split="train", index=0).question
        return Trace(question=question, parts=make(task, careful, rng))

    def _tool(self, text: str) -> tuple[bool, str]:
        return False, f"{self.config.start_state_marker}{text}{self.config.end_state_marker}"

    def _say(self, kind: str, text: str) -> tuple[bool, str]:
        start = getattr(self.config, f"{kind}_start_tag")
        return True, f"{start}{text}{getattr(self.config, f'{kind}_end_tag')}"

    def _math(self, task: Task, careful: bool, rng: random.Random) -> list[tuple[bool, str]]:
        work, answer = task.work, calculator.calculate(task.work)
        slip = None if careful else rng.choice(["guess", "guess", "operand", "sign", "copy"])
        if slip == "guess":
            return [self._say("answer", _other_number(answer, rng))]
        if slip == "operand":
            work = _slip_digit(work, rng)
        elif slip == "sign":
            old = next(sign for sign in "*+-" if sign in work)
            work = work.replace(old, rng.choice([s for s in "*+-" if s != old]), 1)
        result = calculator.calculate(work)
        shown = _slip_digit(result, rng) if slip == "copy" else result
        return [self._say("code", work), self._tool(result), self._say("answer", shown)]

    def _nq(self, task: Task, careful: bool, rng: random.Random) -> list[tuple[bool, str]]:
        answer = task.record["answer"][0]
        slip = None if careful else rng.choice(["guess", "guess", "query", "passage"])
        if slip == "guess":
            return [self._say("answer", rng.choice(self.authors))]
        query = rng.choice(task.work.split()) if slip == "query" else task.work
        found = self.index.search(query, TOPK)
        text = render_passages([{"document": {"contents": p.contents}} for p in found])
        if slip in ("query", "passage"):
            answer = _author(rng.choice(found).contents)
            if slip == "passage":
                answer = _author(found[-1].contents)
        return [self._say("search", query), self._tool(text), self._say("answer", answer)]

    def _taco(self, task: Task, careful: bool, rng: random.Random) -> list[tuple[bool, str]]:
        slip = None if careful else rng.choice(["int", "int", "constant", "sign"])
        program = task.work
        if slip == "int":
            program = program.replace("int(input())", "input()")
        elif slip == "constant":
            program = _slip_digit(program, rng)
        elif slip == "sign":
            old = next(sign for sign in "%*+-" if sign in program)
            program = program.replace(old, rng.choice([s for s in "*+-" if s != old]), 1)
        parts = [self._say("answer", program)]
        if rng.random() < 0.25:
            parts = [self._say("code", program), self._tool(self._output(task, program)), *parts]
        return parts

    def _output(self, task: Task, program: str) -> str:
        """What the program prints for the example; programs of the teacher only, so plain sums."""
        example = json.loads(task.record["input_output"])["inputs"][0].strip()
        inner = program.removeprefix("print(").removesuffix(")")
        if "int(" not in inner:
            return 'TypeError: can only concatenate str (not "int") to str'
        return calculator.calculate(inner.replace("int(input())", example))


def _author(contents: str) -> str:
    return contents.rsplit(" by ", 1)[1].rstrip(".")


def _other_number(text: str, rng: random.Random) -> str:
    digits = [d for d in text if d.isdigit()]
    return "".join([rng.choice("123456789"), *[rng.choice("0123456789") for _ in digits[1:]]])


def _slip_digit(text: str, rng: random.Random) -> str:
    """Another text of the same form: one digit is wrong."""
    places = [i for i, character in enumerate(text) if character.isdigit()]
    at = rng.choice(places)
    first = at == 0 or not text[at - 1].isdigit()
    choices = [d for d in ("123456789" if first else "0123456789") if d != text[at]]
    return text[:at] + rng.choice(choices) + text[at + 1 :]


# --- supervised run -------------------------------------------------------------------------------


def encode_trace(
    trace: Trace, codec: Codec, context_weight: float
) -> tuple[list[int], list[float]]:
    """Token ids as a rollout would have them, and each one's loss weight."""
    ids = codec.prompt(trace.question)
    weights = [context_weight] * len(ids)
    for from_model, text in trace.parts:
        tokens = codec.encode(text)
        ids += tokens
        weights += [1.0 if from_model else context_weight] * len(tokens)
    return ids, weights


def drill(rng: np.random.Generator, recipe: Recipe, digits: Sequence[int], size: int) -> np.ndarray:
    """Rows of random tokens that repeat: practice in copying. int64 (drill_rows, 48)."""
    rows = []
    for row in range(recipe.drill_rows):
        period = int(rng.integers(3, 13))
        pool = np.asarray(digits) if row % 2 else np.arange(3, size)
        rows.append(np.resize(rng.choice(pool, period), 48))
    return np.stack(rows)


def warm_start(
    model: Qwen3ForCausalLM,
    encoded: Sequence[tuple[list[int], list[float]]],
    digits: Sequence[int],
    recipe: Recipe,
    seed: int,
    probe: Callable[[], dict[str, float]],
    progress: Callable[[str], None],
) -> dict[str, float]:
    """Imitate the traces until every source is above the floor, within the recipe's steps.

    Returns:
        The last probe.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(encoded)) for _ in range(recipe.passes)])
    reached: dict[str, float] = {}
    for step in range(recipe.max_steps):
        done = step / recipe.min_steps
        # A model that is below the floor after the schedule moves faster again.
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * done)) if done < 1 else 0.3
        warm = min(1.0, (step + 1) / recipe.warm_up_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warm * cosine
        rows = order[step * recipe.batch : (step + 1) * recipe.batch]
        loss = _imitation_loss(model, [encoded[i] for i in rows])
        copied = torch.from_numpy(drill(rng, recipe, digits, model.config.vocab_size))
        loss = loss + recipe.drill_weight * _drill_loss(model, copied)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        number = step + 1
        if number % recipe.probe_every == 0:
            progress(f"warm start step {number}/{recipe.min_steps} loss {loss.item():.3f}")
        if number >= recipe.min_steps and (number - recipe.min_steps) % recipe.probe_every == 0:
            reached = probe()
            shown = " ".join(f"{name} {value:.2f}" for name, value in reached.items())
            progress(f"warm start step {number}: sampled reward {shown}")
            if min(reached.values()) >= recipe.floor:
                break
    return reached


def _imitation_loss(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[float]]]
) -> torch.Tensor:
    """Weighted mean over the tokens of a batch, a quarter at a time by length, to pad little."""
    by_length = sorted(rows, key=lambda row: len(row[0]))
    quarter = math.ceil(len(rows) / 4)
    parts = [by_length[at : at + quarter] for at in range(0, len(rows), quarter)]
    total = sum(sum(weights[1:]) for _, weights in rows)
    return torch.stack([_summed_loss(model, part) for part in parts]).sum() / total


def _summed_loss(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[float]]]
) -> torch.Tensor:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    weights = torch.zeros((len(rows), width))
    for row, (tokens, token_weights) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens)] = torch.tensor(token_weights)
    logits = model(input_ids=ids).logits[:, :-1]  # padded on the right: causal, so no mask needed
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * weights[:, 1:].flatten()).sum()


def _drill_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, 12:-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 13:].flatten())


# --- probe ----------------------------------------------------------------------------------------


class LocalTools:
    """The tools of the demo in this process: the tool server's answers, without HTTP.

    Serves one event loop, that of its first call.
    """

    def __init__(self, index: PassageIndex, sandbox: Sandbox) -> None:
        self.index, self.sandbox = index, sandbox
        self._known: dict[str, dict[str, Any]] = {}
        self._runs = asyncio.Semaphore(2)

    async def call(self, call: ToolCall) -> ToolResult:
        key = content_key(call)
        if key not in self._known:
            self._known[key] = await self._answer(call.tool, call.payload)
        return ToolResult(body=self._known[key])

    async def _answer(self, tool: str, payload: dict[str, Any]) -> dict[str, Any]:
        if tool == "calculate":
            return calculation_answer(payload["expression"])
        if tool == "retrieve":
            return search_answer(self.index, payload["queries"], payload["topk"], True)
        async with self._runs:
            return run_answer(await self.sandbox.run_python(payload["code"], payload["stdin"]))


async def sampled_rewards(
    model: Any,
    codec: Codec,
    tokenizer: Any,
    prompts: dict[str, list[Row]],
    tools: LocalTools,
    config: ToolConfig,
    seed: int,
) -> dict[str, float]:
    """Mean reward of one sampled trajectory per prompt, at temperature 1, through the turn loop."""
    decoder = BatchDecoder(
        model,
        eos_token_ids=[tokenizer.eos_token_id],
        seed=seed,
    )
    engine = AsyncDecoder(decoder)

    async def generate(prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=frozenset(stop.token_ids))
        done = await engine.generate(Request(prompt_ids=prompt_ids, sampling=sampling))
        return Generated(token_ids=done.token_ids, log_probs=done.log_probs)

    async def reward(source: str, row: Row) -> float:
        async def environment(action: Action) -> Observation:
            return await _act(action, source, row, tools)

        rollout = await run_turns(
            prompt_ids=codec.prompt(row.question),
            generate=generate,
            environment=environment,
            language=Tags.from_config(config, ACTIONS[source]),
            style=InlineStyle(codec, config.start_state_marker, config.end_state_marker),
            codec=codec,
            budget=BUDGET,
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


async def _act(action: Action, source: str, row: Row, tools: LocalTools) -> Observation:
    """One action as the agent loop of its source runs it."""
    if source == "nq":
        return await search(tools, action.content, TOPK)
    if source == "math":
        return await calculate(tools, action.content)
    return await run_code(tools, action.content, row.extras["example_input"])


# --- all of it ------------------------------------------------------------------------------------


def prepare_demo(
    out_dir: Path | str,
    seed: int = 0,
    *,
    recipe: Recipe | None = None,
    threads: int = 1,
    progress: Callable[[str], None] = print,
) -> DemoPaths:
    """Make data, corpus, tokenizer and warm-started model, or find them made.

    Args:
        out_dir: folder of the demo, whole or absent; what is there is replaced if it is a demo.
        seed: of the data, the weights and the supervised run.
        recipe: shape and length of the run.
        threads: for torch; on a shared core two are slower than one.
        progress: told what goes on, a line at a time.

    Raises:
        WarmStartError: a source stayed below `recipe.floor`.
        OSError: a file cannot be written, or something else is in the folder.
    """
    out_dir, recipe = Path(out_dir), recipe or Recipe()
    fingerprint = _fingerprint(recipe, seed)
    if _made(out_dir, fingerprint):
        progress(f"demo seed={seed} found in {out_dir}")
        return _paths(out_dir)
    with made_whole(out_dir, NOTE) as draft:
        probe = _make(draft, seed, recipe, threads, progress)
        made = {"fingerprint": fingerprint, "seed": seed, "probe": probe}
        (draft / NOTE).write_text(json.dumps(made, indent=2) + "\n")
    return _paths(out_dir)


def _make(
    folder: Path, seed: int, recipe: Recipe, threads: int, progress: Callable[[str], None]
) -> dict[str, float]:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(f"teacher:{seed}")
    data = make_demo(seed)
    write_demo(data, folder)
    index = PassageIndex.build(folder / "corpus.jsonl")
    config = ToolConfig(server_url="http://127.0.0.1")
    teacher = Teacher(data, config, index, recipe)
    traces = []
    for source, share in recipe.shares.items():
        tasks = data.train[source]
        for number in range(round(recipe.traces * share)):
            traces.append(teacher.trace(source, tasks[number % len(tasks)], rng))
    texts = [trace.question + "".join(text for _, text in trace.parts) for trace in traces]
    texts += [passage["contents"] for passage in data.corpus]
    tokenizer = train_tokenizer([*texts, "user assistant"], all_tags(config), recipe.vocabulary)
    codec = Codec(tokenizer)
    encoded = [encode_trace(trace, codec, recipe.context_weight) for trace in traces]
    model = _new_model(tokenizer, recipe)
    progress(
        f"demo seed={seed}: {len(traces)} traces, {len(tokenizer)} tokens, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    prompts = {
        source: [
            KINDS[source].to_row(task.record, split="train", index=i)
            for i, task in enumerate(data.train[source][-recipe.probe_prompts :])
        ]
        for source in recipe.shares
    }
    sandbox = choose_sandbox()

    def probe() -> dict[str, float]:
        model.eval()
        tools = LocalTools(index, sandbox)
        try:
            return asyncio.run(
                sampled_rewards(model, codec, tokenizer, prompts, tools, config, seed)
            )
        finally:
            model.train()

    digits = [codec.encode(digit)[0] for digit in "0123456789"]
    reached = warm_start(model, encoded, digits, recipe, seed, probe, progress)
    weak = {name: value for name, value in reached.items() if value < recipe.floor}
    if weak:
        raise WarmStartError(
            f"warm start failed after {recipe.max_steps} steps: sampled reward {weak} is below "
            f"floor={recipe.floor}; run again with another seed (mixed.seed)"
        )
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    return reached


def _new_model(tokenizer: Any, recipe: Recipe) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads // 2,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _fingerprint(recipe: Recipe, seed: int) -> str:
    """Changes with anything that shapes the demo."""
    sources = [
        Path(__file__),
        Path(__file__).parents[3] / "samplers" / "rows" / "sources" / "demo.py",
    ]
    text = json.dumps([asdict(recipe), seed]) + "".join(path.read_text() for path in sources)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _made(folder: Path, fingerprint: str) -> bool:
    return read_note(folder / NOTE).get("fingerprint") == fingerprint


def _paths(folder: Path) -> DemoPaths:
    names = ("math", "nq", "taco")
    return DemoPaths(
        folder=folder,
        model=folder / "model",
        train_files=[folder / f"{name}_train.parquet" for name in names],
        val_files=[folder / f"{name}_val.parquet" for name in names],
        corpus=folder / "corpus.jsonl",
        probe=json.loads((folder / NOTE).read_text())["probe"],
    )

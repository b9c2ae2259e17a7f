"""The speed of `verl-mixed diagnose` on a long log, beside grep.

    python -m benchmarks.diagnose [--megabytes 1024] [--folder /tmp]

The benchmark writes a log in the form of a healthy run (steps, Ray's prefixes and colours, progress
bars, vLLM's lines) with eight failures. It reads the log once, so that the log is in memory. Then
it prints rate and peak memory of each reader; each reader is a process of its own. grep counts the
lines that hold a cue, and names no cause.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from verl_mixed.diagnose.cues import cues_of
from verl_mixed.diagnose.signatures import IN_LINES

_PATTERNS = [pattern.pattern for signature in IN_LINES for pattern in signature.patterns]
_CUES = sorted({cue for pattern in _PATTERNS for cue in cues_of(pattern)})

_OURS = """
import sys
from verl_mixed.diagnose.diagnose import main
sys.exit(main([sys.argv[1]]))
"""

_FAILURE = """\
\x1b[36m(TaskRunnerV1 pid=7204)\x1b[0m Traceback (most recent call last):
\x1b[36m(TaskRunnerV1 pid=7204)\x1b[0m   File "verl/trainer/main_ppo.py", line 155, in run
\x1b[36m(TaskRunnerV1 pid=7204)\x1b[0m     self.trainer.fit(self.agent_loop_manager)
\x1b[36m(TaskRunnerV1 pid=7204)\x1b[0m torch.OutOfMemoryError: CUDA out of memory. Tried to \
allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.31 GiB is free.
"""


def noise(rng: random.Random) -> Iterator[str]:
    """Pieces of a healthy log, without end."""
    step = 0
    while True:
        step += 1
        for _ in range(200):
            pid = rng.randrange(1000, 99999)
            clock = f"2026-11-22 {step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}"
            yield (
                f"\x1b[36m(MixedAgentLoopWorker pid={pid})\x1b[0m WARNING:{clock},614:"
                "target_num_threads 8 should not exceed total physical CPU cores 2. Setting to 2.\n"
            )
            yield (
                f"\x1b[36m(vLLMHttpServer pid={pid})\x1b[0m INFO 11-22 {clock[-8:]} [loggers.py:"
                f"257] Engine 000: Avg prompt throughput: {rng.random() * 9000:.1f} tokens/s, "
                f"Running: {rng.randrange(256)} reqs, GPU KV cache usage: "
                f"{rng.random() * 100:.1f}%, Prefix cache hit rate: {rng.random() * 100:.1f}%\n"
            )
            yield (
                f"\x1b[36m(WorkerDict pid={pid}, ip=10.0.0.{rng.randrange(9)})\x1b[0m   warnings."
                'warn(f"torchtitan engine is not available: {e!r}", stacklevel=1)\x1b[32m [repeated'
                f" {rng.randrange(2, 40)}x across cluster]\x1b[0m\n"
            )
            yield (
                f"\x1b[36m(TaskRunnerV1 pid={pid})\x1b[0m                 'max_model_len': None,\n"
            )
        yield f"Training Progress:  {step % 100}%|██  | {step}/10000 [00:49<00:00, 16.12s/it]\r"
        numbers = " - ".join(
            f"{part}/{name}_{i}/mean:np.float64({rng.random():.15f})"
            for part in ("critic", "response_length", "mixed/math", "mixed/nq")
            for name in ("score", "reward_parts/acc")
            for i in range(12)
        )
        yield (
            f"\x1b[36m(TaskRunnerV1 pid=7204)\x1b[0m step:{step} - actor/loss:0.1 - "
            f"actor/grad_norm:0.6 - actor/entropy:0.4 - {numbers} - timing_s/gen:2.9 - "
            f"timing_s/step:{6 + rng.random():.3f}\n"
        )


def write_log(path: Path, size: int) -> None:
    """Write a log of about `size` bytes, with a failure at each eighth of the log."""
    written, failed = 0, 0
    with path.open("w", encoding="utf-8") as file:
        for piece in noise(random.Random(0)):
            written += file.write(piece)
            if written > (failed + 1) * size // 8:
                file.write(_FAILURE)
                failed += 1
            if written >= size:
                return


def measure(command: list[str], folder: Path) -> tuple[float, float, float]:
    """(seconds, seconds of CPU, peak memory in MB) of a command."""
    started = time.perf_counter()
    with (folder / "out").open("wb") as out:
        pid = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)],
        )
        _, status, used = os.wait4(pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise RuntimeError(f"{command[0]} ended with status {status}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="for the log (default: a temporary one)")
    arguments = parser.parse_args()
    words = "|".join(cue.translate({ord(c): "\\" + c for c in "[](){}|.*+?^$\\"}) for cue in _CUES)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        log = folder / "train.log"
        write_log(log, arguments.megabytes * 10**6)
        size = log.stat().st_size
        with log.open("rb") as file:
            lines = sum(1 for _ in file)
        print(f"log: {size / 1e6:.0f} MB, {lines} lines; {len(_CUES)} cues", flush=True)
        for what, command in (
            ("verl-mixed diagnose", [sys.executable, "-c", _OURS, str(log)]),
            ("grep -ciE, LC_ALL=C", ["env", "LC_ALL=C", "grep", "-aciE", words, str(log)]),
        ):
            seconds, cpu_s, megabytes = measure(command, folder)
            print(
                f"{what:<24} {seconds:6.1f} s  {size / 1e6 / seconds:6.0f} MB/s, "
                f"{size / 1e6 / cpu_s:4.0f} MB per CPU second, peak {megabytes:4.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()

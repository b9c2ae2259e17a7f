"""What a rate limit over a cluster costs: leases beside one remote call per token.

    python -m benchmarks.ray_limiter

"One call per token" makes a remote call for each, as verl's `TokenBucketWorker` did (a semaphore in
verl/tools/sandbox_fusion_tools.py, which 0.9.1 has no more). The rate is too high to be reached, so
what is measured is the limiter. Needs the project's own environment. About two minutes.
"""

import argparse
import asyncio
import logging
import os
import statistics
import time
from typing import Any

from rate_limit.ray_limiter import RayRateLimiter

PER_SECOND = 1_000_000
BURST = 100_000
PROCESSES = (1, 4)
COROUTINES = 64
GOAL = 80

ROWS = {"one call per token": 2_000, "leases, threads": 400_000, "leases, asyncio": 200_000}
"""What is measured -> calls in all."""


class TokenActor:
    """Counts tokens; the least that an actor can do."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self) -> int:
        self.taken += 1
        return self.taken


class Worker:
    """A process that calls."""

    def __init__(self, limiter: RayRateLimiter, tokens: Any):
        self.limiter, self.tokens = limiter, tokens

    def call(self, row: str, calls: int) -> None:
        import ray

        if row == "one call per token":
            for _ in range(calls):
                ray.get(self.tokens.take.remote())
        elif row == "leases, threads":
            for _ in range(calls):
                self.limiter.acquire()
        else:
            asyncio.run(acquire_in_coroutines(self.limiter, calls // COROUTINES))


async def acquire_in_coroutines(limiter: RayRateLimiter, each: int) -> None:
    """Not a method: one of an actor would make its process an event loop."""

    async def one() -> None:
        for _ in range(each):
            await limiter.acquire_async()

    await asyncio.gather(*(one() for _ in range(COROUTINES)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured (5)")
    rounds = parser.parse_args().rounds

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    limiter = RayRateLimiter("benchmark", per_minute=60 * PER_SECOND, burst=BURST)
    token_kind: Any = ray.remote(TokenActor)
    tokens = token_kind.options(num_cpus=0).remote()
    worker_kind: Any = ray.remote(Worker)
    workers = [worker_kind.options(num_cpus=0).remote(limiter, tokens) for _ in range(4)]

    def per_second(row: str, processes: int, calls: int) -> float:
        began = time.perf_counter()
        ray.get([w.call.remote(row, calls // processes) for w in workers[:processes]])
        return calls / (time.perf_counter() - began)

    for row in ROWS:
        per_second(row, len(workers), len(workers) * COROUTINES)
    medians = {
        (row, processes): statistics.median(
            per_second(row, processes, calls) for _ in range(rounds)
        )
        for processes in PROCESSES
        for row, calls in ROWS.items()
    }
    print(f"| {' | '.join(['tokens a second', *(f'{n} processes' for n in PROCESSES)])} |")
    print(f"|{'---|' * (1 + len(PROCESSES))}")
    for row in ROWS:
        cells = [
            f"{medians[row, n]:,.0f} ({medians[row, n] / medians['one call per token', n]:.0f}x)"
            for n in PROCESSES
        ]
        print(f"| {' | '.join([row, *cells])} |")
    worst = min(
        medians[row, n] / medians["one call per token", n]
        for row in ROWS
        for n in PROCESSES
        if row != "one call per token"
    )
    print(f"\ngoal: at least {GOAL}x; seen {worst:.0f}x: {'met' if worst >= GOAL else 'missed'}")
    limiter.close()
    ray.shutdown()


if __name__ == "__main__":
    main()

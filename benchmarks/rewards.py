"""Verdicts per second, beside those that verl brings.

    python -m benchmarks.rewards [--quick]

Mathematics: generated pairs, two thirds of them numbers, the rest roots, polynomials, tuples,
intervals, sets, matrices and words; half of them equal, each spelled otherwise than its target,
none twice. Ours is given all at once, as the trajectories of a step are; verl's `math_verify`,
which waits for one at a time, in as many threads as it has processes. `hard` are the pairs that
text and exact numbers do not settle. Questions: answers of one to four words, five targets each,
each target for eight answers, in one thread. The functions take turns in every round; medians.
"""

import argparse
import asyncio
import contextlib
import io
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent_loop.rewards.math import is_equal
from agent_loop.rewards.math_forms import compare
from agent_loop.rewards.qa import exact_match, f1
from agent_loop.rewards.scoring import PROCESSES

PAIRS = 2000
QUESTIONS = 20_000
ROUNDS = 3

Pair = tuple[str, str, bool]


# --- pairs and questions --------------------------------------------------------------------------


def make_pairs(count: int, rng: random.Random) -> list[Pair]:
    """(answer, target, whether they are equal), no target twice."""
    kinds = random.Random(0).choices(
        [_number, _fraction, _root, _polynomial, _tuple, _interval, _set, _matrix, _word],
        weights=[40, 25, 10, 9, 5, 4, 3, 2, 2],
        k=count,
    )
    return [kind(rng, i % 2 == 0) for i, kind in enumerate(kinds)]


def _some(rng: random.Random) -> int:
    return rng.randint(2, 9999)


def _number(rng: random.Random, equal: bool) -> Pair:
    n = rng.randint(1000, 10**9)
    return f"{n if equal else n + 1:,}", str(n), equal


def _fraction(rng: random.Random, equal: bool) -> Pair:
    a, b, k = _some(rng), _some(rng), rng.randint(2, 9)
    return f"{a * k}/{b * k + (not equal)}", rf"\frac{{{a}}}{{{b}}}", equal


def _root(rng: random.Random, equal: bool) -> Pair:
    a, b = _some(rng), _some(rng)
    return rf"\frac{{{2 * a}\sqrt{{{b + (not equal)}}}}}{{2}}", rf"{a}\sqrt{{{b}}}", equal


def _polynomial(rng: random.Random, equal: bool) -> Pair:
    a, b = _some(rng), _some(rng)
    return f"(x+{a})(x+{b})", f"x^2+{a + b + (not equal)}x+{a * b}", equal


def _tuple(rng: random.Random, equal: bool) -> Pair:
    a, b = _some(rng), _some(rng)
    return rf"\left({a}, \frac{{{2 * b}}}{{2}}\right)", f"({a},{b + (not equal)})", equal


def _interval(rng: random.Random, equal: bool) -> Pair:
    a = _some(rng)
    return rf"\left({a}, \infty\right)", rf"{'(' if equal else '['}{a},\infty)", equal


def _set(rng: random.Random, equal: bool) -> Pair:
    a, b, c = _some(rng), _some(rng), _some(rng)
    return rf"\{{{c}, {a}, {b}\}}", rf"\{{{a},{b + (not equal)},{c}\}}", equal


def _matrix(rng: random.Random, equal: bool) -> Pair:
    a, b = _some(rng), _some(rng)
    return (
        rf"\begin{{bmatrix}} {a} & {b} \\ 0 & 1 \end{{bmatrix}}",
        rf"\begin{{pmatrix}}{a}&{b}\\0&{1 + (not equal)}\end{{pmatrix}}",
        equal,
    )


def _word(rng: random.Random, equal: bool) -> Pair:
    word = "".join(rng.choices("bcdfghklmnprst", k=7))
    return rf"\text{{{word.title()}}}", word if equal else f"{word}s", equal


def make_questions(count: int, rng: random.Random) -> list[tuple[str, list[str]]]:
    words = ["".join(rng.choices("abcdefghilmnoprst", k=rng.randint(2, 9))) for _ in range(5000)]

    def phrase() -> str:
        text = " ".join(rng.choices(words, k=rng.randint(1, 4))).title()
        return rng.choice(["{}", "The {}", "{}.", "a {}"]).format(text)

    targets = [[phrase() for _ in range(5)] for _ in range(count // 8)]
    return [
        (rng.choice(targets[i // 8]) if i % 2 else phrase(), targets[i // 8])
        for i in range(len(targets) * 8)
    ]


# --- who judges -----------------------------------------------------------------------------------


def ours(pairs: Sequence[Pair]) -> list[bool]:
    async def all_of() -> list[bool]:
        found = await asyncio.gather(*(is_equal(answer, target) for answer, target, _ in pairs))
        return [each is True for each in found]

    return asyncio.run(all_of())


def verls_math_verify() -> Callable[[Sequence[Pair]], list[bool]] | None:
    """verl's own pool, with as many processes as ours."""
    try:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        from verl.utils.reward_score import math_verify as theirs
    except ImportError:
        return None
    theirs._pool = ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"))  # type: ignore[assignment]
    threads = ThreadPoolExecutor(PROCESSES)

    def judge(pairs: Sequence[Pair]) -> list[bool]:
        def one(pair: Pair) -> bool:
            return theirs.compute_score(f"\\boxed{{{pair[0]}}}", pair[1]) == 1.0

        with contextlib.redirect_stdout(io.StringIO()):
            return list(threads.map(one, pairs))

    return judge


def verls_math_dapo() -> Callable[[Sequence[Pair]], list[bool]] | None:
    try:
        from verl.utils.reward_score.math_dapo import is_correct_minerva
    except ImportError:
        return None

    return lambda pairs: [is_correct_minerva(f"Answer: {a}", t)[0] for a, t, _ in pairs]


def math_table(quick: bool) -> list[str]:
    rng = random.Random(1)
    count = PAIRS // 10 if quick else PAIRS
    judges: dict[str, Any] = {"ours: is_equal": ours, "verl: math_verify": verls_math_verify()}
    judges["verl: math_dapo (text only)"] = verls_math_dapo()
    judges = {name: judge for name, judge in judges.items() if judge is not None}
    for judge in judges.values():
        judge(make_pairs(20, rng))  # starts the processes
    rates: dict[tuple[str, str], list[float]] = {}
    right: dict[tuple[str, str], float] = {}
    open_share = 0.0
    for _ in range(1 if quick else ROUNDS):
        pairs = make_pairs(count, rng)
        open_share = statistics.mean(not _is_settled(pair) for pair in pairs)
        hard = [pair for pair in make_pairs(5 * count, rng) if not _is_settled(pair)][: count // 2]
        for kind, some in (
            ("all", pairs),
            ("hard", hard),
            ("text", [(b, b, True) for _, b, _ in pairs]),
        ):
            for name, judge in judges.items():
                started = time.perf_counter()
                found = judge(some)
                rates.setdefault((name, kind), []).append(
                    len(some) / (time.perf_counter() - started)
                )
                right[name, kind] = statistics.mean(
                    f == p[2] for f, p in zip(found, some, strict=True)
                )
    lines = [
        f"**Mathematics, checks per second on {PROCESSES} processes** ({count} pairs a round, of "
        f"which {open_share:.0%} are hard; in brackets: verdicts that are right)",
        "",
        "| | all pairs | hard pairs alone | equal as text |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in judges:
        cells = [
            f"{statistics.median(rates[name, kind]):,.0f} ({right[name, kind]:.1%})"
            for kind in ("all", "hard", "text")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _is_settled(pair: Pair) -> bool:
    return isinstance(compare(pair[0], pair[1]), bool)


def qa_table(quick: bool) -> list[str]:
    questions = make_questions(QUESTIONS // 10 if quick else QUESTIONS, random.Random(2))
    judges: dict[str, Callable[[str, list[str]], float]] = {
        "ours: exact_match": exact_match,
        "ours: f1": f1,
    }
    try:
        from verl.utils.reward_score.search_r1_like_qa_em import em_check
    except ImportError:
        pass
    else:
        judges["verl: search_r1_like em_check"] = em_check
    rates: dict[str, list[float]] = {name: [] for name in judges}
    for _ in range(1 if quick else 2 * ROUNDS):
        for name, judge in judges.items():
            started = time.perf_counter()
            for answer, targets in questions:
                judge(answer, targets)
            rates[name].append(len(questions) / (time.perf_counter() - started))
    return [
        "**Questions, verdicts per second in one thread** (five right answers each)",
        "",
        "| | per second |",
        "| --- | ---: |",
        *(f"| {name} | {statistics.median(rate):,.0f} |" for name, rate in rates.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Verdicts per second, beside those of verl.")
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    quick = parser.parse_args().quick
    print(f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}.\n")
    print("\n".join([*math_table(quick), "", *qa_table(quick)]))


if __name__ == "__main__":
    main()

"""Passage search beside what others use: SQLite's FTS5, bm25s, rank-bm25 and tantivy as it is.

    python -m benchmarks.search [--quick] [--passages 100000] [--only NAME ...]

Generated passages of about 100 words of a Zipf vocabulary, as natural text has it, so that its
commonest words are in nearly every passage. Two kinds of query, each from the words of one passage:
`keywords` has 2 to 6 of them that are not among the 100 commonest; `question` has 2 to 5 of them
and 3 to 5 of the commonest, as who asks in sentences. All answer the three best passages by BM25,
one query after the other in one thread; no engine leaves out stop words. The engines take turns in
every round. Build, open and memory are measured in a process each: memory is what it grows by when
it opens the index and answers 200 questions, mapped files included.
"""

import argparse
import gc
import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from tool_server.search import PassageIndex

PASSAGES = 100_000
VOCABULARY = 100_000
COMMON = 100
"""Words that count as stop words in the queries."""

K = 3
ROUNDS = 5
SECONDS_A_TURN = 2.0
"""An engine answers for so long in a round, one kind of query."""

LEAST_QUERIES = 8
MEMORY_QUERIES = 200

GOAL_PER_S = 2500
GOAL_P99_MS = 6.0

OURS = "ours: PassageIndex"


# --- passages and queries -------------------------------------------------------------------------


def make_words() -> list[str]:
    """The vocabulary, commonest first."""
    rng = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < VOCABULARY:
        length = rng.randint(3, 9)
        words["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))] = None
    return list(words)


def make_passages(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    words = make_words()
    share = 1 / np.arange(1, VOCABULARY + 1)
    below = np.cumsum(share / share.sum())
    lengths = np.clip(rng.normal(100, 20, count), 20, None).astype(int)
    return [
        " ".join(
            words[i] for i in np.minimum(np.searchsorted(below, rng.random(n)), VOCABULARY - 1)
        )
        for n in lengths
    ]


def make_queries(passages: list[str], count: int) -> dict[str, list[str]]:
    """Kind -> queries."""
    rng = random.Random(1)
    seen = Counter(word for passage in passages[:20_000] for word in passage.split())
    common = dict(seen.most_common(COMMON))
    kinds: dict[str, list[str]] = {"keywords": [], "question": []}
    for _ in range(count):
        own = sorted({word for word in rng.choice(passages).split() if word not in common})
        asked = rng.sample(own, min(len(own), rng.randint(2, 6)))
        kinds["keywords"].append(" ".join(asked))
        asked = rng.sample(own, min(len(own), rng.randint(2, 5)))
        asked += rng.choices(list(common), list(common.values()), k=rng.randint(3, 5))
        rng.shuffle(asked)
        kinds["question"].append(" ".join(asked))
    return kinds


def read_corpus(path: Path) -> Iterator[str]:
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)["contents"]


# --- engines --------------------------------------------------------------------------------------

Search = Callable[[str], list[str]]
"""A query to the texts of the best passages."""


class Engine(Protocol):
    """How one engine is built and opened; both are told the corpus and a path of its own."""

    name: str
    note: str

    def build(self, corpus: Path, path: Path) -> None: ...

    def open(self, corpus: Path, path: Path) -> Search: ...


class Ours:
    name = OURS
    note = "one file each of postings and texts, mapped; survives a killed build"

    def build(self, corpus: Path, path: Path) -> None:
        PassageIndex.build(corpus, path)

    def open(self, corpus: Path, path: Path) -> Search:
        index = PassageIndex.open(path)
        return lambda query: [passage.contents for passage in index.search(query, K)]


class PlainTantivy:
    name = "tantivy: all words in one query"
    note = "the same index, without the split into rare and common words"

    def build(self, corpus: Path, path: Path) -> None:
        PassageIndex.build(corpus, path)

    def open(self, corpus: Path, path: Path) -> Search:
        index = PassageIndex.open(path)
        ranking, searcher = index._ranking, index._searcher

        def search(query: str) -> list[str]:
            hits = ranking.all_words(query, K)
            return [str(searcher.doc(address).get_first("contents")) for _, address in hits]

        return search


class Bm25s:
    name = "bm25s, numba"
    note = "scores of every word and passage precomputed, all in memory, texts too"

    def build(self, corpus: Path, path: Path) -> None:
        import bm25s  # pyright: ignore[reportMissingImports]

        model = bm25s.BM25(backend="numba")
        texts = [text.split() for text in read_corpus(corpus)]
        model.index(texts, show_progress=False)
        model.save(str(path))

    def open(self, corpus: Path, path: Path) -> Search:
        import bm25s  # pyright: ignore[reportMissingImports]

        model = bm25s.BM25.load(str(path))
        texts = list(read_corpus(corpus))
        known = model.vocab_dict

        def search(query: str) -> list[str]:
            words = [word for word in query.split() if word in known]
            if not words:
                return []
            documents, _ = model.retrieve([words], k=K, show_progress=False, n_threads=0)
            return [texts[i] for i in documents[0]]

        return search


class Fts5:
    name = "SQLite FTS5"
    note = "on disk; reads the length of every passage that has any word"

    def build(self, corpus: Path, path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.execute("create virtual table passages using fts5(contents)")
        connection.executemany(
            "insert into passages values (?)", ((text,) for text in read_corpus(corpus))
        )
        connection.execute("insert into passages(passages) values ('optimize')")
        connection.commit()
        connection.close()

    def open(self, corpus: Path, path: Path) -> Search:
        connection = sqlite3.connect(path)
        ask = f"select contents from passages where passages match ? order by rank limit {K}"

        def search(query: str) -> list[str]:
            words = " OR ".join(f'"{word}"' for word in query.split())
            return [text for (text,) in connection.execute(ask, (words,))]

        return search


class RankBm25:
    name = "rank-bm25"
    note = "keeps nothing on disk, so to open it is to build it"

    def build(self, corpus: Path, path: Path) -> None:
        self.open(corpus, path)

    def open(self, corpus: Path, path: Path) -> Search:
        from rank_bm25 import BM25Okapi  # pyright: ignore[reportMissingImports]

        texts = list(read_corpus(corpus))
        model = BM25Okapi([text.split() for text in texts])
        return lambda query: model.get_top_n(query.split(), texts, n=K)


ENGINES: list[Engine] = [Ours(), PlainTantivy(), Bm25s(), Fts5(), RankBm25()]


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One engine in a process of its own."""

    build_s: float
    open_s: float
    memory_mb: float
    disk_mb: float


def footprint(engine: Engine, folder: Path) -> Footprint:
    """Measured by two fresh processes: one builds, one opens. What was built stays."""
    build = _child(engine, folder, "build")
    opened = _child(engine, folder, "open")
    path = folder / str(ENGINES.index(engine))
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
    return Footprint(
        build_s=build["seconds"],
        open_s=opened["seconds"],
        memory_mb=opened["memory_mb"],
        disk_mb=sum(f.stat().st_size for f in files if f.exists()) / 1e6,
    )


def _child(engine: Engine, folder: Path, what: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.search", "--measure", what, engine.name]
    run = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"cannot {what} {engine.name}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def measure(what: str, name: str, folder: Path) -> dict[str, float]:
    """In the child."""
    engine = next(engine for engine in ENGINES if engine.name == name)
    corpus, path = folder / "corpus.jsonl", folder / str(ENGINES.index(engine))
    process = psutil.Process()
    if what == "build":
        started = time.perf_counter()
        engine.build(corpus, path)
        return {"seconds": time.perf_counter() - started}
    queries = json.loads((folder / "queries.json").read_text())["question"][:MEMORY_QUERIES]
    # what it imports is not counted, nor is compiling
    if isinstance(engine, Bm25s):
        import bm25s  # noqa: F401 # pyright: ignore[reportMissingImports]
        import numba  # noqa: F401 # pyright: ignore[reportMissingImports]
    before = process.memory_info().rss
    started = time.perf_counter()
    search = engine.open(corpus, path)
    seconds = time.perf_counter() - started
    until = time.perf_counter() + 20
    for query in queries:
        search(query)
        if time.perf_counter() > until:
            break
    gc.collect()
    return {"seconds": seconds, "memory_mb": (process.memory_info().rss - before) / 1e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine's part of a round."""

    times_s: list[float]
    cpu_s: float


def turn(search: Search, queries: list[str], offset: int) -> Turn:
    """Answer for about `SECONDS_A_TURN`."""
    times: list[float] = []
    spent, cpu_s = 0.0, time.process_time()
    while len(times) < LEAST_QUERIES or (spent < SECONDS_A_TURN and len(times) < len(queries)):
        query = queries[(offset + len(times)) % len(queries)]
        started = time.perf_counter()
        search(query)
        times.append(time.perf_counter() - started)
        spent += times[-1]
    return Turn(times_s=times, cpu_s=time.process_time() - cpu_s)


def agree(ours: PassageIndex, queries: list[str]) -> None:
    """That the split changes no score."""
    for query in queries:
        best, exact = ours._ranking.best(query, K), ours._ranking.all_words(query, K)
        assert np.allclose([s for s, _ in best], [s for s, _ in exact], rtol=1e-5), query


# --- tables ---------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--passages", type=int, default=PASSAGES)
    parser.add_argument("--quick", action="store_true", help="10,000 passages, two rounds")
    parser.add_argument("--only", nargs="+", default=[], help="words in the names of engines")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what, name, folder = arguments.measure
        print(json.dumps(measure(what, name, Path(folder))))
        return
    count = min(arguments.passages, 10_000) if arguments.quick else arguments.passages
    rounds = 2 if arguments.quick else ROUNDS
    passages = make_passages(count)
    queries = make_queries(passages, 4000)
    with tempfile.TemporaryDirectory(prefix="search-benchmark-") as name:
        folder = Path(name)
        with (folder / "corpus.jsonl").open("w") as file:
            for number, text in enumerate(passages):
                file.write(json.dumps({"id": str(number), "contents": text}) + "\n")
        (folder / "queries.json").write_text(json.dumps(queries))
        del passages
        compare(folder, queries, count, rounds, arguments.only)


def compare(
    folder: Path, queries: dict[str, list[str]], count: int, rounds: int, only: list[str]
) -> None:
    """Build, measure in turns, print."""
    sizes: dict[str, Footprint] = {}
    searches: dict[str, Search] = {}
    missing: list[str] = []
    for engine in ENGINES:
        if only and not any(word in engine.name for word in only):
            continue
        try:
            sizes[engine.name] = footprint(engine, folder)
        except RuntimeError as error:
            missing.append(f"{engine.name}: {str(error).strip().splitlines()[-1]}")
            continue
        path = folder / str(ENGINES.index(engine))
        searches[engine.name] = engine.open(folder / "corpus.jsonl", path)
    if OURS in searches:
        sample = [query for own in queries.values() for query in own[:500]]
        agree(PassageIndex.open(folder / "0"), sample)
    for search in searches.values():
        for own in queries.values():
            for query in own[:3]:
                search(query)  # warm, and compiled
    seen: dict[tuple[str, str], list[Turn]] = {}
    for number in range(rounds):
        for kind, own in queries.items():
            for name, search in searches.items():
                seen.setdefault((kind, name), []).append(turn(search, own, number * 800))

    print(
        f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; {count:,} passages, the {K} "
        f"best; medians of {rounds} rounds in turn, one thread\n"
    )
    print("| | build | open | memory | on disk |\n|---|---:|---:|---:|---:|")
    for name, size in sizes.items():
        opened = f"{size.open_s * 1e3:,.1f} ms" if size.open_s < 1 else f"{size.open_s:.1f} s"
        print(
            f"| {name} | {size.build_s:.1f} s | {opened} "
            f"| {size.memory_mb:,.0f} MB | {size.disk_mb:,.0f} MB |"
        )
    figures = {key: figures_of(own) for key, own in seen.items()}
    for kind in queries:
        example = queries[kind][0]
        print(f"\n**{kind}**, as `{example}`\n")
        print("| | queries/s | per CPU second | p50 | p99 | ours, times as many |")
        print("|---|---:|---:|---:|---:|---:|")
        mine = figures.get((kind, OURS))
        for name in searches:
            own = figures[kind, name]
            ratio = "" if mine is None or name == OURS else f"{mine.per_s / own.per_s:,.3g}x"
            print(
                f"| {name} | {own.per_s:,.0f} | {own.per_cpu_s:,.0f} | {own.p50_ms:.2f} ms "
                f"| {own.p99_ms:.2f} ms | {ratio} |"
            )
    print()
    for kind in queries:
        if mine := figures.get((kind, OURS)):
            print(
                f"- goal, {kind}: at least {GOAL_PER_S:,} queries/s, seen {mine.per_s:,.0f}: "
                f"{verdict(mine.per_s >= GOAL_PER_S)}; p99 below {GOAL_P99_MS:.0f} ms, seen "
                f"{mine.p99_ms:.2f} ms: {verdict(mine.p99_ms < GOAL_P99_MS)}"
            )
    for engine in ENGINES:
        if engine.name in searches:
            print(f"- {engine.name}: {engine.note}")
    for line in missing:
        print(f"- not measured: {line}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Rates are medians of the rounds, percentiles of all queries."""

    per_s: float
    per_cpu_s: float
    p50_ms: float
    p99_ms: float


def figures_of(rounds: list[Turn]) -> Figures:
    all_ms: Any = np.concatenate([np.array(each.times_s) for each in rounds]) * 1e3
    return Figures(
        per_s=statistics.median(len(each.times_s) / sum(each.times_s) for each in rounds),
        per_cpu_s=statistics.median(len(each.times_s) / each.cpu_s for each in rounds),
        p50_ms=float(np.percentile(all_ms, 50)),
        p99_ms=float(np.percentile(all_ms, 99)),
    )


def verdict(good: bool) -> str:
    return "met" if good else "MISSED"


if __name__ == "__main__":
    main()

"""Passage search: any text is a query, a wrong corpus is named, an index is whole or absent."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_server.search import PassageIndex
from tool_server.search import index as index_module
from tool_server.search.corpus import BadLine, CorpusReader
from tool_server.search.index import MANIFEST, index_beside
from verl_mixed.cli import main

CORPUS = [
    {"id": "a", "contents": '"Sapphire_Bridge"\nBuilt by Ann Lee in Łódź.'},
    {"id": "b", "contents": '"Iron Bridge"\nIron, iron and bolts.'},
]

VOCABULARY = [f"w{number}" for number in range(60)]
ODD = ["unknown", *(f"{kind}{number}" for kind in ("rare", "middle") for number in range(3))]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_corpus(path: Path, passages: list[dict[str, str]] = CORPUS) -> Path:
    return write(path, [json.dumps(passage) for passage in passages])


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> PassageIndex:
    return PassageIndex.build(write_corpus(tmp_path_factory.mktemp("corpus") / "c.jsonl"))


@pytest.fixture(scope="module")
def zipf(tmp_path_factory) -> PassageIndex:
    """Some words are in nearly every passage, others in one or two; some passages are equal."""
    rng = random.Random(0)
    weights = [1 / rank for rank in range(1, len(VOCABULARY) + 1)]
    passages = [
        {"id": str(i), "contents": " ".join(rng.choices(VOCABULARY, weights, k=rng.randint(1, 30)))}
        for i in range(800)
    ]
    # Rare words in long passages score little, less common ones said again and again score more.
    passages += [
        {"id": f"long{i}", "contents": f"rare{i % 3} " + " ".join(rng.choices(VOCABULARY, k=400))}
        for i in range(9)
    ]
    passages += [
        {"id": f"short{i}", "contents": f"middle{i % 3} " * rng.randint(1, 9)} for i in range(300)
    ]
    return PassageIndex.build(
        write_corpus(tmp_path_factory.mktemp("zipf") / "c.jsonl", passages + passages[:100])
    )


# --- queries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("iron", ["b"]),
        ("IRON bridge!", ["b", "a"]),
        ("sapphire_bridge", ["a", "b"]),
        ("łódź", ["a"]),
        ("contents:bolts NOT", ["b"]),
        ("granite", []),
        ("", []),
    ],
)
def test_the_words_of_a_query_find_their_passages_best_first(index, query, ids):
    assert [passage.document["id"] for passage in index.search(query, 2)] == ids


def test_no_more_passages_come_than_asked_for(index):
    assert len(index.search("bridge", 1)) == 1


def test_fewer_than_one_passage_cannot_be_asked_for(index):
    with pytest.raises(ValueError, match="k=0"):
        index.search("bridge", 0)


@given(st.text(max_size=80), st.integers(1, 5))
def test_no_text_breaks_a_search(index, query, k):
    assert len(index.search(query, k)) <= k


def test_a_query_as_long_as_a_book_is_answered(index):
    assert index.search("bolts " + " ".join(map(str, range(20_000))), 1)[0].document["id"] == "b"


@given(
    st.lists(st.sampled_from(VOCABULARY[::3]) | st.sampled_from(ODD), max_size=8),
    st.integers(1, 20),
)
def test_common_words_are_left_out_only_where_they_change_nothing(zipf, words, k):
    query = " ".join(words)
    best = zipf._ranking.best(query, k)
    exact = zipf._ranking.all_words(query, k)
    assert [score for score, _ in best] == pytest.approx([score for score, _ in exact], rel=1e-5)
    # Equal up to the order of passages whose scores differ by rounding alone.
    scores = dict(zip(((a.segment_ord, a.doc) for _, a in exact), exact, strict=True))
    least = exact[-1][0] if exact else 0.0
    for score, address in best:
        known = scores.get((address.segment_ord, address.doc))
        assert score == pytest.approx(known[0] if known else least, rel=1e-5)


def test_a_common_word_can_outdo_a_rare_one(zipf):
    assert {passage.document["id"][:5] for passage in zipf.search("rare0 middle0", 3)} == {"short"}
    assert {passage.document["id"][:4] for passage in zipf.search("rare0", 3)} == {"long"}


def test_a_word_that_comes_twice_counts_twice(index):
    (once,), (twice,) = index.search("bolts", 1), index.search("bolts Bolts", 1)
    assert twice.score == pytest.approx(2 * once.score, rel=1e-6)


@pytest.mark.parametrize("word", ["w0", "w0 w1 w2", "w59 w0", "w0 w0 w59"])
def test_scores_fall_from_one_passage_to_the_next(zipf, word):
    scores = [passage.score for passage in zipf.search(word, 50)]
    assert scores == sorted(scores, reverse=True)


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=12), st.text(max_size=200)), min_size=1, max_size=5
    ),
    st.integers(0),
)
def test_what_was_put_in_comes_out_unchanged(tmp_path_factory, texts, pick):
    passages = [
        {"id": id, "contents": f"key{number} {text}"} for number, (id, text) in enumerate(texts)
    ]
    folder = tmp_path_factory.mktemp("exact")
    built = PassageIndex.build(write_corpus(folder / "c.jsonl", passages))
    number = pick % len(passages)
    (found,) = built.search(f"key{number}", 1)
    assert found.document == passages[number]


@pytest.mark.parametrize(
    "text", ["हिन्दी विकिपीडिया", "straße İstanbul", "東京 タワー", "naïve café"]
)
def test_a_query_is_split_into_words_as_the_passages_were(tmp_path, text):
    built = PassageIndex.build(write_corpus(tmp_path / "c.jsonl", [{"id": "0", "contents": text}]))
    for word in text.split():
        assert [passage.document["id"] for passage in built.search(word, 1)] == ["0"]


def test_threads_share_an_index(zipf):
    queries = [f"w{number} w0" for number in range(60)] * 5
    expected = [zipf.search(query, 3) for query in queries]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda query: zipf.search(query, 3), queries)) == expected


# --- the corpus -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['{"id": "a", "contents": "x"}', "{"], "line 2: not JSON"),
        (['{"id": "a"}'], "line 1: .*no `contents`"),
        (['{"contents": "x"}'], "line 1: .*`id`"),
        (['{"id": ["a"], "contents": "x"}'], r"line 1: .*\$\.id"),
        (['{"id": "a", "contents": 5}'], r"line 1: .*\$\.contents"),
        (['["a", "x"]'], "line 1: .*object"),
        (["[" * 100_000], "line 1"),
        (['{"id": "a", "contents": "\\ud800"}'], "line 1"),
    ],
)
def test_a_corpus_that_is_wrong_is_refused_with_its_line(tmp_path, lines, why):
    with pytest.raises(BadLine, match=why):
        PassageIndex.build(write(tmp_path / "c.jsonl", lines))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no passage"),
        (["", '{"id": "a", "contents": " "}'], "no passages .*blank line.*contents is empty"),
    ],
)
def test_a_corpus_without_passages_is_refused(tmp_path, lines, why):
    with pytest.raises(ValueError, match=why):
        PassageIndex.build(write(tmp_path / "c.jsonl", lines))


def test_a_corpus_in_another_encoding_is_refused_with_its_line(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes('{"id": 1, "contents": "x"}\n{"id": 2, "contents": "Łódź"}\n'.encode("cp1250"))
    with pytest.raises(BadLine, match="line 2: not JSON in UTF-8"):
        PassageIndex.build(path)


def test_no_corpus_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        PassageIndex.build(tmp_path / "none.jsonl")


def test_bad_lines_are_left_out_and_counted_when_asked(tmp_path):
    lines = ["{", '{"id": 1}', "", '{"id": 7, "contents": "x"}', '{"id": 2, "contents": ""}']
    built = PassageIndex.build(write(tmp_path / "c.jsonl", lines), skip_bad=True)
    assert [passage.document["id"] for passage in built.search("x", 3)] == ["7"]
    assert built.read is not None and (built.read.rows, built.size) == (5, 1)
    assert built.read.dropped == {
        "not JSON in UTF-8": 1,
        "a field is missing or wrong": 1,
        "blank line": 1,
        "contents is empty": 1,
    }


def test_rows_and_line_ends_as_other_tools_write_them_are_read(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": 1, "contents": "iron", "url": null}\r\n'
        b'{"id": "2", "title": "Steel", "text": "is no ore"}'
    )
    built = PassageIndex.build(path)
    assert built.search("steel", 1)[0].contents == '"Steel"\nis no ore'
    assert built.search("iron", 1)[0].document["id"] == "1"


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.jsonl"])
def test_a_packed_corpus_is_told_by_its_bytes(tmp_path, name):
    plain = write_corpus(tmp_path / "plain.jsonl")
    (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    assert PassageIndex.build(tmp_path / name).search("iron", 1)[0].document["id"] == "b"


def test_a_packed_corpus_that_is_cut_is_refused(tmp_path):
    whole = gzip.compress(write_corpus(tmp_path / "plain.jsonl").read_bytes())
    (tmp_path / "c.gz").write_bytes(whole[:-12])
    with pytest.raises(ValueError, match="damaged after line"):
        PassageIndex.build(tmp_path / "c.gz")


def test_progress_ends_with_all_that_was_read(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "PROGRESS_EVERY", 1)
    told: list[tuple[int, int, int]] = []
    path = write_corpus(tmp_path / "c.jsonl")
    PassageIndex.build(path, progress=lambda c: told.append((c.kept, c.read_bytes, c.size_bytes)))
    assert [kept for kept, _, _ in told] == [1, 2, 2]
    assert told[-1][1:] == (path.stat().st_size, path.stat().st_size)


def test_a_limit_ends_the_reading(tmp_path):
    built = PassageIndex.build(write_corpus(tmp_path / "c.jsonl"), limit=1)
    assert built.size == 1
    assert not built.is_of(tmp_path / "c.jsonl")


# --- the folder -----------------------------------------------------------------------------------


def test_an_index_of_its_own_folder_is_gone_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    corpus = write_corpus(tmp_path / "c.jsonl")
    own = PassageIndex.build(corpus)
    assert len(list(tmp_path.glob("passages-*"))) == 1
    del own
    assert list(tmp_path.iterdir()) == [corpus]


def test_a_wrong_corpus_leaves_no_folder_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    corpus = write(tmp_path / "c.jsonl", ["{"])
    for target in (None, tmp_path / "index"):
        with pytest.raises(BadLine, match="line 1"):
            PassageIndex.build(corpus, target)
    assert list(tmp_path.iterdir()) == [corpus]


def test_an_index_opens_without_its_corpus_and_serves_after_its_folder_is_gone(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl")
    PassageIndex.build(corpus, tmp_path / "index")
    corpus.unlink()
    opened = PassageIndex.open(tmp_path / "index")
    shutil.rmtree(tmp_path / "index")
    assert opened.search("bolts", 1)[0].contents == CORPUS[1]["contents"]


def test_an_index_can_be_moved_and_is_not_touched_by_who_reads_it(tmp_path):
    PassageIndex.build(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index")
    (tmp_path / "index").rename(tmp_path / "moved")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "moved").iterdir()}
    assert PassageIndex.open(tmp_path / "moved").size == 2
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "moved").iterdir()}
    assert before == after


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_someone_who_may_only_read_can_open_an_index(tmp_path):
    PassageIndex.build(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index")
    shared = Path("/tmp") / f"index-of-{os.getpid()}"
    shutil.copytree(tmp_path / "index", shared)
    program = (
        "import os, sys; from tool_server.search import PassageIndex; "
        "os.setgid(65534); os.setuid(65534); "
        "print(PassageIndex.open(sys.argv[1]).search('bolts', 1)[0].document['id'])"
    )
    try:
        run = subprocess.run(
            [sys.executable, "-c", program, str(shared)], capture_output=True, text=True
        )
    finally:
        shutil.rmtree(shared)
    assert run.stdout == "b\n", run.stderr


def test_a_built_index_replaces_the_one_that_is_there(tmp_path):
    PassageIndex.build(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index")
    old = PassageIndex.open(tmp_path / "index")
    PassageIndex.build(
        write_corpus(tmp_path / "d.jsonl", [{"id": "n", "contents": "new"}]), tmp_path / "index"
    )
    (found,) = PassageIndex.open(tmp_path / "index").search("new", 1)
    assert found.document["id"] == "n"
    assert old.search("bolts", 1)[0].document["id"] == "b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "d.jsonl", "index"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(ValueError, match="something else is there"):
        PassageIndex.build(write_corpus(tmp_path / "c.jsonl"), tmp_path / "home")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


def largest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


DAMAGE = {
    "it has no manifest.json": lambda folder: (folder / MANIFEST).unlink(),
    "Invalid JSON": lambda folder: (folder / MANIFEST).write_text("{"),
    "corpus\n  Field required": lambda folder: (folder / MANIFEST).write_text('{"format": 1}'),
    "FileDoesNotExist": lambda folder: largest(folder).unlink(),
    "cannot open index.*": lambda folder: os.truncate(largest(folder), 10),
    "cannot open index": lambda folder: (folder / "meta.json").write_bytes(
        b"x" * (folder / "meta.json").stat().st_size
    ),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_index_is_refused_with_what_is_wrong(tmp_path, why):
    PassageIndex.build(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index")
    DAMAGE[why](tmp_path / "index")
    with pytest.raises(ValueError, match=f"(?s){why}.*prepare corpus"):
        PassageIndex.open(tmp_path / "index")


def test_an_index_of_an_earlier_release_opens(tmp_path):
    PassageIndex.build(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / MANIFEST).read_text())
    manifest["corpus"]["name"] = "c.jsonl"
    manifest |= {"format": 1, "tantivy": "0", "passages": 2, "rows": 2, "dropped": {}, "files": {}}
    (tmp_path / "index" / MANIFEST).write_text(json.dumps(manifest))
    assert PassageIndex.open(tmp_path / "index").is_of(tmp_path / "c.jsonl")


def test_a_folder_that_is_no_index_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not an index of passages"):
        PassageIndex.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="prepare corpus"):
        PassageIndex.open(tmp_path / "none")


def test_a_killed_build_leaves_nothing_that_opens_and_the_next_one_cleans_up(tmp_path):
    passages = [{"id": str(i), "contents": f"w{i}"} for i in range(index_module.PROGRESS_EVERY)]
    corpus = write_corpus(tmp_path / "c.jsonl", passages)
    program = (
        "import os, signal, sys; from tool_server.search import PassageIndex\n"
        "def die(progress): os.kill(os.getpid(), signal.SIGKILL)\n"
        "PassageIndex.build(sys.argv[1], sys.argv[2], progress=die)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(corpus), str(tmp_path / "index")])
    assert killed.returncode == -signal.SIGKILL
    (draft,) = (path for path in tmp_path.iterdir() if path != corpus)
    assert any(draft.iterdir())
    (draft / "0.idx").write_text("of a segment that was not finished")
    for folder in (tmp_path / "index", draft):
        with pytest.raises((FileNotFoundError, ValueError), match="cannot open index"):
            PassageIndex.open(folder)
    built = PassageIndex.build(corpus, tmp_path / "index")
    assert built.size == len(passages) and not (tmp_path / "index" / "0.idx").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "index"]


# --- what a setting names -------------------------------------------------------------------------


def test_an_index_beside_a_corpus_is_used_while_it_is_of_it(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "c.jsonl")
    PassageIndex.build(corpus, index_beside(corpus))
    monkeypatch.setattr(CorpusReader, "__iter__", None)  # whoever reads it now fails
    os.utime(corpus, ns=(1, 1))  # another time, the same content
    assert PassageIndex.of(corpus).size == 2
    assert PassageIndex.of(index_beside(corpus)).size == 2


def test_a_corpus_that_changed_is_indexed_again(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl")
    PassageIndex.build(corpus, index_beside(corpus))
    stat = corpus.stat()
    corpus.write_text(corpus.read_text().replace("bolts", "nails"))
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert corpus.stat().st_size == stat.st_size
    assert PassageIndex.of(corpus).search("nails", 1)[0].document["id"] == "b"
    assert PassageIndex.open(index_beside(corpus)).search("nails", 1) == []


# --- verl-mixed prepare corpus --------------------------------------------------------------------


def test_prepare_corpus_says_what_was_read_kept_and_dropped(tmp_path, capsys):
    corpus = write(tmp_path / "c.jsonl", [*map(json.dumps, CORPUS), "", "{"])
    assert main(["prepare", "corpus", "--input", str(corpus)]) == 1
    assert "line 4: not JSON" in capsys.readouterr().err
    assert not index_beside(corpus).exists()
    assert main(["prepare", "corpus", "--input", str(corpus), "--skip-bad"]) == 0
    words = capsys.readouterr().out.split()
    for row in (["read", "│", "4"], ["kept", "│", "2"], ["line", "│", "1"]):
        assert any(words[at : at + 3] == row for at in range(len(words))), row
    assert PassageIndex.of(corpus).size == 2


def test_prepare_corpus_does_nothing_where_it_is_done(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "c.jsonl")
    words = ["prepare", "corpus", "--input", str(corpus), "--output", str(tmp_path / "index")]
    assert main(words) == 0
    before = (tmp_path / "index").stat().st_ino
    assert main(words) == 0
    assert "already" in capsys.readouterr().out
    assert (tmp_path / "index").stat().st_ino == before


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--input", "none.jsonl"], 2, "no such file"),
        (["--input", "."], 2, "it is a folder"),
        (["--input", "c.jsonl", "--output", "full"], 2, "something else is there"),
        (["--input", "c.jsonl", "--output", "c.jsonl/index"], 1, "directory"),
    ],
)
def test_prepare_corpus_says_what_it_cannot_do(tmp_path, monkeypatch, capsys, words, code, why):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "c.jsonl")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["prepare", "corpus", *words]) == code
    assert why in capsys.readouterr().err

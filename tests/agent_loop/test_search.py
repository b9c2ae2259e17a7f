"""Passage search: any text is a query, and a corpus that is wrong is named."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools.search import PassageIndex

CORPUS = [
    {"id": "a", "contents": '"Sapphire_Bridge"\nBuilt by Ann Lee in Łódź.'},
    {"id": "b", "contents": '"Iron Bridge"\nIron, iron and bolts.'},
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> PassageIndex:
    folder = tmp_path_factory.mktemp("corpus")
    return PassageIndex.build(write(folder / "c.jsonl", [json.dumps(p) for p in CORPUS]))


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
    assert [passage.id for passage in index.search(query, 2)] == ids


def test_no_more_passages_come_than_asked_for(index):
    assert len(index.search("bridge", 1)) == 1


@given(st.text(max_size=80), st.integers(1, 5))
def test_no_text_breaks_a_search(index, query, k):
    assert len(index.search(query, k)) <= k


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['{"id": "a", "contents": "x"}', "{"], "line 2"),
        (['{"id": "a"}'], "line 1"),
        ([], "no passage"),
    ],
)
def test_a_corpus_that_is_wrong_is_refused_with_its_line(tmp_path, lines, why):
    with pytest.raises(ValueError, match=why):
        PassageIndex.build(write(tmp_path / "c.jsonl", lines))


def test_an_index_of_its_own_folder_is_gone_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    corpus = write(tmp_path / "c.jsonl", [json.dumps(p) for p in CORPUS])
    own = PassageIndex.build(corpus)
    assert len(list(tmp_path.glob("passages-*"))) == 1
    del own
    assert list(tmp_path.glob("passages-*")) == []

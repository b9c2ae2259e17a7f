"""Which pairs of nodes are measured together, which is slow, and what is said."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mixed.checks.machine.fabric import (
    ANY_PORT,
    Link,
    Reduce,
    judge,
    needs_pairs,
    rounds,
    slow,
)

rates = st.dictionaries(st.integers(0, 99), st.floats(1.0, 1e11), max_size=40)


@given(count=st.integers(1, 40))
def test_every_pair_is_measured_once_and_no_node_twice_at_the_same_time(count: int) -> None:
    turns = list(rounds(range(count)))
    pairs = [frozenset(pair) for turn in turns for pair in turn]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    for turn in turns:
        nodes = [node for pair in turn for node in pair]
        assert len(nodes) == len(set(nodes))
    assert len(turns) <= count


def test_the_rounds_of_four_nodes() -> None:
    assert list(rounds("abcd")) == [
        [("a", "d"), ("b", "c")],
        [("a", "c"), ("d", "b")],
        [("a", "b"), ("c", "d")],
    ]


@pytest.mark.parametrize(
    ("given_rates", "found"),
    [
        ({}, []),
        ({"ab": 5.0}, []),
        ({"ab": 100.0, "ba": 10.0}, ["ba"]),
        ({"ab": 100.0, "ba": 60.0}, []),
        ({"ab": 100.0, "ba": 100.0, "ac": 49.9, "ca": 100.0}, ["ac"]),
        ({"ab": 100.0, "ba": 100.0, "ac": 50.0, "ca": 100.0}, []),
        ({"a": 9.0, "b": 1.0, "c": 2.0, "d": 9.0, "e": 9.0}, ["b", "c"]),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 9.0}, []),
    ],
)
def test_slow_pairs(given_rates: dict[str, float], found: list[str]) -> None:
    assert slow(given_rates) == found


@given(rates, st.floats(0.001, 1000.0))
def test_slow_is_below_half_of_the_median_whatever_the_unit_and_the_order(
    given_rates: dict[int, float], unit: float
) -> None:
    found = slow(given_rates)
    assert len(found) * 2 <= len(given_rates)
    if given_rates:
        limit = median(given_rates.values()) / 2
        assert set(found) == {name for name, rate in given_rates.items() if rate < limit}
        assert [given_rates[name] for name in found] == sorted(given_rates[n] for n in found)
    assert slow(dict(reversed(given_rates.items()))) == sorted(
        found, key=lambda name: (given_rates[name], -list(given_rates).index(name))
    )


def link(source: str, target: str, rate: float = 1e9, **values: object) -> dict:
    place = {"stage": "link", "source": source, "target": target}
    return {**place, "latency_s": 1e-4, "bytes_per_s": rate, **values}


def said(answers: list[dict], status: str, late_s: float = 0.0) -> list[str]:
    found = judge([{"stage": "nodes", "count": 3}, *answers], late_s)
    return [f"{one.words}; {one.remedy}" for one in found if one.status == status]


def both(rate: float = 1e9) -> list[dict]:
    return [link(a, b, rate) for a in "abc" for b in "abc" if a != b]


def test_the_slow_pair_is_named_first_with_its_figures_and_is_a_warning() -> None:
    answers = [link("a", "b", 1e7), *both()[1:]]
    (words,) = said(answers, "warning")
    assert words.startswith("slow pair a > b  0.10 ms  10.0 MB/s: the median is 1.00 GB/s; ")
    assert "NCCL_SOCKET_IFNAME" in words
    assert not said(answers, "bad")
    assert len(said(answers, "ok")) == 5


def test_a_pair_that_does_not_connect_is_bad_with_port_and_remedy() -> None:
    broken = link("a", "b", 0.0, fault="timed out", port=21000, what="Ray's node manager")
    (words,) = said([broken, *both()[1:]], "bad")
    assert words.startswith("a > b: port 21000 (Ray's node manager): timed out; ")
    assert "open it in the firewall from a to b" in words
    (words,) = said([broken | {"what": ANY_PORT}], "bad")
    assert "ip_local_port_range" in words and "GLOO_SOCKET_IFNAME" in words


def test_one_node_a_refusal_a_silent_node_and_a_deadline_are_said() -> None:
    assert [one.status for one in judge([{"stage": "nodes", "count": 1}])] == ["ok"]
    refused = [{"stage": "refused", "words": "no answer"}]
    assert [one.status for one in judge(refused)] == ["bad"]
    assert said([{"stage": "silent", "ip": "c", "words": "no answer within 60 s"}], "bad")
    assert said(both(), "bad", late_s=240.0) == [
        "not all was measured within 240 s; look at the pairs above, and at the nodes' load"
    ]


def test_most_pairs_are_not_listed_and_the_slowest_are() -> None:
    answers = [link("a", f"n{i}", 1e9 + i) for i in range(30)]
    listed = said(answers, "ok")
    assert len(listed) == 21
    assert "10 more pairs" in listed[-1]


def reduce(*nodes: str, seconds: float, fault: str = "") -> dict:
    place = {"stage": "reduce", "nodes": [*nodes], "backend": "gloo", "size_bytes": 3_000_000}
    return {**place, "seconds": seconds, "fault": fault}


def test_a_slow_pair_of_the_all_reduce_is_named() -> None:
    pairs = [reduce("a", "b", seconds=1), reduce("a", "c", seconds=1), reduce("b", "c", seconds=9)]
    answers = [*both(), reduce("a", "b", "c", seconds=4), *pairs]
    (words,) = said(answers, "warning")
    assert "slow pair: gloo over b and c" in words
    assert said([*both(), reduce("a", "b", "c", seconds=0, fault="Timeout: 30 s")], "bad")


def test_pairs_have_an_all_reduce_of_their_own_where_the_whole_is_slow_for_its_links() -> None:
    links = [Link(source="a", target="b", bytes_per_s=100.0)]
    whole = Reduce(nodes=("a", "b", "c"), backend="gloo", size_bytes=300, seconds=10.0)
    assert whole.bytes_per_s == pytest.approx(40.0)
    assert needs_pairs(whole, links)
    assert not needs_pairs(whole, [Link(source="a", target="b", bytes_per_s=70.0)])
    assert not needs_pairs(
        Reduce(nodes=("a", "b"), backend="gloo", size_bytes=1, seconds=9.0), links
    )
    assert not needs_pairs(whole, [Link(source="a", target="b", fault="timed out")])

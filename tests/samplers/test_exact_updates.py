"""The quotas of updates in a batch that lacks groups."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("verl", reason="the updates are verl's")

from samplers.exact_updates import _present

quotas_of_updates = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)), min_size=1, max_size=5
)


@given(quotas_of_updates, st.dictionaries(st.sampled_from("abc"), st.integers(0, 12)))
def test_empty_places_are_taken_from_large_updates(
    quotas: list[dict[str, int]], lost: dict[str, int]
):
    planned = sum(map(Counter, quotas), Counter[str]())
    have = {name: max(0, count - lost.get(name, 0)) for name, count in planned.items()}
    fitted = _present(quotas, have)
    assert sum(map(Counter, fitted), Counter[str]()) == +Counter(have)
    for name in planned:
        own = [
            (update.get(name, 0), quota.get(name, 0))
            for update, quota in zip(fitted, quotas, strict=True)
        ]
        assert all(0 <= count <= quota for count, quota in own)


def test_updates_lose_groups_evenly():
    quotas = [{"a": 2, "b": 2}, {"a": 2, "b": 2}]
    assert _present(quotas, {"a": 2, "b": 2}) == [{"a": 1, "b": 1}, {"a": 1, "b": 1}]

"""Entropy, KL and shares of the gradient, per source, held against loops over single tokens."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from agent_loop.records.token_metrics import TokenSums, token_metrics, token_sums

SOURCES = ("math", "nq", "taco")
some_floats = st.floats(-4, 4, width=32)
COLUMNS = {
    # exactly 0 often: groups that are all solved
    "advantages": st.sampled_from([0.0, -1.5, 0.5]),
    "entropy": st.floats(0, 4, width=32),
    "old_log_probs": some_floats,
    "ref_log_prob": some_floats,
    "rollout_is_weights": st.floats(0.125, 2, width=32),
}
Row: TypeAlias = dict[str, Any]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    length = draw(st.integers(1, 6))
    row = {
        "source": draw(st.sampled_from(SOURCES)),
        "mask": draw(arrays(bool, length)),
        **{
            name: draw(arrays(np.float32, length, elements=elements))
            for name, elements in COLUMNS.items()
        },
    }
    if draw(st.booleans()):  # in no advantage: filled with zeros
        row["rollout_is_weights"] = np.zeros(length, np.float32)
    return row


def summed(batch: list[Row]) -> list[TokenSums]:
    if not batch:
        return []
    return token_sums(
        ["u_0_0"] * len(batch),
        [row["source"] for row in batch],
        [len(row["mask"]) for row in batch],
        np.concatenate([row["mask"] for row in batch]),
        {name: np.concatenate([row[name] for row in batch]) for name in COLUMNS},
    )


@given(st.lists(rows(), max_size=8))
def test_means_and_shares_are_those_of_the_single_tokens_in_the_loss(batch: list[Row]):
    strength, entropy, kl = defaultdict[str, float](float), defaultdict(float), defaultdict(float)
    moving, count = Counter[str](), Counter[str]()
    importance = defaultdict[str, list[float]](list)
    for row in batch:
        source = row["source"]
        for i in np.flatnonzero(row["mask"]):
            gap = float(row["ref_log_prob"][i]) - float(row["old_log_probs"][i])
            strength[source] += abs(float(row["advantages"][i]))
            moving[source] += int(row["advantages"][i] != 0)
            entropy[source] += float(row["entropy"][i])
            kl[source] += math.exp(gap) - gap - 1
            count[source] += 1
            if row["rollout_is_weights"].any():
                importance[source].append(float(row["rollout_is_weights"][i]))
    wanted = {}
    for source in {row["source"] for row in batch}:
        if count[source]:
            wanted[f"mixed/{source}/entropy/mean"] = entropy[source] / count[source]
            wanted[f"mixed/{source}/kl/mean"] = kl[source] / count[source]
        if importance[source]:
            for name, of in (("mean", fmean), ("min", min), ("max", max)):
                wanted[f"mixed/{source}/importance/{name}"] = of(importance[source])
        if moving.total():
            wanted[f"mixed/{source}/advantage_share"] = strength[source] / sum(strength.values())
            wanted[f"mixed/{source}/gradient_token_share"] = moving[source] / moving.total()
    assert token_metrics(summed(batch)) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@given(st.lists(rows(), min_size=1, max_size=8))
def test_what_verl_did_not_compute_has_no_metric(batch: list[Row]):
    bare = [replace(row, entropy=None, kl=None, importance=None) for row in summed(batch)]
    absent = ("entropy/mean", "kl/mean", "importance/mean")
    assert not [name for name in token_metrics(bare) if name.endswith(absent)]


def test_an_advantage_is_the_mean_over_the_tokens_in_the_loss():
    mask, advantages = np.array([1, 0, 1, 0], bool), np.array([1.0, 9, 3, 5])
    first, second = token_sums(["a", "b"], ["nq", "nq"], [3, 1], mask, {"advantages": advantages})
    assert (first.mean_advantage, second.mean_advantage) == (2, None)

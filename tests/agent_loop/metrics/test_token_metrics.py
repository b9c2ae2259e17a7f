"""Entropy, KL and shares of the gradient, per source, held against loops over single tokens."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from agent_loop.metrics.token_metrics import TrainedTokens, token_metrics

SOURCES = ("math", "nq", "taco")
some_floats = st.floats(-4, 4, width=32)


@st.composite
def rows(draw: st.DrawFn) -> TrainedTokens:
    length = draw(st.integers(0, 6))
    return TrainedTokens(
        key="u_0_0",
        source=draw(st.sampled_from(SOURCES)),
        mask=draw(arrays(bool, length)),
        # exactly 0 often: groups that are all solved
        advantages=draw(arrays(np.float32, length, elements=st.sampled_from([0.0, -1.5, 0.5]))),
        entropy=draw(arrays(np.float32, length, elements=st.floats(0, 4, width=32))),
        old_log_probs=draw(arrays(np.float32, length, elements=some_floats)),
        ref_log_probs=draw(arrays(np.float32, length, elements=some_floats)),
        importance=draw(arrays(np.float32, length, elements=st.floats(0, 2, width=32))),
    )


@given(st.lists(rows(), max_size=8))
def test_means_and_shares_are_those_of_the_single_tokens_in_the_loss(batch: list[TrainedTokens]):
    strength, entropy, kl = defaultdict[str, float](float), defaultdict(float), defaultdict(float)
    moving, count = Counter[str](), Counter[str]()
    importance = defaultdict[str, list[float]](list)
    for row in batch:
        assert row.ref_log_probs is not None and row.old_log_probs is not None
        assert row.entropy is not None
        for i in np.flatnonzero(row.mask):
            gap = float(row.ref_log_probs[i]) - float(row.old_log_probs[i])
            strength[row.source] += abs(float(row.advantages[i]))
            moving[row.source] += int(row.advantages[i] != 0)
            entropy[row.source] += float(row.entropy[i])
            kl[row.source] += math.exp(gap) - gap - 1
            count[row.source] += 1
            assert row.importance is not None
            importance[row.source].append(float(row.importance[i]))
    wanted = {}
    for source in {row.source for row in batch}:
        if count[source]:
            wanted[f"mixed/{source}/entropy/mean"] = entropy[source] / count[source]
            wanted[f"mixed/{source}/kl/mean"] = kl[source] / count[source]
            for name, of in (("mean", fmean), ("min", min), ("max", max)):
                wanted[f"mixed/{source}/importance/{name}"] = of(importance[source])
        if moving.total():
            wanted[f"mixed/{source}/advantage_share"] = strength[source] / sum(strength.values())
            wanted[f"mixed/{source}/gradient_token_share"] = moving[source] / moving.total()
    assert token_metrics(batch) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@given(st.lists(rows(), min_size=1, max_size=8))
def test_what_verl_did_not_compute_has_no_metric(batch: list[TrainedTokens]):
    bare = [replace(row, entropy=None, ref_log_probs=None, importance=None) for row in batch]
    absent = ("entropy/mean", "kl/mean", "importance/mean")
    assert not [name for name in token_metrics(bare) if name.endswith(absent)]


def test_an_advantage_is_the_mean_over_the_tokens_in_the_loss():
    row = TrainedTokens(
        key="u_0_0", source="nq", mask=np.array([1, 0, 1], bool), advantages=np.array([1.0, 9, 3])
    )
    assert row.advantage == 2
    assert replace(row, mask=np.zeros(3, bool)).advantage is None

"""Distribution of a batch's trajectories over optimizer updates and ranks. Pure arithmetic.

verl sorts a batch by length and cuts it into updates, so one update may hold any mixture. Here
whole groups are dealt to updates by the quotas of the mixture.

Example: six groups with workloads 9, 5, 4 of source a and 8, 3, 2 of source b, two updates. The
quotas are (a 2, b 1) and (a 1, b 2). Each update gets exactly its quotas; heavy groups go first,
each to the update with the least work so far that still has room for the source.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

_SWAPS_PER_RANK = 4  # further swaps hardly help


def deal_groups(
    sources: Sequence[str], workloads: Sequence[float], quotas: Sequence[Mapping[str, int]]
) -> list[list[int]]:
    """Deal groups to optimizer updates by quota: heavy groups first, each to the lightest update.

    Args:
        sources: (P,) source of each group.
        workloads: (P,) cost of each group, any unit.
        quotas: (M,) groups of each source in each update; together all P groups.

    Returns:
        (M,) the indices of each update's groups.

    Raises:
        ValueError: the quotas do not sum to the groups of each source.
    """
    have, wanted = Counter(sources), Counter[str]()
    for quota in quotas:
        wanted.update(quota)
    if have != +wanted:
        raise ValueError(f"cannot deal groups={dict(have)} to updates with quotas={dict(wanted)}")
    dealt: list[list[int]] = [[] for _ in quotas]
    loads = [0.0] * len(quotas)
    left = [dict(quota) for quota in quotas]
    for group in sorted(range(len(sources)), key=lambda group: (-workloads[group], group)):
        source = sources[group]
        seats = (update for update, own in enumerate(left) if own.get(source))
        lightest = min(seats, key=lambda update: (loads[update], update))
        dealt[lightest].append(group)
        loads[lightest] += workloads[group]
        left[lightest][source] -= 1
    return dealt


def spread_rows(
    updates: Sequence[Sequence[int]], workloads: Sequence[float], ranks: int
) -> list[list[int]]:
    """Spread the rows of each update over the ranks, with equal numbers and similar workloads.

    Within an update, rows are dealt in rounds of one row per rank, heavy rows first; the heaviest
    row of a round goes to the part with the least work so far (LPT, Graham 1969, with equal
    numbers). Then the parts of the update are assigned to the ranks so that the ranks' totals over
    all updates are similar. Finally, single rows of one update are swapped between the busiest and
    the least busy rank while this reduces their difference.

    Args:
        updates: rows of each update.
        workloads: cost of each row, by row index.
        ranks: data-parallel ranks, >= 1.

    Returns:
        (ranks,) the rows of each rank, in the order of the updates.

    Raises:
        ValueError: the rows of an update are no multiple of `ranks`.
    """
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]  # rank, update, rows
    totals = [0.0] * ranks
    for update in updates:
        if len(update) % ranks:
            raise ValueError(f"cannot spread {len(update)} rows over {ranks} ranks: no even share")
        parts: list[list[int]] = [[] for _ in range(ranks)]
        loads = [0.0] * ranks
        heavy_first = sorted(update, key=lambda row: (-workloads[row], row))
        for start in range(0, len(heavy_first), ranks):
            lightest = sorted(range(ranks), key=lambda part: (loads[part], part))
            for part, row in zip(lightest, heavy_first[start : start + ranks], strict=True):
                parts[part].append(row)
                loads[part] += workloads[row]
        by_load = sorted(range(ranks), key=lambda part: (-loads[part], part))
        by_total = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for part, rank in zip(by_load, by_total, strict=True):
            shares[rank].append(parts[part])
            totals[rank] += loads[part]
    for _ in range(_SWAPS_PER_RANK * ranks):
        if not _swap(shares, totals, workloads):
            break
    return [[row for rows in own for row in rows] for own in shares]


def _swap(shares: list[list[list[int]]], totals: list[float], workloads: Sequence[float]) -> bool:
    """Swap two rows of one update between the busiest and the least busy rank, if this helps."""
    busy = max(range(len(totals)), key=totals.__getitem__)
    idle = min(range(len(totals)), key=totals.__getitem__)
    gap = totals[busy] - totals[idle]
    best, found = gap, None  # the gap that remains after the best swap
    for update, (own, other) in enumerate(zip(shares[busy], shares[idle], strict=True)):
        light_first = sorted((workloads[row], place) for place, row in enumerate(other))
        for place, row in enumerate(own):
            # The best row to take in exchange is lighter by half the gap.
            at = bisect_left(light_first, (workloads[row] - gap / 2, 0))
            for weight, there in light_first[max(0, at - 1) : at + 1]:
                rest = abs(gap - 2 * (workloads[row] - weight))
                if rest < best:
                    best, found = rest, (update, place, there)
    if found is None:
        return False
    update, here, there = found
    own, other = shares[busy][update], shares[idle][update]
    moved = workloads[own[here]] - workloads[other[there]]
    own[here], other[there] = other[there], own[here]
    totals[busy] -= moved
    totals[idle] += moved
    return True


def imbalance(of_ranks: Sequence[Sequence[int]], workloads: Sequence[float]) -> float:
    """Work of the busiest rank above the mean, as a fraction: 0.0 is even, 0.1 is 10 % more."""
    loads = [sum(workloads[row] for row in rows) for rows in of_ranks]
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0


def rows_per_update(rows: Sequence[int], ranks: int, update_unit: int, batch_unit: int) -> int:
    """The smallest number of rows to which every update can be padded.

    Args:
        rows: (M,) rows of each update before it is padded.
        ranks: data-parallel ranks.
        update_unit: rows of one rank in one update are a multiple of this (the micro-batch).
        batch_unit: rows of one rank in the batch are a multiple of this (the micro-batch of the
            log-prob passes).
    """
    unit = ranks * update_unit
    size = -(-max(rows) // unit) * unit
    while size * len(rows) % (ranks * batch_unit):
        size += unit
    return size

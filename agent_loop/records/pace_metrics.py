"""Metrics of what a step waited for, and of the open groups of asynchronous training. Pure."""

from collections.abc import Mapping
from typing import get_args

from samplers.lead import Lead, Limit


def pace_metrics(waits: Mapping[str, float], lead: Lead | None) -> dict[str, float]:
    """What a step waited for, and the open groups in asynchronous training.

    | metric | unit |
    | --- | --- |
    | `mixed/<source>/wait_s` | seconds until the source's quota was full, while sampling waited |
    | `mixed/<source>/lead/groups` | open groups that are wanted |
    | `mixed/<source>/lead/flight_s` | seconds in flight for each group that can be trained |
    | `mixed/<source>/lead/sets_pace` | 1 for the source whose staleness bound sets the pace |
    | `mixed/lead/step_s` | seconds of a step that these groups allow |
    | `mixed/lead/limit/<limit>` | 1 for what sets the pace, see `samplers.lead.Limit` |

    Args:
        waits: source -> seconds.
        lead: None in synchronous training.
    """
    metrics = {f"mixed/{source}/wait_s": seconds for source, seconds in waits.items()}
    if lead is None:
        return metrics
    for source, groups in lead.groups.items():
        metrics[f"mixed/{source}/lead/groups"] = float(groups)
        metrics[f"mixed/{source}/lead/sets_pace"] = float(source == lead.source)
    for source, seconds in lead.flight_s.items():
        metrics[f"mixed/{source}/lead/flight_s"] = seconds
    metrics["mixed/lead/step_s"] = lead.step_s
    for limit in get_args(Limit):
        metrics[f"mixed/lead/limit/{limit}"] = float(limit == lead.limit)
    return metrics

"""A TransferQueue in a dict, and a world in which groups end after a while, well or badly.

Stands in for the `tq` and `time` of verl's replay buffer module, so that verl's own loops run:
where they sleep, the world's time goes on and groups end.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from samplers.faults import SessionOutcome
from samplers.uid import session_of

TRAJECTORIES = 2


@dataclass(slots=True, kw_only=True)
class Fate:
    """How the groups of one source end."""

    filtered: float
    """Share whose rewards are all equal."""

    failed: float
    """Share that loses a trajectory."""

    latency: tuple[int, int]
    """Ticks from start to end, from .. to."""

    lost: float = 0.0
    """Share of the other groups with one trajectory lost to infrastructure: reward 0, no mask."""


@dataclass(slots=True, kw_only=True)
class World:
    """The queue, its clock and what is under way."""

    fates: dict[str, Fate]
    source_of: Callable[[str], str]
    rng: random.Random
    luck: Callable[[str], float] | None = None
    """Decides how a group ends instead of `rng`, which then decides when."""

    items: dict[str, dict[str, dict[str, Any]]] = field(default_factory=lambda: {"train": {}})
    rewards: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Keys of the trajectories whose mask is all zero."""

    begun: dict[str, int] = field(default_factory=dict)
    """uid -> step of its last start."""

    ends_at: dict[str, int] = field(default_factory=dict)
    tick: int = 0
    ended: int = 0
    """Groups so far."""

    losses: int = 0
    """Trajectories lost so far."""

    # --- what verl's replay buffer calls -------------------------------------------------------

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        if partition_id is not None:
            return {name: own for name, own in self.items.items() if name == partition_id}
        return self.items

    def get_client(self) -> "World":
        return self

    def kv_retrieve_meta(self, keys: list[str], partition_id: str) -> Any:
        own = self.items[partition_id]
        return SimpleNamespace(custom_meta=[own[key] for key in keys if key in own])

    def kv_clear(self, *, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.items[partition_id].pop(key, None)
            self.rewards.pop(key, None)
            self.lost.discard(key)

    def kv_batch_get(
        self, *, keys: list[str], partition_id: str, select_fields: list[str]
    ) -> dict[str, list[Any]]:
        rewards = [self.rewards[key] for key in keys]
        columns: dict[str, list[Any]] = {
            "extra_fields": [{"reward_extra_info": {"acc": reward}} for reward in rewards],
            "rm_scores": [np.array([0.0, reward]) for reward in rewards],
        }
        return {name: columns[name] for name in select_fields}

    def outcomes(self, partition_id: str, keys: list[str]) -> dict[str, SessionOutcome]:
        """See `Mixture.outcomes`."""
        return {
            session_of(key): SessionOutcome(
                is_trained=key not in self.lost,
                is_judged=key not in self.lost,
                is_solved=self.rewards[key] >= 1,
                fault="tool=search, last error: HTTP 503" if key in self.lost else None,
                reward=self.rewards[key],
                info={"acc": self.rewards[key]},
            )
            for key in keys
        }

    def sleep(self, seconds: float) -> None:
        self.tick += 1
        for uid in [uid for uid, ends_at in self.ends_at.items() if ends_at <= self.tick]:
            self._end(uid)

    def time(self) -> float:
        return float(self.tick)

    # --- rollouts -----------------------------------------------------------------------------

    def start(self, uid: str, step: int) -> None:
        """Begin one group."""
        self.items["train"][uid] = {"is_prompt": True, "status": "pending", "global_steps": step}
        self.begun[uid] = step
        low, high = self.fates[self.source_of(uid)].latency
        self.ends_at[uid] = self.tick + self.rng.randint(low, high)

    def _end(self, uid: str) -> None:
        del self.ends_at[uid]
        fate = self.fates[self.source_of(uid)]
        luck = self.luck(uid) if self.luck else self.rng.random()
        failed, filtered = luck < fate.failed, luck < fate.failed + fate.filtered
        rewards = [0.0 if filtered else float(n) for n in range(TRAJECTORIES - failed)]
        loses = fate.lost and not filtered and self.rng.random() < fate.lost
        self.end(uid, rewards, lost=[0] if loses else [])
        if failed:
            self.items["train"][uid]["status"] = "failure"

    def end(self, uid: str, rewards: list[float], lost: list[int]) -> None:
        """A group's trajectories are there.

        Args:
            uid: the group.
            rewards: of each trajectory.
            lost: which of them are lost.
        """
        for session, reward in enumerate(rewards):
            key = f"{uid}_{session}_0"
            self.items["train"][key] = {"status": "success", "seq_len": 10}
            self.rewards[key] = reward
            if session in lost:
                self.lost.add(key)
                self.losses += 1
        self.ended += 1
        self.items["train"][uid]["status"] = "finished"
        keys = [f"{uid}_{session}_0" for session in range(len(rewards))]
        self.items.setdefault("ended", {})[uid] = {"partition": "train", "keys": keys}

    # --- checkpoints --------------------------------------------------------------------------

    def save(self) -> Any:
        """What TransferQueue's checkpoint holds."""
        return copy.deepcopy((self.items, self.rewards, self.lost))

    def restore(self, saved: Any, step: int) -> None:
        """As verl resumes: what had ended is there, what was under way starts again."""
        self.items, self.rewards, self.lost = copy.deepcopy(saved)
        self.ends_at = {}
        for uid, tag in list(self.items["train"].items()):
            if tag.get("is_prompt") and tag["status"] in ("pending", "running"):
                self.start(uid, step)

"""What a replay buffer knows of the groups in TransferQueue, kept up to date by what changed.

verl adapter: `ReplayBuffer` (trainer/ppo/v1/replay_buffer.py at 0.9.1) lists all keys at each poll,
and searches all of them for those of some groups. Here a loop worker names each group that ended in
a partition of its own, and a poll reads this partition. The keys are listed as a whole at the first
poll, before a validation, and after `LIST_ALL_S` without a group that ended. verl's own loop
workers name nothing, and all keys are listed at each poll, as verl does.
"""

# verl has no type annotations.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportMissingTypeArgument=false, reportUntypedBaseClass=false
# pyright: reportIncompatibleMethodOverride=false

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

import transfer_queue as tq

from samplers.uid import group_of, prompt_of

ENDED = "ended"
"""Partition in which loop workers name groups that ended. Key: uid of the group. Tag: the
`partition` of the group, and the `keys` of its trajectories."""

LIST_ALL_S = 60.0
"""Seconds without a group that ended, after which all keys are listed in case a name was lost."""

MAX_POLL_S, LISTING_SHARE = 2.0, 20
"""Where nobody names groups, each poll lists all keys. The next poll is so many times the duration
of a listing later, and at most verl's interval."""

_log = logging.getLogger(__name__)


def source_of(uid: str) -> str:
    return prompt_of(uid)[0]


def prompts_under_way() -> set[str]:
    """uids of the training prompts that were started and are not trained yet."""
    tags = (tq.kv_list("train") or {}).get("train", {})
    return {key for key, tag in tags.items() if tag.get("is_prompt")}


class QueueView:
    """Comes before verl's buffer among the base classes of a buffer."""

    # verl's
    partitions: Any
    pending_keys: Any
    running_keys: Any
    finished_keys: Any
    failure_keys: Any
    prompt_global_steps: Any
    poll_interval: float

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        are_named: bool = True,
        **options: Any,
    ) -> None:
        self._clock = clock
        self._are_named = are_named
        self._list_at: float | None = None
        """When all keys are to be listed; None: at the next poll."""
        self._keys: defaultdict[str, defaultdict[str, list[str]]] = _no_keys()
        """partition -> uid -> keys of its trajectories."""
        self.in_flight: Counter[str] = Counter()
        """source -> groups of the training partition that are started and have not ended."""
        super().__init__(**options)  # type: ignore[call-arg]
        self._poll_s = self.poll_interval

    def start(self, uids: Collection[str], global_steps: int) -> None:
        """Note groups of the training partition that are about to be started."""
        self.pending_keys["train"].update(uids)
        self.prompt_global_steps["train"].update(dict.fromkeys(uids, global_steps))
        self.in_flight.update(source_of(uid) for uid in uids)

    def list_all_next(self) -> None:
        """List all keys at the next poll: somebody else has started groups."""
        self._list_at = None

    def _sync_metadata_from_transfer_queue(self) -> None:
        if not self._are_named:
            began = self._clock()
            self._list_all()
            took_s = self._clock() - began
            self.poll_interval = min(MAX_POLL_S, max(self._poll_s, LISTING_SHARE * took_s))
            return
        if self._list_at is not None:
            self._read_ended()
        if self._list_at is None or self._clock() >= self._list_at:
            self._list_all()

    def _list_all(self) -> None:
        was_lost = self._list_at is not None and self._are_named
        before = self.finished_keys["train"] | self.failure_keys["train"]
        super()._sync_metadata_from_transfer_queue()  # type: ignore[misc]
        self._keys = _no_keys()
        for partition_id, rows in self.partitions.items():
            for key in rows:
                self._keys[partition_id][group_of(key)].append(key)
        self.in_flight = Counter(
            source_of(uid) for uid in self.pending_keys["train"] | self.running_keys["train"]
        )
        self._list_at = self._clock() + LIST_ALL_S
        new = (self.finished_keys["train"] | self.failure_keys["train"]) - before
        new -= self.partitions[ENDED].keys()  # named since the look before
        if was_lost and new:
            _log.warning("groups=%d: they ended and no loop worker named them", len(new))

    def _read_ended(self) -> None:
        # TransferQueue registers a key first, and its tag a moment later.
        listed = tq.kv_list(ENDED).get(ENDED) or {}
        ended = {uid: tag for uid, tag in listed.items() if tag}
        if not ended:
            return
        self._list_at = self._clock() + LIST_ALL_S
        by_partition: defaultdict[str, list[str]] = defaultdict(list)
        for uid, tag in ended.items():
            partition_id = tag["partition"]
            # A group may have been dropped, or been seen when all keys were listed.
            if uid in self.pending_keys[partition_id] or uid in self.running_keys[partition_id]:
                by_partition[partition_id].append(uid)
        for partition_id, uids in by_partition.items():
            keys = [key for uid in uids for key in (uid, *ended[uid]["keys"])]
            meta = tq.get_client().kv_retrieve_meta(keys, partition_id)
            if len(meta.custom_meta) != len(keys):
                self._list_at = None  # a key is gone, so the tags have no names
                continue
            tags = dict(zip(keys, meta.custom_meta, strict=True))
            for uid in uids:
                self._note_ended(partition_id, uid, ended[uid]["keys"], tags)
        tq.kv_clear(partition_id=ENDED, keys=[*ended])

    def _note_ended(
        self, partition_id: str, uid: str, keys: list[str], tags: dict[str, dict[str, Any]]
    ) -> None:
        places = {"finished": self.finished_keys, "failure": self.failure_keys}
        if (place := places.get(tags[uid]["status"])) is None:
            return  # a checkpoint had its name, and it was started again
        self._land(partition_id, uid)
        place[partition_id].add(uid)
        self._keys[partition_id][uid] = list(keys)
        self.partitions[partition_id].update((key, dict(tags[key])) for key in keys)

    def _land(self, partition_id: str, uid: str) -> None:
        """A group is not in flight any more."""
        for flying in (self.pending_keys[partition_id], self.running_keys[partition_id]):
            if uid in flying:
                flying.remove(uid)
                if partition_id == "train":
                    self.in_flight[source_of(uid)] -= 1

    def _keys_of(self, partition_id: str, uids: Collection[str]) -> list[str]:
        """The keys of the trajectories of some groups."""
        own = self._keys[partition_id]
        return [key for uid in uids for key in own.get(uid, ())]

    @contextmanager
    def _only(self, partition_id: str, uids: Collection[str]) -> Generator[None]:
        """Show verl's methods only the trajectories of some groups, and drop those it drops."""
        rows = self.partitions[partition_id]
        keys = self._keys_of(partition_id, uids)
        self.partitions[partition_id] = shown = {key: rows[key] for key in keys}
        try:
            yield
        finally:
            self.partitions[partition_id] = rows
            for key in keys:
                if key not in shown:
                    del rows[key]

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        for uid in uids:
            self._land(partition_id, uid)
        with self._only(partition_id, uids):
            super()._clear_groups(partition_id, uids)  # type: ignore[misc]
        for uid in uids:
            self._keys[partition_id].pop(uid, None)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any
    ) -> Any:
        own = self._keys_of(partition_id, selected_prompt_uids)
        shown = {key: partition_snapshot[key] for key in own}
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, shown)  # type: ignore[misc]
        for status in (self.finished_keys, self.failure_keys):
            status[partition_id].difference_update(selected_prompt_uids)
        for uid in selected_prompt_uids:
            self.prompt_global_steps[partition_id].pop(uid, None)
            self._keys[partition_id].pop(uid, None)
        for key in own:
            self.partitions[partition_id].pop(key, None)
        return batch


def _no_keys() -> defaultdict[str, defaultdict[str, list[str]]]:
    return defaultdict(lambda: defaultdict(list))

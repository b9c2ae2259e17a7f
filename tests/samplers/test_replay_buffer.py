"""verl's real replay buffers with our quotas, in a simulated world of slow and failing groups.

The claim: whatever is filtered, fails, is late or killed, every batch holds the plan's counts, and
no prompt is skipped or trained twice.
"""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from samplers.audit import audit
from samplers.ledger import Ledger, LedgerEntry, Outcome, read_ledger
from samplers.mixture_plan import MixturePlan
from tests.fakes.transfer_queue import Fate, World

pytest.importorskip("verl", reason="the replay buffers are verl's")

from verl.trainer.ppo.v1 import replay_buffer as verls

from samplers import queue_view
from samplers.replay_buffer import (
    MixedReplayBuffer,
    MixedReplayBufferAsync,
    Mixture,
    SourceStarved,
)
from samplers.uid import make_uid, prompt_of
from samplers.verl_releases import HAS_WAIT, OF_REWARD

SIZES = {"math": 50, "nq": 31, "taco": 7}
RATIOS = {"math": 0.45, "nq": 0.35, "taco": 0.2}
FATES = {
    "math": Fate(filtered=0.3, failed=0.05, latency=(0, 2)),
    "nq": Fate(filtered=0.6, failed=0.1, latency=(0, 2)),
    "taco": Fate(filtered=0.7, failed=0.1, latency=(2, 6)),
}


class Run:
    """A trainer that trains nothing: it draws, samples, keeps accounts, and can be killed."""

    def __init__(self, path: Path, world: World, mode: str, **options: Any) -> None:
        self.path, self.world, self.mode, self.options = path, world, mode, options
        self.batch_size = options.pop("batch_size", 10)
        self.sync_steps = options.pop("parameter_sync_step", 1)
        self.warmup = options.pop("warmup", 1)
        self.max_staleness = options.pop("max_staleness", {})
        self.ahead = options.pop("ahead", None)
        self.bound = options.get("max_off_policy_threshold", 8) or 10**9
        self.limits = {
            "max_wait_s": options.pop("max_wait_s", 1e9),
            "max_replacements": options.pop("max_replacements", 10**6),
            "check": options.pop("check", lambda: None),
        }
        self.saved: Any = None
        self.step = self.trigger = 0
        self.begin()

    def begin(self) -> None:
        """Start, or start again from the last checkpoint."""
        self.plan = MixturePlan(SIZES, RATIOS, self.batch_size, seed=1)
        self.ledger = Ledger(self.path)
        self.step = 0
        if self.saved is None:
            self.world.items, self.world.rewards, self.world.ends_at = {"train": {}}, {}, {}
            self.world.lost.clear()
        else:
            step, state, queue = self.saved
            self.step = step
            self.plan.load_state_dict(json.loads(state))
            self.world.restore(queue, step + 1)
        self.ledger.rewind(self.step)
        self.ledger.begin(self.plan.description())
        self.buffer = self._buffer()

    def _buffer(self) -> Any:
        kind = MixedReplayBuffer if self.mode == "sync" else MixedReplayBufferAsync
        options = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"} | self.options
        return kind(
            Mixture(
                quota=self._quota,
                draw=lambda wanted: self._start(self.plan.replace(wanted)),
                give_back=self.plan.give_back,
                seats=self._seats,
                max_staleness=self.max_staleness,
                ahead=self.ahead,
                clock=self.world.time,
                outcomes=self.world.outcomes,
                **self.limits,
            ),
            trainer_mode=self.mode,
            trainer_config=OmegaConf.create({}),
            sampler_kwargs=OmegaConf.create({}),
            train_batch_size=self.batch_size,
            gen_batch_size=1,
            **options,
        )

    def _quota(self, groups: int) -> dict[str, int]:
        first = (
            self.step - 1
        ) * self.batch_size + self.trigger * self.batch_size // self.sync_steps
        return self.plan.counts_between(first, first + groups)

    def _seats(self, later: int) -> dict[str, int]:
        first = (self.step - 1) * self.batch_size
        first += self.trigger * self.batch_size // self.sync_steps
        return self.plan.counts_between(first, (self.step + later) * self.batch_size)

    def _start(self, prompts: list[Any]) -> None:
        uids = [make_uid(prompt.source, prompt.draw) for prompt in prompts]
        self.buffer.start(uids, self.step)
        for uid in uids:
            self.world.start(uid, self.step)

    def dispatch(self) -> None:
        """Start the prompts of a step."""
        if self.mode == "sync":
            self._start(self.plan.take(self.batch_size))
        else:
            total = self.batch_size + int(self.warmup * self.batch_size)
            wanted = self.buffer.wanted(total)
            self.plan.position += sum(wanted.values())
            self._start(self.plan.replace(wanted))

    def train(self) -> None:
        """One step."""
        self.step += 1
        self.trigger = 0
        self.dispatch()
        trained: list[str] = []
        for trigger in range(self.sync_steps):
            self.trigger = trigger
            groups = self.batch_size // self.sync_steps
            batch, _ = self.buffer.sample(self.step, "train", groups)
            uids = list(dict.fromkeys(key.split("_")[0] for key in batch.keys))
            counts = Counter(prompt_of(uid)[0] for uid in uids)
            assert counts == {name: n for name, n in self._quota(groups).items() if n}
            assert len(batch.keys) == 2 * groups or not self.buffer.sync_refill_failed_groups
            assert not (
                self.buffer.filter_groups_metric and self.world.lost.intersection(batch.keys)
            )
            trained += uids
            for uid in uids if self.mode != "sync" else ():
                bound = self.max_staleness.get(prompt_of(uid)[0], self.bound)
                assert self.step - self.world.begun[uid] + 1 <= bound
            self.world.kv_clear(partition_id="train", keys=batch.keys)
        entries = [self._entry(uid, "trained") for uid in trained]
        entries += [self._entry(own.uid, own.why) for own in self.buffer.take_given_up()]
        self.ledger.append_step(self.step, entries, self.plan.drawn)

    def _entry(self, uid: str, outcome: Outcome) -> LedgerEntry:
        source, draw = prompt_of(uid)
        return LedgerEntry(
            step=self.step,
            source=source,
            draw=draw,
            row=int(self.plan.rows(source, [draw])[0]),
            row_id="",
            outcome=outcome,
            trajectories=2 * (outcome == "trained"),
            reward_mean=0.5 if outcome == "trained" else None,
        )

    def save(self) -> None:
        self.saved = self.step, json.dumps(self.plan.state_dict()), self.world.save()

    def check(self) -> Counter[str]:
        """Nothing skipped, nothing twice, every batch exact; counts of outcomes."""
        lines = read_ledger(self.path)
        report = audit(lines, self.plan, in_flight=self.mode != "sync")
        assert report.problems == ()
        assert report.worst_batch == 0
        assert report.cumulative_error < 1
        assert report.steps == self.step
        entries = [line for line in lines if isinstance(line, LedgerEntry)]
        for source, account in report.sources.items():
            under_way = sum(
                bool(tag.get("is_prompt")) and prompt_of(uid)[0] == source
                for uid, tag in self.world.items["train"].items()
            )
            assert account.under_way == under_way
        return Counter(entry.outcome for entry in entries)


def use_world(patch: pytest.MonkeyPatch, world: World) -> None:
    """Let verl's buffers and ours use the world as TransferQueue and as clock."""
    for module in (verls, queue_view):
        patch.setattr(module, "tq", world)
    patch.setattr(verls, "time", world)
    patch.setattr(verls, "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS", 10**9)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes runs in worlds of their own."""

    def make(mode: str, fates: dict[str, Fate] = FATES, seed: int = 0, **options: Any) -> Run:
        world = World(fates=fates, source_of=lambda uid: prompt_of(uid)[0], rng=random.Random(seed))
        use_world(monkeypatch, world)
        return Run(tmp_path / f"{mode}{seed}.jsonl", world, mode, **options)

    return make


MODES: dict[str, dict[str, Any]] = {
    "sync, filtering": {
        "mode": "sync",
        "filter_groups_metric": "acc",
        "sync_refill_failed_groups": True,
    },
    "sync, failures": {"mode": "sync", "sync_refill_failed_groups": True},
    "async, drop": {
        "mode": "colocate_async",
        "filter_groups_metric": "acc",
        "max_off_policy_threshold": 2,
        "warmup": 2,
    },
    "async, drop, a bound of its own": {
        "mode": "colocate_async",
        "max_off_policy_threshold": 6,
        "max_staleness": {"taco": 2},
        "warmup": 3,
    },
    "async, wait": {
        "mode": "colocate_async",
        "filter_groups_metric": "acc",
        "max_off_policy_strategy": "wait",
        "max_off_policy_threshold": 3,
        "warmup": 1.5,
    },
    "async, wait, a bound of its own, as far ahead as may be": {
        "mode": "colocate_async",
        "max_off_policy_strategy": "wait",
        "max_off_policy_threshold": 4,
        "max_staleness": {"taco": 2},
        "warmup": 8,
    },
    "async, a fixed lead": {"mode": "colocate_async", "ahead": 3, "max_off_policy_threshold": 3},
    "separate, mini-batches": {
        "mode": "separate_async",
        "filter_groups_metric": "acc",
        "parameter_sync_step": 5,
    },
}


def few_or_nightly(few: int, many: int) -> Any:
    """How much of a long simulation a change waits for, and how much of it a night."""
    return [few, pytest.param(many, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]


@pytest.mark.slow
@pytest.mark.parametrize("steps", few_or_nightly(100, 10_000 // len(MODES) + 1))
@pytest.mark.parametrize("name", MODES)
def test_ten_thousand_steps_are_exact_and_lose_no_prompt(simulate, name: str, steps: int):
    run: Run = simulate(**MODES[name])
    for _ in range(steps):
        run.train()
    outcomes = run.check()
    assert outcomes["trained"] == run.step * run.batch_size
    assert outcomes["failed"] > 0.5 * steps
    assert outcomes["filtered"] > 5 * steps or "filter_groups_metric" not in MODES[name]
    assert outcomes["stale"] >= 0.01 * steps or name != "async, drop"


@pytest.mark.slow
@pytest.mark.parametrize("kills", few_or_nightly(15, 1000 // len(MODES) + 1))
@pytest.mark.parametrize("name", MODES)
def test_a_thousand_kills_in_all_modes_skip_and_repeat_nothing(simulate, name: str, kills: int):
    run: Run = simulate(**MODES[name], seed=1)
    rng = random.Random(2)
    for _ in range(kills):
        for _ in range(rng.randint(1, 4)):
            run.train()
            if rng.random() < 0.5:
                run.save()
        if rng.random() < 0.3:  # killed while it waits for a batch: drawn, and never trained
            run.step += 1
            run.dispatch()
        run.begin()
        run.train()
    run.check()


fractions = st.floats(0, 0.95)


@pytest.mark.slow
@given(
    st.sampled_from(sorted(MODES)),
    st.fixed_dictionaries({name: st.tuples(fractions, st.integers(0, 12)) for name in SIZES}),
    st.integers(1, 4),
    st.integers(0, 2**16),
)
def test_any_rates_and_latencies_leave_every_batch_exact(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    fates: dict[str, tuple[float, int]],
    scale: int,
    seed: int,
):
    own = {
        source: Fate(filtered=share * 0.9, failed=share * 0.1, latency=(0, ticks))
        for source, (share, ticks) in fates.items()
    }
    world = World(fates=own, source_of=lambda uid: prompt_of(uid)[0], rng=random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        use_world(patch, world)
        options: dict[str, Any] = MODES[name] | {"batch_size": 5 * scale}
        run = Run(tmp_path_factory.mktemp("run") / "ledger.jsonl", world, **options)
        for _ in range(15):
            run.train()
        run.check()


def test_synchronous_rows_do_not_depend_on_how_long_groups_take(simulate):
    def trained(seed: int) -> list[tuple[int, str, int]]:
        run: Run = simulate(**MODES["sync, filtering"], seed=seed)
        run.world.luck = lambda uid: random.Random(str(prompt_of(uid))).random()
        for _ in range(40):
            run.train()
        return sorted(
            (line.step, line.source, line.draw)
            for line in read_ledger(run.path)
            if isinstance(line, LedgerEntry) and line.outcome == "trained"
        )

    assert trained(10) == trained(11)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_source_that_never_delivers_is_named_with_its_counts(simulate, mode: str):
    fates = FATES | {"nq": Fate(filtered=0.0, failed=0.0, latency=(10**6, 10**6))}
    run: Run = simulate(mode, fates, filter_groups_metric="acc", max_wait_s=50.0)
    with pytest.raises(SourceStarved) as caught:
        for _ in range(5):
            run.train()
    for words in ("source='nq'", "0/", "under way", "waited 51 s", "mixed.max_wait_s"):
        assert words in str(caught.value)


def test_a_step_whose_workers_are_gone_ends_long_before_its_patience(simulate):
    fates = FATES | {"nq": Fate(filtered=0.0, failed=0.0, latency=(10**6, 10**6))}
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("the actor died")

    run: Run = simulate("sync", fates, max_wait_s=50.0, check=check)
    with pytest.raises(RuntimeError, match="the actor died"):
        run.train()


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_source_whose_groups_never_survive_is_named_with_what_was_replaced(simulate, mode: str):
    fates = FATES | {"taco": Fate(filtered=1.0, failed=0.0, latency=(0, 1))}
    run: Run = simulate(mode, fates, filter_groups_metric="acc", max_replacements=5)
    with pytest.raises(SourceStarved, match=r"source='taco'.*10 are allowed.*'filtered': \d+"):
        run.train()


def test_validation_passes_through_whatever_its_sources(simulate):
    run: Run = simulate("sync")
    items = run.world.items.setdefault("val", {})
    for number in range(3):
        uid = f"val{number}"  # verl's own uids say no source
        items[uid] = {"is_prompt": True, "status": "finished", "global_steps": 0}
        items[f"{uid}_0_0"] = {"status": "success"}
    batch, _ = run.buffer.sample(0, "val", 3)
    assert sorted(batch.keys) == ["val0_0_0", "val1_0_0", "val2_0_0"]


def entries(run: Run) -> list[LedgerEntry]:
    return [line for line in read_ledger(run.path) if isinstance(line, LedgerEntry)]


def filtered_groups(run: Run, groups: dict[str, tuple[list[float], list[int]]]) -> set[str]:
    """Which of these the buffer's filter drops; name -> (rewards, which of them are lost)."""
    uids = {make_uid("math", draw): name for draw, name in enumerate(groups)}
    for uid, name in uids.items():
        run.buffer.start([uid], 1)
        run.world.start(uid, 1)
        run.world.end(uid, *groups[name])
    run.buffer._sync_metadata_from_transfer_queue()
    first, counts = run.buffer._dapo_filtered_keys("train")
    again, recount = run.buffer._dapo_filtered_keys("train")
    assert (first, counts) == (again, recount)
    assert sum(counts.values()) == len(first)
    return {uids[uid] for uid in first}


@pytest.mark.parametrize("metric", ["acc", *([OF_REWARD] if OF_REWARD else [])])
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_lost_trajectory_has_no_say_in_whether_its_group_is_filtered(
    simulate, mode: str, metric: str
):
    groups = {
        "all solved, one lost": ([1.0, 1.0, 0.0], [2]),
        "all failed, one lost": ([0.0, 0.0, 0.0], [1]),
        "one valid": ([1.0, 0.0, 0.0], [1, 2]),
        "none valid, whatever they say": ([1.0, 0.0], [0, 1]),
        "equal, in numbers whose std is no zero": ([0.1, 0.1, 0.1], []),
        "some solved, one lost": ([1.0, 0.0, 0.0], [2]),
        "some solved": ([1.0, 0.0], []),
    }
    run: Run = simulate(mode, filter_groups_metric=metric)
    assert filtered_groups(run, groups) == groups.keys() - {"some solved, one lost", "some solved"}


def test_a_filtered_group_says_how_many_of_its_trajectories_solved_it(simulate):
    run: Run = simulate("sync", filter_groups_metric="acc")
    filtered_groups(run, {"solved, one lost": ([1.0, 1.0, 0.0], [2]), "failed": ([0.0, 0.0], [])})
    run.buffer._evict_terminal_groups(1, "train", run.buffer._terminal_eviction_reasons(1, "train"))
    given_up = run.buffer.take_given_up()
    found = {prompt_of(own.uid)[1]: (own.why, own.judged, own.solved) for own in given_up}
    assert found == {0: ("filtered", 2, 2), 1: ("filtered", 2, 0)}


def test_without_a_filter_a_lost_trajectory_evicts_nothing(simulate):
    run: Run = simulate("sync")
    assert filtered_groups(run, {"one valid": ([1.0, 0.0], [1])}) == set()


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_where_trajectories_are_lost_batches_stay_exact_and_every_group_compares_two(
    simulate, mode: str
):
    fates = {source: Fate(filtered=0.0, failed=0.1, latency=(0, 3), lost=0.4) for source in SIZES}
    run: Run = simulate(
        mode, fates, filter_groups_metric="acc", sync_refill_failed_groups=mode == "sync"
    )
    for _ in range(30):
        run.train()  # checks each batch
    assert run.check()["filtered"] > 100


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_of_each_group_that_ends_untrained_it_is_known_what_it_lost(simulate, mode: str):
    fates = {source: Fate(filtered=0.2, failed=0.0, latency=(0, 3), lost=0.3) for source in SIZES}
    run: Run = simulate(mode, fates, filter_groups_metric="acc")
    for _ in range(5):
        run.train()
    losses = run.buffer.take_losses()
    assert run.buffer.take_losses() == []
    assert {group.source for group in losses} == set(SIZES)
    assert all(group.trajectories == 2 for group in losses)
    lost = [fault for group in losses for fault in group.faults]
    assert set(lost) == {"tool=search, last error: HTTP 503"}
    assert len(lost) == run.world.losses
    tags = run.world.items["train"].values()
    waiting = sum(bool(tag.get("is_prompt")) and tag["status"] == "finished" for tag in tags)
    assert len(losses) + waiting + run.step * run.batch_size == run.world.ended


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_source_whose_tool_is_dead_starves_with_the_last_fault(
    simulate, mode: str, monkeypatch: pytest.MonkeyPatch
):
    fates = {source: Fate(filtered=0.0, failed=0.0, latency=(0, 1)) for source in SIZES}
    run: Run = simulate(mode, fates, filter_groups_metric="acc", max_replacements=5)
    end = World.end

    def dead(self: World, uid: str, rewards: list[float], lost: list[int]) -> None:
        all_lost = prompt_of(uid)[0] == "nq"
        end(self, uid, [0.0, 0.0] if all_lost else rewards, [0, 1] if all_lost else lost)

    monkeypatch.setattr(World, "end", dead)
    with pytest.raises(SourceStarved, match=r"source='nq'.*tool=search, last error: HTTP 503"):
        run.train()
    lost = [group for group in run.buffer.take_losses() if group.source == "nq"]
    assert lost and all(len(group.faults) == 2 for group in lost)


@given(st.text(min_size=1, max_size=20), st.integers(0, 10**12))
def test_a_group_name_says_its_prompt_and_splits_as_verl_needs(source: str, draw: int):
    uid = make_uid(source, draw)
    assert prompt_of(uid) == (source, draw)
    assert f"{uid}_3_0".split("_") == [uid, "3", "0"]


def test_a_poll_asks_for_what_ended_and_never_for_everything(simulate, monkeypatch):
    run: Run = simulate("colocate_async")
    run.train()
    asked: list[str | None] = []
    kv_list = World.kv_list

    def listed(self: World, partition_id: str | None = None) -> Any:
        asked.append(partition_id)
        return kv_list(self, partition_id)

    monkeypatch.setattr(World, "kv_list", listed)
    for _ in range(20):
        run.train()
    assert set(asked) == {queue_view.ENDED}
    assert run.world.items[queue_view.ENDED] == {}


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_group_that_nobody_named_is_found_after_a_minute_and_said(
    simulate, mode: str, caplog: pytest.LogCaptureFixture
):
    run: Run = simulate(mode)
    run.train()
    end = World.end

    def silent(self: World, uid: str, rewards: list[float], lost: list[int]) -> None:
        end(self, uid, rewards, lost)
        del self.items[queue_view.ENDED][uid]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "end", silent)
        for _ in range(3):
            run.train()
    assert "they ended and no loop worker named them" in caplog.text
    run.train()
    run.check()


def test_a_name_without_a_tag_is_read_at_the_next_poll(simulate):
    run: Run = simulate("sync")
    run.train()
    uid = make_uid("math", 10**6)
    run.buffer.start([uid], 1)
    run.world.start(uid, 1)
    run.world.end(uid, [1.0, 0.0], [])
    named = run.world.items[queue_view.ENDED]
    tag, named[uid] = named[uid], {}  # TransferQueue registers a key before its tag
    run.buffer._sync_metadata_from_transfer_queue()
    assert run.buffer.in_flight["math"] == 1 and uid in named
    named[uid] = tag
    run.buffer._sync_metadata_from_transfer_queue()
    assert run.buffer.in_flight["math"] == 0 and uid not in named
    assert uid in run.buffer.finished_keys["train"]


@pytest.mark.parametrize("strategy", ["drop", "wait"])
@pytest.mark.parametrize("threshold", [None, 3] if HAS_WAIT else [3])  # 0.9.0 has a bound always
def test_a_source_whose_schedule_ends_leaves_the_others_all_open_groups(
    simulate, monkeypatch, strategy: str, threshold: int | None
):
    monkeypatch.setitem(RATIOS, "nq", {0: 0.35, 5: 0.35, 6: 0.0})
    fates = {name: Fate(filtered=0.2, failed=0.0, latency=(1, 6)) for name in SIZES}
    run: Run = simulate(
        "colocate_async",
        fates,
        warmup=2,
        filter_groups_metric="acc",
        max_off_policy_threshold=threshold,
        max_off_policy_strategy=strategy,
    )
    for _ in range(10):
        run.train()
    drawn = run.plan.drawn["nq"]
    for _ in range(10):
        run.train()
        assert sum(run.buffer.lead.groups.values()) >= 29
        assert "nq" not in +Counter(run.buffer.lead.groups)
    assert run.plan.drawn["nq"] == drawn
    run.check()


def test_a_batch_that_waits_for_a_stuck_group_of_another_one_fails_in_the_end(simulate):
    run: Run = simulate(
        "colocate_async", max_off_policy_threshold=2, max_off_policy_strategy="wait", max_wait_s=50
    )
    run.train()
    stuck = next(iter(run.world.ends_at))
    run.world.ends_at[stuck] = 10**9
    with pytest.raises(SourceStarved, match=r"waits for others in flight: .*waited 51 s"):
        for _ in range(5):
            run.train()


def test_what_a_step_waits_for_is_counted_while_it_samples(simulate):
    run: Run = simulate(
        "colocate_async", {n: Fate(filtered=0, failed=0, latency=(3, 3)) for n in SIZES}
    )
    run.train()
    assert set(run.buffer.take_waits().values()) == {3.0}
    run.world.tick += 100  # training, in which verl asks how many groups there are
    if HAS_WAIT:
        run.buffer.get_sampleable_count(1, "train")
    assert run.buffer.take_waits() == {}


def test_a_step_that_trains_for_minutes_finds_its_groups_by_their_names(simulate, caplog):
    run: Run = simulate("colocate_async")
    for _ in range(5):
        run.train()
        for _ in range(100):
            run.world.sleep(1)
    assert "no loop worker named them" not in caplog.text
    assert run.buffer._training_s > 50
    assert run.buffer.lead.limit == "training"

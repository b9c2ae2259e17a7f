"""What the door reads of a trainer of verl's and gives to it: quotas of batches, and prompts."""

from types import SimpleNamespace
from typing import Any

import pytest

from samplers.mixture_plan import MixturePlan
from samplers.mixture_rows import MixtureRows

pytest.importorskip("verl", reason="the door is to verl's trainer")

from samplers.door import Door
from samplers.faults import RecipeError
from samplers.uid import prompt_of

SIZES = {"minif2f": 40, "summarize": 30, "openai/gsm8k": 50}
SHARES = {"minif2f": 0.3, "summarize": 0.25, "openai/gsm8k": 0.45}
BATCH_SIZE = 20


class Rows(MixtureRows):
    """A training set with one column."""

    def __init__(self) -> None:
        self.column = [name for name, rows in SIZES.items() for _ in range(rows)]
        self.follow(MixturePlan(SIZES, SHARES, BATCH_SIZE, seed=0), self.sources())

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, item: int, /) -> dict[str, Any]:
        return {"data_source": self.column[item], "number": item}


class Buffer:
    """What the replay buffer is told, and what it says of the last batch."""

    def __init__(self) -> None:
        self.started: list[tuple[list[str], int]] = []
        self.selected: list[str] = []
        self.given_up: list[Any] = []

    def start(self, uids: list[str], global_steps: int) -> None:
        self.started.append((uids, global_steps))

    def take_given_up(self) -> list[Any]:
        taken, self.given_up = self.given_up, []
        return taken


def trainer(batches: int = 4, step: int = 1, **options: Any) -> Any:
    """A trainer of verl's with so many batches a step."""
    config = SimpleNamespace(data=SimpleNamespace(train_batch_size=BATCH_SIZE))
    return SimpleNamespace(
        global_steps=step,
        parameter_sync_step=batches,
        train_dataset=Rows(),
        train_dataloader=SimpleNamespace(next_iter_state=None),
        trainer_mode="sync",
        replay_buffer=Buffer(),
        config=config,
        **options,
    )


@pytest.mark.parametrize("batches", [1, 4, 20])
def test_the_batches_of_a_step_have_the_quotas_of_the_plan_one_after_another(batches: int):
    door = Door(own := trainer(batches))
    groups = BATCH_SIZE // batches
    for own.global_steps in (1, 2, 3):
        for batch in range(batches):
            first = (own.global_steps - 1) * BATCH_SIZE + batch * groups
            assert door.quota(groups) == door.plan.counts_between(first, first + groups)
            end = (own.global_steps + 1) * BATCH_SIZE
            assert door.seats(1) == door.plan.counts_between(first, end)
            assert door.note_sampled() == (batch == batches - 1)


def test_batches_of_an_earlier_step_do_not_count():
    door = Door(own := trainer(step=3))
    door.note_sampled()  # and then verl goes on with another step
    own.global_steps = 7
    assert door.quota(5) == door.plan.counts_between(120, 125)
    assert [door.note_sampled() for _ in range(4)] == [False, False, False, True]


def test_a_step_with_wrong_counts_says_so_and_the_run_so_far_too():
    door = Door(own := trainer(step=2))
    exact = door.plan.counts(1)
    errors = door.ratio_errors(exact)
    assert errors["mixed/ratio_error/max"] == 0
    assert errors["mixed/ratio_error/cumulative_max"] < 1
    own.global_steps = 3
    wrong = door.plan.counts(2)
    wrong["minif2f"] -= 4
    wrong["foreign"] = 5
    errors = door.ratio_errors(wrong)
    assert errors["mixed/ratio_error/max"] == 5
    assert 3 < errors["mixed/ratio_error/cumulative_max"] < 5


@pytest.mark.parametrize("wanted", [None, 7, {"minif2f": 2, "summarize": 1}])
def test_the_uids_of_prompts_hold_source_and_draw(wanted: Any):
    Door(own := trainer(step=1))
    expected, rows = Rows().draw(BATCH_SIZE if wanted is None else wanted)

    batch = own._next_train_batch(wanted)

    uids = list(batch["uid"])
    assert [prompt_of(uid) for uid in uids] == [(own.source, own.draw) for own in expected]
    assert len(set(uids)) == len(uids) and not any("_" in uid for uid in uids)
    assert own.replay_buffer.started == [(uids, 1)]
    assert list(batch["number"]) == [row["number"] for row in rows]
    assert batch["global_steps"] == 1


@pytest.mark.parametrize(
    ("mode", "position"),
    [
        *(("sync", place) for place in (0, 20, 40, 60)),
        *(("colocate_async", place) for place in (20, 60)),
    ],
)
def test_a_resume_draws_from_the_state_of_the_checkpoint_which_is_that_of_the_step(
    mode: str, position: int
):
    class Loader:
        """verl's: it hands its state to the dataset when it is iterated."""

        next_iter_state: Any = "a state"

        def __iter__(self) -> Any:
            own.train_dataset.plan.take(position)
            self.next_iter_state = None
            return iter(())

    Door(own := trainer(step=3))
    own.train_dataloader, own.trainer_mode = Loader(), mode
    if position == 40 or (mode != "sync" and position > 40):
        own._next_train_batch()
        own._next_train_batch()
        assert own.train_dataset.plan.position == position + 40
    else:
        with pytest.raises(RecipeError, match=f"the plan is at prompt {position}, and step=3"):
            own._next_train_batch()

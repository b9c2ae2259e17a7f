"""`MixedDataset` and `ExactMixture` with verl's real dataset, loader and buffers, no workers."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict

pytest.importorskip("verl", reason="the hooks are verl's")

from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from samplers.faults import RecipeError
from samplers.recipe import MixedDataset
from samplers.replay_buffer import MixedReplayBuffer, MixedReplayBufferAsync
from samplers.uid import prompt_of

ROWS = {"openai/gsm8k": 30, "code": 12, "search": 9}


class OwnDataset(RLHFDataset):
    """A user's."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        return super().__getitem__(item) | {"mine": item}

    @classmethod
    async def process_multi_modal_info(cls, messages: Any, *_: Any, **__: Any) -> Any:
        return "mine", None, None


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    table = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{source} {number}"}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for source, count in ROWS.items()
        for number in range(count)
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    return path


def config_of(rows: Path, *overrides: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                *(f"data.train_files={rows}", f"data.val_files={rows}"),
                *("data.train_batch_size=10", "data.filter_overlong_prompts=false"),
                *("data.seed=3", f"trainer.default_local_dir={rows.parent / 'checkpoints'}"),
                "data.custom_cls.path=pkg://samplers.recipe",
                "data.custom_cls.name=MixedDataset",
                "+data.mixture={openai/gsm8k: 0.5, search: 0.3, code: 0.2}",
                "trainer.v1.sampler.custom_sampler.path=pkg://samplers.recipe",
                "trainer.v1.sampler.custom_sampler.name=ExactMixture",
                *overrides,
            ],
        )
    with open_dict(config):
        config.data.cache_dir = str(rows.parent / "cache")
    return config


VERLS: Any = PPOTrainerSync


class Trainer(VERLS):
    """verl's, as far as it is without workers: config, buffer, datasets and loader."""

    train_dataset: Any
    val_dataset: Any

    def __init__(self, config: Any, mode: str = "sync", step: int = 1) -> None:
        self.config, self.trainer_mode, self.parameter_sync_step = config, mode, 1
        self.global_steps, self.total_training_steps = step, 99
        self.replay_buffer = self._build_replay_buffer()
        self.train_dataset, self.val_dataset = (
            create_rl_dataset(files, config.data, None, None)
            for files in (config.data.train_files, config.data.val_files)
        )
        self.train_dataloader = StatefulDataLoader(
            self.train_dataset,
            batch_size=10,
            num_workers=config.data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
        )

    def next_uids(self, wanted: Any = None) -> list[tuple[str, int]]:
        """(source, draw) of the next prompts."""
        return [prompt_of(uid) for uid in self._next_train_batch(wanted)["uid"]]


def test_the_plan_orders_rows_as_they_are_and_validation_reads_the_same_file_plainly(rows: Path):
    trainer = Trainer(config_of(rows))
    batch = trainer._next_train_batch()
    assert Counter(batch["data_source"]) == {"openai/gsm8k": 5, "search": 3, "code": 2}
    assert [prompt_of(uid)[0] for uid in batch["uid"]] == list(batch["data_source"])
    assert "row_id" not in {*batch.keys()}
    first = trainer.val_dataset[0]
    assert first["raw_prompt"] == [{"role": "user", "content": "openai/gsm8k 0"}]
    assert trainer.train_dataset.row_id("code", 4) == trainer.val_dataset.row_id("code", 4)


def test_verls_loader_carries_stream_and_replacements_over_a_resume(rows: Path):
    trainer = Trainer(config_of(rows))
    trainer.next_uids()
    trainer.next_uids({"code": 2})
    trainer.train_dataset.plan.give_back({"search": 2})
    state = trainer.train_dataloader.state_dict()
    expected = [trainer.next_uids(), trainer.next_uids({"search": 4}), trainer.next_uids(7)]
    again = Trainer(config_of(rows), step=2)
    again.train_dataloader.load_state_dict(state)
    assert [again.next_uids(), again.next_uids({"search": 4}), again.next_uids(7)] == expected
    other = Trainer(config_of(rows, "data.seed=4"), step=2)
    other.train_dataloader.load_state_dict(state)
    with pytest.raises(RecipeError, match="of another stream"):
        other.next_uids()
    without_state = Trainer(config_of(rows), step=2)
    with pytest.raises(RecipeError, match="the plan is at prompt 0, and step=2"):
        without_state.next_uids()


def test_any_number_of_prompts_can_be_fetched_whatever_the_loaders_batch(rows: Path):
    trainer = Trainer(config_of(rows, "data.gen_batch_size=5"))
    assert trainer.next_uids({"search": 1}) == [("search", 0)]


@pytest.mark.parametrize(
    ("mode", "kind"), [("sync", MixedReplayBuffer), ("colocate_async", MixedReplayBufferAsync)]
)
def test_one_name_serves_all_modes_with_verls_settings(rows: Path, mode: str, kind: type):
    config = config_of(
        rows,
        f"trainer.v1.trainer_mode={mode}",
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"),
        *("algorithm.filter_groups.max_inflight_gen_batches=3",),
        "+trainer.v1.sampler.sampler_kwargs.max_wait_s=7",
    )
    buffer = Trainer(config, mode).replay_buffer
    assert type(buffer) is kind
    assert (buffer.filter_groups_metric, buffer.max_inflight_gen_batches) == ("acc", 3)
    assert (buffer.train_batch_size, buffer.mixture.max_wait_s) == (10, 7)
    assert config.data.dataloader_num_workers == 0


async def test_a_users_own_dataset_class_is_wrapped(rows: Path):
    config = config_of(rows, f"+data.mixture_base={{path: {__file__}, name: OwnDataset}}")
    trainer = Trainer(config)
    assert [int(x) for x in trainer._next_train_batch(2)["mine"]] == [
        int(trainer.train_dataset.index[own.source][own.row])
        for own in Trainer(config).train_dataset.plan.take(2)
    ]
    found = await MixedDataset.process_multi_modal_info([], 14, config=config.data)
    assert found == ("mine", None, None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["~data.mixture.code"], r"sum to 0\.8(.|\n)*'code' has 12 rows and no share"),
        (["data.mixture.code=0.3"], "sum to 1.1: they must sum to 1"),
        (
            ["data.mixture.code=0.1", "+data.mixture.web=0.1"],
            "has web=0.1, and data.train_files",
        ),
        (["~data.mixture"], "data.mixture is not set"),
        (["data.custom_cls.path=null"], "data.custom_cls is not set"),
        (["trainer.use_v1=false"], "verl's old trainer has no sampler"),
        (["data.train_batch_size=60"], "has 51 rows, fewer than data.train_batch_size=60"),
    ],
)
def test_a_mistake_is_an_error_before_any_worker_starts(
    rows: Path, overrides: list[str], words: str
):
    with pytest.raises(RecipeError, match=words):
        Trainer(config_of(rows, *overrides))


def test_a_dataset_without_the_sampler_is_an_error_also_in_verls_old_trainer(rows: Path):
    config = config_of(rows, "trainer.v1.sampler.custom_sampler.path=null")
    with pytest.raises(RecipeError, match="custom_sampler is not set"):
        create_rl_dataset(config.data.train_files, config.data, None, None)


def test_the_package_changes_no_recipe_that_does_not_ask(rows: Path):
    program = """
import sys
from tests.samplers.test_recipe import config_of
import verl, agent_loop.plugin
loaded = {name for name in sys.modules if name.startswith("samplers")}
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
cls = get_trainer_cls("sync")
print(cls.__module__, cls._next_train_batch.__module__, ReplayBuffer.__module__)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()[-3:]) == {
        "verl.trainer.ppo.v1.trainer_sync",
        "verl.trainer.ppo.v1.trainer_base",
        "verl.trainer.ppo.v1.replay_buffer",
    }
    plain = config_of(rows, "data.custom_cls.path=null", "~data.mixture")
    plain.trainer.v1.sampler.custom_sampler = OmegaConf.create({"path": None, "name": None})
    trainer: Any = SimpleNamespace(
        config=plain, trainer_mode="sync", _add_prompts_to_generate=print
    )
    trainer._resolve_filter_groups_metric = lambda: None
    buffer = PPOTrainerSync._build_replay_buffer(trainer)
    assert type(buffer).__module__ == "verl.trainer.ppo.v1.replay_buffer"
    assert plain.data.dataloader_num_workers == 8
    dataset = create_rl_dataset(plain.data.train_files, plain.data, None, None)
    assert type(dataset) is RLHFDataset

"""What we need of verl 0.9.1, so that another release fails here first, and by the hook's name.

`tests/verl_hooks` says what its source must hold, place by place; here it is held against that,
and what can be tried without Ray or a GPU is tried.
"""

import inspect
import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

import verl
from verl.trainer.ppo.v1 import get_trainer_cls

from config.lookup import at
from tests.verl_hooks import HOOKS, VLLM_SERVER, Hook
from tests.verl_hooks.hook import source_of
from verl_mixed.run.compose import REQUIRED, compose_config, resolve


def test_verl_is_the_pinned_release():
    assert version("verl") == "0.9.1"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.place)
def test_verl_still_has_what_we_build_on(hook: Hook):
    problem = hook.problem()
    assert problem is None, problem


def test_a_hook_that_verl_lost_is_named_with_what_of_ours_stands_on_it():
    gone = Hook("trainer.main_ppo:no_such_function", "ours.py", takes=("config",))
    renamed = Hook("trainer.main_ppo:run_ppo", "ours.py", takes=("configuration",))
    reordered = Hook(
        "trainer.main_ppo:run_ppo", "ours.py", says=("runner.run", "ray.is_initialized")
    )

    for hook, word in (
        (gone, "is gone"),
        (renamed, "does not take"),
        (reordered, "no longer says"),
    ):
        problem = hook.problem()
        assert problem is not None
        assert hook.place in problem and "ours.py" in problem and word in problem


def test_vllms_server_in_verl_still_takes_and_gives_what_our_loops_count_on():
    # Importing it would import vLLM.
    module = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/vllm_async_server.py"
    source, at_character = module.read_text(), 0
    for line in VLLM_SERVER:
        found = source.find(line, at_character)
        assert found >= 0, f"{module.name} no longer says {line!r}, or in another order"
        at_character = found


# --- start ----------------------------------------------------------------------------------------


def test_importing_verl_loads_our_plugin_in_every_process():
    from agent_loop.plugin import is_loaded

    assert "mixed_agent_loop" in entry_points(group="verl.plugins").names
    assert is_loaded()


def test_verl_hides_a_plugin_that_fails_so_that_ours_must_be_asked_for():
    source = Path(verl.__file__).read_text()
    assert '.debug("Failed to load plugin' in source and "VERL_USE_EXTERNAL_PLUGINS" in source


def test_the_cpu_platform_is_picked_where_no_accelerator_is():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    from verl.plugin.platform import get_platform

    assert get_platform().device_name == "cpu"
    assert f"cpu:{get_platform().current_device()}" == "cpu:0"
    assert torch.zeros(1).to(get_platform().current_device()).device.type == "cpu"


def test_the_device_of_the_config_stays_cpu_where_no_accelerator_is():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    from verl.utils.device import auto_set_device

    config = OmegaConf.create({"trainer": {"device": "cpu"}})
    auto_set_device(config)
    assert config.trainer.device == "cpu"


def test_workers_of_a_cluster_are_given_verls_own_variables():
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    config = OmegaConf.create(resolve(compose_config(["mixed.run_dir=/r"]), complete=False))
    assert "env_vars" in get_ppo_ray_runtime_env(config)


def test_our_names_stand_in_verls_registries():
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    assert get_trainer_cls("mixed_sync").__module__ == "agent_loop.training.by_name"
    assert get_adv_estimator_fn("state_masked_grpo").__module__ == "agent_loop.training.advantage"
    assert get_rollout_class("hf").__name__ == "HFServerAdapter"
    assert RolloutReplicaRegistry.get("hf").__name__ == "HFReplica"
    assert CheckpointEngineRegistry.get("tcp_store").__name__ == "TCPStoreCheckpointEngine"


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_cpu_gets_our_engine(model_type: str, strategy: str, monkeypatch: pytest.MonkeyPatch):
    from verl.workers.engine.base import EngineRegistry

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cpu")
    assert EngineRegistry.get_engine_cls(model_type, strategy).__module__ == "cpu_engine.engine"


# --- config ---------------------------------------------------------------------------------------


def test_verls_own_model_and_data_are_still_those_that_count_as_unset():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config: Any = OmegaConf.to_container(compose("ppo_trainer"), resolve=False)
    assert {key: at(config, key) for key in REQUIRED} == REQUIRED
    # mini-batches keep their mixture only where verl does not shuffle them
    assert at(config, "actor_rollout_ref.actor.shuffle") is False


def test_multi_turn_is_built_from_its_target_so_that_our_keys_pass():
    from verl.utils.config import omega_conf_to_dataclass

    config: Any = compose_config(["mixed.run_dir=/r"])
    multi_turn = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.multi_turn)

    assert type(multi_turn).__name__ == "MixedMultiTurnConfig"
    assert multi_turn.tool_config["code_start_tag"] == "<code>"


def test_the_dataset_of_the_config_is_found_by_its_package():
    from verl.utils.dataset.rl_dataset import get_dataset_class

    config: Any = compose_config(["mixed.run_dir=/r"])
    assert get_dataset_class(config.data).__name__ == "MixedRLHFDataset"


# --- trainers and buffers -------------------------------------------------------------------------


def test_the_methods_of_trainers_and_buffers_that_we_extend_are_verls():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    from agent_loop.training import trainer
    from agent_loop.training.accounts import Accounts
    from agent_loop.training.checkpoints import Checkpoints
    from agent_loop.training.optimizer_steps import OptimizerSteps
    from samplers import replay_buffer
    from samplers.exact_updates import ExactUpdates

    for mode in ("sync", "colocate_async", "separate_async"):
        theirs = get_trainer_cls(mode)
        for part in (ExactUpdates, OptimizerSteps, Accounts, Checkpoints, trainer._MixedTrainer):
            for method in _extended(part):
                assert callable(getattr(theirs, method)), f"{theirs.__name__}.{method}"
    for method in _extended(replay_buffer._ExactQuotas):
        assert callable(getattr(ReplayBuffer, method)), method
        assert callable(getattr(ReplayBufferAsync, method)), method
    for method in _extended(replay_buffer.MixedReplayBufferAsync):
        assert callable(getattr(ReplayBufferAsync, method)), method


def _extended(kind: type) -> list[str]:
    """Methods of a class that call the one they stand before."""
    return [
        name
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and f"super().{name}(" in inspect.getsource(method)
    ]


def test_every_place_that_asks_for_the_trainers_mode_is_one_that_we_know():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    asking = {
        name
        for name, method in vars(PPOTrainer).items()
        if inspect.isfunction(method) and "self.trainer_mode" in inspect.getsource(method)
    }
    assert asking == {
        "__init__",
        "_build_replay_buffer",
        "_init_dataloader",
        "_load_checkpoint",
        "_reissue_inflight_prompts",
        "_save_checkpoint",
        "_submit_batch_to_rollout",
    }


def test_the_transfer_queue_reads_writes_and_clears_rows_by_key():
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta

    needed = {
        tq.kv_batch_get: {"keys", "partition_id", "select_fields"},
        tq.kv_batch_put: {"keys", "partition_id", "fields", "tags"},
        tq.kv_clear: {"keys", "partition_id"},
        tq.kv_list: {"partition_id"},
    }
    for function, names in needed.items():
        assert names <= inspect.signature(function).parameters.keys(), function.__name__
    batch = KVBatchMeta(partition_id="train", keys=["a", "b"], tags=[{"n": 1}, {"n": 2}])
    batch.reorder([1, 0])
    assert (batch.keys, batch.tags) == (["b", "a"], [{"n": 2}, {"n": 1}])
    assert batch.select_keys(["a"]).tags == [{"n": 1}]


@pytest.mark.ray
def test_the_transfer_queue_takes_more_rows_than_verls_limit_where_there_is_none():
    program = """
import ray, torch, transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl_mixed.run.compose import compose_config

def put(rows, *overrides):
    config = compose_config(["mixed.run_dir=/r", *overrides])
    tq.init(OmegaConf.create({"backend": config.transfer_queue.backend}))
    keys, fields = list(map(str, range(rows))), TensorDict({"x": torch.zeros(rows, 1)}, [rows])
    try:
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{}] * rows)
        return len(tq.kv_list(partition_id="train")["train"])
    except Exception as error:
        return type(error).__name__
    finally:
        tq.close()

ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
limit = "transfer_queue.backend.SimpleStorage.total_storage_size="
print(put(5, limit + "4"), put(100_001))
ray.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.splitlines()[-1:] == ["RuntimeError 100001"], done.stdout + done.stderr


def test_the_difference_of_probabilities_is_measured_where_the_mask_is_one():
    import torch
    from verl import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    log_probs = torch.tensor([[0.5, 0.5, 0.1]]).log()
    other = torch.tensor([[0.5, 0.25, 0.9]]).log()
    data = DataProto.from_dict(
        tensors={
            "rollout_log_probs": log_probs,
            "old_log_probs": other,
            "response_mask": torch.tensor([[1, 1, 0]]),
            "responses": torch.zeros(1, 3, dtype=torch.int64),
        }
    )
    metrics = calculate_debug_metrics(data)

    assert metrics["training/rollout_probs_diff_valid"]
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)


def test_every_estimator_that_the_check_knows_is_verls_or_ours():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from verl_mixed.checks.config.algorithm import ESTIMATORS, UNTRIED

    for name in (*ESTIMATORS, *UNTRIED):
        assert callable(get_adv_estimator_fn(name)), name


# --- agent loops ----------------------------------------------------------------------------------


def test_the_worker_that_hosts_agent_loops_is_verls_and_is_chosen_by_a_config_key():
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
    from verl.workers.config.rollout import AgentLoopConfig

    from agent_loop.training.verl_adapters.loop_worker import (
        MixedAgentLoopManager,
        MixedAgentLoopWorker,
    )

    assert issubclass(MixedAgentLoopManager, AgentLoopManagerTQ)
    inner = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]
    assert issubclass(MixedAgentLoopWorker, inner)
    assert "agent_loop_manager_class" in AgentLoopConfig.__dataclass_fields__


def test_verls_own_agent_loops_are_registered_by_the_names_that_sources_may_use():
    import verl.experimental.agent_loop  # noqa: F401
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    from verl_mixed.checks.config.modes import VERLS_AGENTS

    assert _agent_loop_registry.keys() >= VERLS_AGENTS


def test_an_agent_loop_gives_its_reward_and_its_record_to_verl():
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    output = AgentLoopOutput(
        prompt_ids=[1],
        response_ids=[2, 3],
        response_mask=[1, 0],
        response_logprobs=[-0.5, 0.0],
        reward_score=0.25,
        metrics=AgentLoopMetrics(),
        extra_fields={"mixed": {"a": 1}},
    ).as_dict()
    assert output["rm_scores"].tolist() == [0.0, 0.25]
    assert output["rollout_log_probs"].tolist() == [-0.5, 0.0]
    assert output["extra_fields"]["mixed"] == {"a": 1}


def test_a_servers_answer_has_tokens_log_probs_and_a_place_for_the_weights_version():
    from verl.workers.rollout.replica import TokenOutput

    answer = TokenOutput(
        token_ids=[1], log_probs=[-0.5], stop_reason="completed", extra_fields={"global_steps": 3}
    )
    assert (answer.token_ids, answer.log_probs) == ([1], [-0.5])
    assert answer.extra_fields["global_steps"] == 3


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 256, 984, 985, 4096])
def test_a_rollout_server_has_the_slots_that_our_workers_share(max_num_seqs: int):
    from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica

    from agent_loop.loop_settings import most_open_requests

    replica: Any = SimpleNamespace(config=SimpleNamespace(max_num_seqs=max_num_seqs))
    slots_of: Any = RolloutReplica.max_concurrency
    slots = slots_of.fget(replica)
    assert most_open_requests(max_num_seqs, 1) == slots - CONTROL_METHOD_CONCURRENCY


def test_our_rollout_backend_has_every_method_that_verl_leaves_open():
    from verl.checkpoint_engine.base import CheckpointEngine
    from verl.workers.rollout.base import BaseRollout

    from cpu_engine.checkpoint_engine import TCPStoreCheckpointEngine
    from cpu_engine.rollout import HFReplica, HFServerAdapter

    for kind in (HFServerAdapter, HFReplica, TCPStoreCheckpointEngine):
        assert not inspect.isabstract(kind), sorted(getattr(kind, "__abstractmethods__", ()))
    assert BaseRollout.__abstractmethods__ == {"resume", "update_weights", "release"}
    assert CheckpointEngine.__abstractmethods__


def test_our_server_has_every_method_that_verl_calls_on_one():
    from verl.workers.rollout import replica

    from cpu_engine.rollout import HFServer

    source = source_of(replica.RolloutReplica)
    called = {
        line.split("server.")[1].split(".remote")[0]
        for line in source.splitlines()
        if "server." in line and ".remote(" in line.split("server.", 1)[1]
    }
    assert called, "RolloutReplica no longer calls its servers by name"
    assert called <= set(dir(HFServer)), sorted(called - set(dir(HFServer)))

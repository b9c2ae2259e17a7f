"""What we need of verl 0.9.1, so that another release fails here first."""

import inspect
from importlib.metadata import entry_points, version

import pytest


def test_verl_is_the_pinned_release():
    assert version("verl") == "0.9.1"


def test_importing_verl_loads_our_plugin_in_every_process():
    import verl  # noqa: F401

    from agent_loop.plugin import is_loaded

    assert "mixed_agent_loop" in entry_points(group="verl.plugins").names
    assert is_loaded()


def test_the_cpu_platform_is_picked_where_no_accelerator_is():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    from verl.plugin.platform import get_platform

    assert get_platform().device_name == "cpu"
    assert f"cpu:{get_platform().current_device()}" == "cpu:0"
    assert torch.zeros(1).to(get_platform().current_device()).device.type == "cpu"


def test_our_names_stand_in_verls_registries():
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    assert get_trainer_cls("mixed_sync").__module__ == "agent_loop.trainer"
    assert get_adv_estimator_fn("state_masked_grpo").__module__ == "agent_loop.advantage"
    assert get_rollout_class("hf").__name__ == "HFServerAdapter"
    assert RolloutReplicaRegistry.get("hf").__name__ == "HFReplica"


def test_the_trainers_methods_that_we_extend_are_verls():
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from agent_loop.trainer import MixedSyncTrainer

    extended = [
        "_balance_batch",
        "_build_replay_buffer",
        "_compute_metrics",
        "_compute_old_log_prob",
        "_init_dataloader",
        "_init_resource_pool_mgr",
        "_load_checkpoint",
        "_next_train_batch",
        "_save_checkpoint",
        "_val_metrics_update",
        "_validate",
        "step",
    ]
    for name in extended:
        assert name in vars(MixedSyncTrainer)
        assert callable(getattr(PPOTrainerSync, name))


def test_the_replay_buffer_still_polls_by_an_attribute_of_that_name():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    assert "poll_interval" in inspect.signature(ReplayBuffer.__init__).parameters
    assert "self.poll_interval" in inspect.getsource(ReplayBuffer)


def test_the_agent_loop_worker_still_trains_on_the_response_mask():
    from verl.trainer.ppo.v1 import agent_loop_tq

    source = inspect.getsource(agent_loop_tq)
    assert 'field["loss_mask"] = field["response_mask"]' in source


def test_an_agent_loop_that_sets_its_reward_is_not_judged_again():
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    source = inspect.getsource(AgentLoopWorker._compute_score)
    assert "final_output.reward_score is None" in source

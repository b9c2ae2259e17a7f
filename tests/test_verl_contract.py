"""What we need of verl 0.9.1, so that another release fails here first."""

import inspect
from importlib.metadata import entry_points, version

import pytest

pytest.importorskip("verl")

from verl.trainer.ppo.v1 import get_trainer_cls


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
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    assert get_trainer_cls("mixed_sync").__module__ == "agent_loop.trainer"
    assert get_adv_estimator_fn("state_masked_grpo").__module__ == "agent_loop.advantage"
    assert get_rollout_class("hf").__name__ == "HFServerAdapter"
    assert RolloutReplicaRegistry.get("hf").__name__ == "HFReplica"


def test_the_methods_of_trainers_and_buffers_that_we_extend_are_verls():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    from agent_loop import trainer
    from samplers import replay_buffer

    ours = {
        trainer.MixedSyncTrainer: "mixed_sync",
        trainer.MixedColocateAsyncTrainer: "mixed_colocate_async",
        trainer.MixedSeparateAsyncTrainer: "mixed_separate_async",
    }
    for kind, name in ours.items():
        assert get_trainer_cls(name) is kind
        theirs = get_trainer_cls(vars(kind)["MODE"])
        for method in _extended(trainer._MixedTrainer):
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


def test_the_replay_buffers_wait_and_refill_as_ours_take_for_granted():
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    sync = inspect.getsource(ReplayBuffer.sample)
    assert "len(sampleable_keys) >= batch_size" in sync
    assert "refill_credit += 2 * dapo_count + failed_count" in sync
    assert "len(sampleable_keys) >= batch_size" in inspect.getsource(
        ReplayBufferAsync._has_enough_samples
    )
    waiting = inspect.getsource(ReplayBufferAsync.wait_for_sampleable)
    assert "self.refill_fn(len(evicted_uids))" in waiting


def test_an_engine_still_takes_one_temperature_per_row():
    from verl.workers.engine.fsdp import transformer_impl

    source = inspect.getsource(transformer_impl)
    assert "if not isinstance(temperature, torch.Tensor)" in source


def test_the_rows_of_an_update_are_still_mini_batch_size_times_n():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    source = inspect.getsource(PPOTrainer._update_actor)
    assert "ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n" in source


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


def test_the_worker_that_hosts_agent_loops_is_verls_and_is_chosen_by_a_config_key():
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
    from verl.workers.config.rollout import AgentLoopConfig

    from agent_loop.loop_worker import MixedAgentLoopManager, MixedAgentLoopWorker

    assert issubclass(MixedAgentLoopManager, AgentLoopManagerTQ)
    inner = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]
    assert issubclass(MixedAgentLoopWorker, inner)
    assert "agent_loop_manager_class" in AgentLoopConfig.__dataclass_fields__
    theirs = inspect.signature(inner._run_agent_loop).parameters
    assert {"sampling_params", "trajectory", "agent_name", "trace", "kwargs"} <= theirs.keys()
    post = inspect.signature(inner._agent_loop_postprocess).parameters
    assert {"output", "validate", "kwargs"} <= post.keys()


def test_verls_own_agent_loops_are_registered_by_the_names_that_sources_may_use():
    import verl.experimental.agent_loop  # noqa: F401
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    from cluster.preflight import _VERLS_AGENTS

    assert _agent_loop_registry.keys() >= _VERLS_AGENTS


def test_the_continuous_token_builder_says_what_it_adds_and_takes_back():
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult

    fields = {"token_ids", "inserted_token_ids", "removed_prefix_token_count"}
    assert fields <= MergeResult.__dataclass_fields__.keys()
    merge = inspect.signature(ContinuousTokenBuilder.merge_context_tokens).parameters
    assert list(merge)[1:4] == ["previous_messages", "updated_messages", "runtime_token_ids"]


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


def test_a_rollout_request_goes_through_a_server_handle_that_we_can_wrap():
    from verl.workers.rollout.llm_server import LLMServerClient

    source = inspect.getsource(LLMServerClient.generate)
    assert "server_id, server = await self._acquire_server(" in source
    assert "await server.generate.remote(" in source

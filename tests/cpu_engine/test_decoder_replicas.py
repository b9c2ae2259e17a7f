"""Two rollout servers, as real Ray actors, behind verl's balancer and its client of async modes."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.fakes.real_tokenizers import real_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [3 + i % 50 for i in range(30)]
DTYPES = {"float32": 1e-4, "bfloat16": 0.4}
"""And how far log-probs may be, in the mean, from those of the model asked directly."""


@pytest.fixture(scope="module")
def cluster() -> Generator[None]:
    from tests.fakes.real_ray import own_ray

    with own_ray(2):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = real_tokenizer("pieces")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_of(rank: int, folder: Path) -> Any:
    """What the training process of a rank has: weights of its own, in float32."""
    model: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 0.3 * (rank + 1)
    return model


class Servers:
    """Two servers, each with the weights of its rank, and verl's balancer over them."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import ray
        from verl.workers.config import HFModelConfig, RolloutConfig
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from cpu_engine.rollout import HFReplica, HFServerAdapter

        self.model_config = OmegaConf.create({"path": str(folder)})
        self.dtype = getattr(torch, dtype)
        self.most_off = DTYPES[dtype]
        self.config = RolloutConfig(
            name="hf",
            tensor_model_parallel_size=1,
            dtype=dtype,
            load_format="dummy",
            prompt_length=64,
            response_length=400,
            ignore_eos=True,
        )
        self.replicas = [
            HFReplica(
                replica_rank=rank,
                config=self.config,
                model_config=self.model_config,
                gpus_per_node=2,
                name_suffix=dtype,
            )
            for rank in range(2)
        ]
        hf_model = HFModelConfig(path=str(folder))
        self.adapters = [HFServerAdapter(self.config, hf_model, None, rank) for rank in range(2)]
        self._router = ray.remote(GlobalRequestLoadBalancer)
        self.balancer: Any = None

    async def start(self, folder: Path) -> None:
        await asyncio.gather(*(replica.launch_servers() for replica in self.replicas))
        for rank, adapter in enumerate(self.adapters):
            adapter._server = self.replicas[rank].server_handle
            await adapter.update_weights(model_of(rank, folder).named_parameters(), global_steps=1)
        self.balancer = self._router.remote(
            {str(rank): replica.server_handle for rank, replica in enumerate(self.replicas)}
        )

    def client(self) -> Any:
        from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

        rollout = SimpleNamespace(name="hf", response_length=400, full_determinism=False)
        config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        return FullyAsyncLLMServerClient(config, load_balancer_handle=self.balancer)

    def end(self) -> None:
        import ray

        for actor in [self.balancer, *(replica.server_handle for replica in self.replicas)]:
            ray.kill(actor)


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, cluster: None, folder: Path) -> Generator[Servers]:
    started = Servers(folder, request.param)
    asyncio.run(started.start(folder))
    yield started
    started.end()


@torch.inference_mode()
def log_probs_of(model: Any, prompt_ids: list[int], token_ids: list[int]) -> list[float]:
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    rows = model(input_ids=ids).logits[0].float().log_softmax(dim=-1)[len(prompt_ids) - 1 : -1]
    return rows.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("servers", list(DTYPES), indirect=True)
async def test_each_replica_has_the_weights_of_its_rank_and_a_trajectory_stays_on_it(
    servers, folder
):
    models = [model_of(rank, folder).to(servers.dtype) for rank in range(2)]
    client = servers.client()

    async def trajectory(number: int) -> int:
        """Two turns; the rank of the server that answered both."""
        ids, ranks = list(PROMPT), set()
        for turn in range(2):
            params = {"max_tokens": 12, "seed": 10 * number + turn, "logprobs": True}
            output = await client.generate(
                f"trajectory{number}", prompt_ids=ids, sampling_params=params
            )
            off = [
                torch.tensor(output.log_probs)
                .sub(torch.tensor(log_probs_of(model, ids, output.token_ids)))
                .abs()
                .mean()
                .item()
                for model in models
            ]
            assert min(off) < servers.most_off < max(off)
            ranks.add(off.index(min(off)))
            assert (output.extra_fields["num_cached_tokens"] > len(PROMPT)) == (turn > 0)
            ids += [*output.token_ids, 5, 6, 7]
        assert len(ranks) == 1
        return ranks.pop()

    assert set(await asyncio.gather(*(trajectory(number) for number in range(6)))) == {0, 1}


@pytest.mark.parametrize("servers", ["float32"], indirect=True)
async def test_an_aborted_trajectory_goes_on_after_a_weight_sync_with_its_tokens_kept(
    servers, folder
):
    client = servers.client()
    params = {"max_tokens": 400, "seed": 1, "logprobs": True}
    asked = asyncio.create_task(
        client.generate("one", prompt_ids=PROMPT, sampling_params=dict(params))
    )
    aborted: list[int] = []
    while not any(aborted):
        answers = await asyncio.gather(
            *(replica.server_handle.abort_all_requests.remote() for replica in servers.replicas)
        )
        aborted = [answer["aborted_count"] for answer in answers]
        if not any(aborted):
            await asyncio.gather(*(replica.resume_generation() for replica in servers.replicas))
    rank = aborted.index(1)
    old, new = model_of(0, folder), model_of(1, folder)
    if rank:
        old, new = new, old
    handle = servers.replicas[rank].server_handle
    late = asyncio.create_task(client.generate("one", prompt_ids=PROMPT, sampling_params=params))
    await servers.adapters[rank].update_weights(new.named_parameters(), global_steps=2)
    assert not asked.done()
    await asyncio.gather(*(replica.resume_generation() for replica in servers.replicas))
    output, _ = await asked, await late
    assert (len(output.token_ids), len(output.log_probs)) == (400, 400)
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (1, 2)
    kept = log_probs_of(old, PROMPT, output.token_ids)
    went_on = log_probs_of(new, PROMPT, output.token_ids)
    sides = [
        abs(ours - before) < 1e-3 or abs(ours - after) < 1e-3
        for ours, before, after in zip(output.log_probs, kept, went_on, strict=True)
    ]
    assert all(sides)
    assert abs(output.log_probs[-1] - went_on[-1]) < 1e-3
    again = await handle.abort_all_requests.remote(reject_request=True)
    rejected = await handle.generate.remote(PROMPT, params, "late")
    assert (again["aborted_count"], rejected.stop_reason, rejected.token_ids) == (0, "aborted", [])

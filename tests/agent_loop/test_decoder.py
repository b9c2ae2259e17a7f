"""The CPU decoder against the model asked directly, one sequence at a time."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_loop.cpu.decoder import BatchDecoder, Request, Sampling, process_logits

EOS = 1


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def decoder(model: Qwen3ForCausalLM, seed: int = 0) -> BatchDecoder:
    return BatchDecoder(model, eos_token_ids=[EOS], pad_token_id=0, seed=seed)


def run(decoder: BatchDecoder, arrivals: list[list[Request]]) -> None:
    """Admit one list of requests before each decode step, then decode to the end."""
    while arrivals or len(decoder):
        decoder.admit(arrivals.pop(0) if arrivals else [])
        if len(decoder):
            decoder.step()


@torch.inference_mode()
def log_probs_of(model: Qwen3ForCausalLM, request: Request) -> list[float]:
    """The model's log-prob of each token of a finished request, in one pass without a cache."""
    ids = torch.tensor([[*request.prompt_ids, *request.token_ids]])
    logits = model(input_ids=ids).logits[0].float()
    if request.sampling.temperature > 0:
        logits = logits / request.sampling.temperature
    rows = logits.log_softmax(dim=-1)[len(request.prompt_ids) - 1 : -1]
    return rows.gather(1, torch.tensor(request.token_ids).unsqueeze(1)).squeeze(1).tolist()


def test_requests_admitted_between_steps_have_the_log_probs_of_the_model_asked_alone(model):
    requests = [
        Request(prompt_ids=list(range(2, 2 + n)), sampling=Sampling(max_tokens=m, temperature=t))
        for n, m, t in [(3, 12, 1.0), (9, 5, 0.7), (2, 20, 1.3), (14, 9, 1.0), (5, 1, 1.0)]
    ]
    run(decoder(model), [requests[:2], [], requests[2:3], requests[3:]])
    for request in requests:
        assert request.stop_reason is not None
        assert request.log_probs == pytest.approx(log_probs_of(model, request), abs=1e-5)


def test_greedy_decoding_takes_the_most_likely_token_whatever_else_is_in_the_batch(model):
    alone = Request(prompt_ids=[5, 6, 7], sampling=Sampling(max_tokens=8, temperature=0))
    run(decoder(model), [[alone]])
    again = Request(prompt_ids=[5, 6, 7], sampling=Sampling(max_tokens=8, temperature=0))
    other = Request(prompt_ids=[9] * 11, sampling=Sampling(max_tokens=30))
    run(decoder(model), [[other], [again]])
    assert again.token_ids == alone.token_ids


def test_a_seed_fixes_the_tokens_of_a_request_and_of_no_other(model):
    def sampled(seed: int | None, company: int) -> list[int]:
        request = Request(prompt_ids=[3, 4], sampling=Sampling(max_tokens=15, seed=seed))
        others = [
            Request(prompt_ids=[7, 8, 9], sampling=Sampling(max_tokens=9)) for _ in range(company)
        ]
        run(decoder(model, seed=company), [others, [request]])
        return request.token_ids

    assert sampled(11, company=0) == sampled(11, company=3)
    assert sampled(11, company=0) != sampled(12, company=0)
    assert sampled(None, company=1) != sampled(None, company=2)


def test_a_stop_token_ends_the_request_and_stays_in_it(model):
    free = Request(prompt_ids=[3, 4], sampling=Sampling(max_tokens=10, seed=1))
    run(decoder(model), [[free]])
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    stopped = Request(
        prompt_ids=[3, 4],
        sampling=Sampling(max_tokens=10, seed=1, stop_token_ids=frozenset([stop])),
    )
    run(decoder(model), [[stopped]])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.stop_reason == "completed"
    assert free.stop_reason == "length"


def test_top_k_and_top_p_leave_only_the_likeliest_tokens_and_a_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    log_probs = process_logits(
        logits,
        temperature=torch.ones(3),
        top_k=torch.tensor([2, -1, -1]),
        top_p=torch.tensor([1.0, 0.5, 1.0]),
    )
    assert torch.isfinite(log_probs).sum(dim=1).tolist() == [2, 1, 4]
    assert log_probs.exp().sum(dim=1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_a_sampling_parameter_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**{"max_tokens": 5, **wrong})

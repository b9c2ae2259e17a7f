"""The CPU decoder against the model asked directly, one sequence at a time."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent_loop.seeds import seed_from
from cpu_engine.async_decoder import AsyncDecoder
from cpu_engine.decoder import BatchDecoder, Request
from cpu_engine.rollout import HFServer
from cpu_engine.sampling import Sampling, draw, process_logits, uniforms
from cpu_engine.stop_strings import StopStrings

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
    return BatchDecoder(model, eos_token_ids=[EOS], seed=seed)


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
    kept = process_logits(
        logits,
        temperature=torch.ones(3),
        top_k=torch.tensor([2, -1, -1]),
        top_p=torch.tensor([1.0, 0.5, 1.0]),
    )
    assert torch.isfinite(kept).sum(dim=1).tolist() == [2, 1, 4]


@given(
    st.lists(
        st.lists(st.floats(-30, 30) | st.just(-torch.inf), min_size=5, max_size=5), min_size=1
    ),
    st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-24]),
)
def test_a_drawn_token_is_one_that_is_left_and_has_the_log_prob_of_the_distribution(rows, uniform):
    logits = torch.tensor([[1.0, *row] for row in rows])
    size = len(rows)
    greedy = torch.arange(size) % 2 == 1
    chosen, log_probs = draw(logits, greedy, torch.full((size,), uniform))
    expected = logits.log_softmax(dim=1).gather(1, chosen.unsqueeze(1)).squeeze(1)
    assert torch.isfinite(log_probs).all()
    assert torch.allclose(log_probs, expected, atol=1e-5)
    assert torch.equal(chosen[greedy], logits.argmax(dim=1)[greedy])


def test_the_tokens_drawn_over_many_seeds_have_the_frequencies_of_the_distribution():
    count = 20_000
    seeds = np.array([seed_from(seed) for seed in range(count)], np.uint64)
    weights = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    for place in (0, 7):
        uniform = torch.from_numpy(uniforms(seeds, np.full(count, place)))
        logits = weights.log().expand(count, -1)
        chosen, _ = draw(logits, torch.zeros(count, dtype=torch.bool), uniform)
        frequencies = chosen.bincount(minlength=5) / count
        assert torch.allclose(frequencies, weights, atol=0.015)


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_a_sampling_parameter_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**{"max_tokens": 5, **wrong})


def byte_level_bpe() -> Tokenizer:
    """A tokenizer of bytes whose merges cross words, tags and characters of several bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["</a>\n<b>é€</b>", "a></a> 😀é<", "€€b>\n</a>😀😁", "b é</ab><a>"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


BPE = byte_level_bpe()
MERGES = range(257, BPE.get_vocab_size())
UNKNOWN = range(BPE.get_vocab_size(), BPE.get_vocab_size() + 3)  # a model's vocabulary is padded


def decode(token_ids: Sequence[int]) -> str:
    return BPE.decode(list(token_ids), skip_special_tokens=False)


def byte_ids(text: str) -> list[int]:
    """A text as one token a byte."""
    vocabulary = BPE.get_vocab()
    [(written, _)] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    return [vocabulary[character] for character in written]


STOPS = st.text("<>/ab é€😀\n|", min_size=1, max_size=5)


@st.composite
def ids_and_stops(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Random tokens, with the stop strings cut into tokens in several ways among them."""
    stops = draw(st.lists(STOPS, min_size=1, max_size=3))
    texts = st.sampled_from(stops).flatmap(
        lambda stop: st.sampled_from([stop, "a" + stop, stop + "a", stop[1:], stop[:-1]])
    )
    pieces = st.one_of(
        st.lists(st.integers(0, UNKNOWN[-1]), min_size=1, max_size=3),
        st.lists(st.sampled_from(MERGES), min_size=1, max_size=4),
        st.lists(st.sampled_from(UNKNOWN), min_size=1, max_size=12),
        texts.filter(bool).map(byte_ids),
        texts.filter(bool).map(byte_ids).map(lambda ids: ids[1:]),
        texts.map(lambda text: BPE.encode(text).ids),
    )
    chosen = draw(st.lists(pieces, min_size=1, max_size=8))
    return [token_id for piece in chosen for token_id in piece], stops


def first_stop(stops: Callable[[Sequence[int]], bool], token_ids: list[int]) -> int | None:
    """After how many tokens decoding stops."""
    return next((n for n in range(1, len(token_ids) + 1) if stops(token_ids[:n])), None)


@given(ids_and_stops())
def test_a_stop_string_is_seen_where_decoding_all_after_every_token_sees_it(drawn):
    token_ids, stop = drawn
    strings = StopStrings(decode)
    expected = first_stop(lambda ids: any(text in decode(ids) for text in stop), token_ids)
    assert first_stop(lambda ids: strings.completed(ids, stop), token_ids) == expected


@pytest.mark.parametrize(
    ("token_ids", "stop"),
    [
        (byte_ids("ab</a>"), "</a>"),
        ([*byte_ids("a<"), *UNKNOWN, *UNKNOWN, *UNKNOWN, *byte_ids("b")], "<b"),
        (byte_ids("x😀"), "x😀"),
        (byte_ids("€é"), "€é"),
        ([*byte_ids("é")[1:], *byte_ids("<")], "<"),
        ([BPE.token_to_id("<|end|>")], "|end"),
    ],
    ids=["bytes", "tokens without text", "emoji", "two", "half a character first", "special"],
)
def test_a_stop_string_over_several_tokens_ends_with_the_last_one(token_ids, stop):
    strings = StopStrings(decode)
    assert first_stop(lambda ids: strings.completed(ids, [stop]), token_ids) == len(token_ids)


def test_a_token_that_goes_on_after_the_stop_string_completes_it():
    token_id = next(i for i in MERGES if decode([i]).find(">") in range(len(decode([i])) - 1))
    before, after = decode([token_id]).split(">", 1)
    ids = byte_ids("a</a")
    stop = f"</a{before}>"
    assert after and StopStrings(decode).completed([*ids, token_id], [stop])


@pytest.mark.parametrize("stop", [" b", "a ", " ", "ab b"])
def test_a_leading_space_that_a_tokenizer_drops_is_not_missed(stop):
    vocabulary = {"a": 0, "b": 1, "\u2581": 2, "\u2581b": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    token_ids = [2, 0, 0, 0, 1, 2, 1, 0, 3, 0]
    assert tokenizer.decode(token_ids) == "aaab ba ba"
    strings = StopStrings(tokenizer.decode)
    expected = first_stop(lambda ids: stop in tokenizer.decode(ids), token_ids)
    assert expected is not None
    assert first_stop(lambda ids: strings.completed(ids, [stop]), token_ids) == expected


def test_looking_for_stop_strings_decodes_little():
    decoded: list[int] = []

    def counted(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    strings = StopStrings(counted)
    ids = byte_ids("a b é€ " * 200)
    assert first_stop(lambda seen: strings.completed(seen, ["</search>"]), ids) is None
    assert decoded == [2] * len(set(ids))  # each token once, and never a window
    decoded.clear()
    ids = byte_ids("a b> " * 200)
    assert first_stop(lambda seen: strings.completed(seen, ["</search>"]), ids) is None
    assert len(decoded) == 200 + 1  # the windows, and the new token
    assert max(decoded) == len("</search>") + 1


def letters(token_ids: Sequence[int]) -> str:
    """A character a token, for the vocabulary of the small model."""
    return "".join(chr(ord("0") + token_id) for token_id in token_ids)


def stopping(model: Qwen3ForCausalLM) -> BatchDecoder:
    return BatchDecoder(model, eos_token_ids=[], seed=0, decode=letters)


def test_a_stop_string_ends_its_request_and_stays_in_it_and_the_prompt_does_not_count(model):
    free = Request(prompt_ids=[3, 4], sampling=Sampling(max_tokens=10, seed=1))
    run(stopping(model), [[free]])
    text = letters(free.token_ids)
    stop = text[3:6]
    prompt = [3, 4]
    across = letters(prompt[-1:]) + text[0]
    stopped, budgeted, crossing = (
        Request(prompt_ids=prompt, sampling=Sampling(max_tokens=most, seed=1, stop=texts))
        for most, texts in [(10, ("never", stop)), (6, (stop,)), (10, (across, letters(prompt)))]
    )
    run(stopping(model), [[stopped], [budgeted, crossing]])
    end = text.index(stop) + 3
    assert stopped.token_ids == free.token_ids[:end]
    assert (stopped.stop_reason, len(stopped.log_probs)) == ("completed", end)
    assert (budgeted.token_ids, budgeted.stop_reason) == (free.token_ids[:6], "completed")
    assert across not in text and letters(prompt) not in text
    assert (crossing.token_ids, crossing.stop_reason) == (free.token_ids, "length")


async def test_stop_strings_without_texts_are_refused_and_harm_no_other_request(model):
    wants = Request(prompt_ids=[3], sampling=Sampling(max_tokens=2, stop=("</a>",)))
    other = Request(prompt_ids=[3], sampling=Sampling(max_tokens=2))
    engine = AsyncDecoder(decoder(model))
    refused, decoded = await asyncio.gather(
        engine.generate(wants), engine.generate(other), return_exceptions=True
    )
    assert isinstance(refused, ValueError) and "</a>" in str(refused)
    assert decoded is other and other.stop_reason is not None
    with pytest.raises(ValueError, match="stop="):
        decoder(model).admit([wants])


@pytest.mark.parametrize("stop", [("",), ("a", "\ufffd"), (7,)], ids=repr)
def test_a_stop_string_that_is_no_text_is_refused(stop):
    with pytest.raises(ValueError, match="stop="):
        Sampling(max_tokens=5, stop=stop)


def server() -> HFServer:
    """The rollout server without its model and its actor."""
    server: Any = HFServer.__new__(HFServer)
    server.config = SimpleNamespace()
    server.model_config = SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=BPE))
    return server


@pytest.mark.parametrize(
    ("params", "stop"),
    [
        ({}, ()),
        ({"stop": None}, ()),
        ({"stop": "</a>", "include_stop_str_in_output": False}, ("</a>",)),
        ({"stop": ["</a>", "</b>"], "include_stop_str_in_output": True}, ("</a>", "</b>")),
    ],
    ids=repr,
)
def test_the_server_takes_stop_as_vllm_does(params: dict[str, Any], stop):
    assert server()._sampling({"max_tokens": 3, **params}, prompt_length=1).stop == stop


def test_the_server_decodes_every_token_as_it_is():
    text = "a <|end|> b , c é€"
    assert server()._decode(BPE.encode(text).ids) == text


async def cancelled(task: "asyncio.Task[Request]") -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def long_request() -> Request:
    return Request(prompt_ids=[3, 4], sampling=Sampling(max_tokens=2000))


async def decoding(engine: AsyncDecoder, request: Request) -> "asyncio.Task[Request]":
    """A request under way, of which some tokens are there."""
    task = asyncio.create_task(engine.generate(request))
    while len(request.token_ids) < 3:
        await engine.run(lambda: None)
    return task


async def test_a_cancelled_request_is_dropped_at_the_next_step(model):
    decoder = stopping(model)
    engine = AsyncDecoder(decoder)
    gone, stays = long_request(), Request(prompt_ids=[5], sampling=Sampling(max_tokens=40, seed=3))
    task = await decoding(engine, gone)
    other = asyncio.create_task(engine.generate(stays))
    while not stays.token_ids:
        await engine.run(lambda: None)
    await cancelled(task)
    tokens = len(gone.token_ids)
    await other
    assert len(gone.token_ids) <= tokens + 1  # of the step that was under way
    assert (len(stays.token_ids), len(decoder)) == (40, 0)
    assert stays.log_probs == pytest.approx(log_probs_of(model, stays), abs=1e-5)


async def test_the_last_request_cancelled_leaves_the_decoder_empty_and_able(model):
    decoder = stopping(model)
    engine = AsyncDecoder(decoder)
    request = long_request()
    await cancelled(await decoding(engine, request))
    pump = engine._pump
    assert pump is not None
    await pump
    assert len(decoder) == 0 and len(request.token_ids) < 2000
    again = Request(prompt_ids=[5], sampling=Sampling(max_tokens=4))
    assert await engine.generate(again) is again


async def test_a_cancelled_request_makes_room_and_one_that_waited_is_never_begun(model):
    engine = AsyncDecoder(stopping(model), max_requests=1)
    running, waiting, last = (
        long_request(),
        long_request(),
        Request(prompt_ids=[5], sampling=Sampling(max_tokens=4)),
    )
    task = await decoding(engine, running)
    never = asyncio.create_task(engine.generate(waiting))
    after = asyncio.create_task(engine.generate(last))
    await engine.run(lambda: None)
    await cancelled(never)
    await cancelled(task)
    assert len((await after).token_ids) == 4
    assert waiting.token_ids == [] and len(running.token_ids) < 2000


def grouped(model: Any, **options: Any) -> BatchDecoder:
    return BatchDecoder(model, eos_token_ids=[], seed=0, **options)


def asking(prompt_ids: list[int], max_tokens: int = 5) -> Request:
    return Request(prompt_ids=prompt_ids, sampling=Sampling(max_tokens=max_tokens))


PROMPT = [2 + i % 60 for i in range(40)]


def test_a_group_computes_its_prompt_once_and_a_turn_only_what_is_new(model):
    decoder = grouped(model)
    group = [asking(PROMPT) for _ in range(4)]
    late = asking(PROMPT)
    run(decoder, [group, [], [late]])
    assert [one.cached_tokens for one in [*group, late]] == [0, 39, 39, 39, 39]
    first = group[2]
    turn = asking([*first.prompt_ids, *first.token_ids, 7, 8, 9])
    run(decoder, [[turn]])
    assert turn.cached_tokens == len(PROMPT) + 4  # the token drawn last was not fed
    assert turn.log_probs == pytest.approx(log_probs_of(model, turn), abs=1e-5)


def test_new_weights_share_nothing_with_what_came_before(model):
    decoder = grouped(model)
    old, running = asking(PROMPT), asking(PROMPT, max_tokens=20)
    run(decoder, [[old]])
    decoder.admit([running])
    decoder.step()
    decoder.weights_changed()
    new = asking(PROMPT)
    run(decoder, [[], [], [new]])  # while `running` goes on with old keys and values
    assert (running.cached_tokens, new.cached_tokens) == (39, 0)
    decoder.admit([running := asking(PROMPT)])
    decoder.step()
    decoder.weights_changed()
    run(decoder, [])
    later = asking(PROMPT)
    run(decoder, [[later]])
    assert (running.cached_tokens, later.cached_tokens) == (39, 0)


def test_the_prefix_cache_keeps_what_was_used_last_within_its_bytes(model):
    of_one = 2 * 2 * 2 * 8 * 4 * 40  # layers, keys and values, heads, width, float32, tokens
    decoder = grouped(model, prefix_cache_bytes=2 * of_one)
    prompts = [[first, *PROMPT[1:]] for first in (3, 4, 5)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        run(decoder, [[asking(prompt, max_tokens=1)]])
    assert decoder.prefixes.used_bytes == 2 * of_one
    again = [asking(prompt, max_tokens=1) for prompt in prompts]
    run(decoder, [again])
    assert [one.cached_tokens for one in again] == [39, 0, 39]


def test_a_model_that_keeps_something_else_than_keys_and_values_is_refused_by_name():
    config = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match=r"model_type='mamba'.*rollout\.name=vllm"):
        grouped(MambaForCausalLM(config).eval())


def test_a_model_whose_attention_does_something_that_ours_does_not_is_refused_by_name():
    config = Gemma2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=1.0,
        attn_logit_softcapping=0.1,
    )
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"model_type='gemma2'"):
        grouped(Gemma2ForCausalLM(config).eval())


def test_a_sliding_window_hides_what_is_behind_it():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        sliding_window=6,
    )
    mistral: Any = MistralForCausalLM(config).eval()
    for deterministic in (False, True):
        requests = [asking(PROMPT, 10), asking([3, 4], 12), asking([*PROMPT, 5, 6, 7], 4)]
        run(grouped(mistral, deterministic=deterministic), [requests[:1], requests[1:]])
        for request in requests:
            assert request.log_probs == pytest.approx(log_probs_of(mistral, request), abs=1e-4)


def test_a_bfloat16_model_has_the_log_probs_of_the_model_asked_alone_in_float32(model):
    low: Any = copy.deepcopy(model).to(torch.bfloat16)
    requests = [asking(PROMPT, 10), asking([3, 4, 5], 10)]
    run(grouped(low), [requests])
    for request in requests:
        assert request.log_probs == pytest.approx(log_probs_of(low, request), abs=0.3)
        total = [f"{log_prob:.9g}" for log_prob in request.log_probs]
        assert any(float(text) != float(torch.tensor(float(text)).bfloat16()) for text in total)


async def test_aborted_requests_return_what_they_have_and_go_on_with_the_tokens_due(model):
    async def tokens(engine: AsyncDecoder, done: list[int], left: int) -> Request:
        sampling = Sampling(max_tokens=left, seed=9)
        return await engine.generate(Request(prompt_ids=[*PROMPT, *done], sampling=sampling))

    whole = await tokens(AsyncDecoder(grouped(model)), [], 200)
    engine = AsyncDecoder(grouped(model), max_requests=1)
    request = Request(prompt_ids=PROMPT, sampling=Sampling(max_tokens=200, seed=9))
    running = await decoding(engine, request)
    waiting = asyncio.create_task(tokens(engine, [], 200))
    await engine.run(lambda: None)
    assert len(await engine.abort_all()) == 2
    part, none = await running, await waiting
    assert (part.stop_reason, none.stop_reason, none.token_ids) == ("aborted", "aborted", [])
    assert 0 < len(part.token_ids) == len(part.log_probs) < 200
    rest = await tokens(engine, part.token_ids, 200 - len(part.token_ids))
    assert [*part.token_ids, *rest.token_ids] == whole.token_ids
    assert await engine.abort_all() == []

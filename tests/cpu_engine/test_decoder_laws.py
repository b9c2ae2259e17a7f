"""What holds for any mixture of requests, whenever they come and go."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from cpu_engine.decoder import BatchDecoder, Request
from cpu_engine.sampling import Sampling

VOCABULARY = 40
LONGEST = 70
"""Of a prompt: several blocks of the prefix cache, and more than a chunk of keys."""


def letters(token_ids: Sequence[int]) -> str:
    """A character a token."""
    return "".join(chr(ord("0") + token_id) for token_id in token_ids)


def tiny(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    model: Any = LlamaForCausalLM(config).eval()
    return model.to(dtype)


@dataclass(frozen=True)
class Turn:
    """What a trajectory adds to what came before, and how it is answered."""

    text: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Schedule:
    """Before each step: the trajectories that begin, those given up, and whether weights change."""

    begin: list[list[tuple[Turn, ...]]]
    give_up: list[int | None]
    sync: list[bool]


samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.0, 1.3]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    top_k=st.sampled_from([-1, -1, 0, 3]),
    stop_token_ids=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
    stop=st.lists(st.text("0123456789:", min_size=1, max_size=2), max_size=1).map(tuple),
    seed=st.integers(0, 2**63 - 1),
)
tokens = st.integers(0, VOCABULARY - 1)


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns of one trajectory; many begin alike, as those of a group do."""
    prompt = [(7 * i + draw(st.integers(0, 2))) % VOCABULARY for i in range(LONGEST)]
    prompt = prompt[: draw(st.integers(1, LONGEST))] + draw(st.lists(tokens, max_size=3))
    turns = [Turn(tuple(prompt), draw(samplings))]
    for _ in range(draw(st.integers(0, 2))):
        tool_text = draw(st.lists(tokens, max_size=30))
        turns.append(Turn(tuple(tool_text), draw(samplings)))
    return tuple(turns)


@st.composite
def schedules(draw: st.DrawFn, *, syncs: bool = True) -> Schedule:
    begin: list[list[tuple[Turn, ...]]] = []
    for _ in range(draw(st.integers(1, 6))):
        ones = draw(st.lists(trajectories(), max_size=3))
        if ones and draw(st.booleans()):  # a group
            twin = (replace(ones[0][0], sampling=draw(samplings)), *ones[0][1:])
            ones = [*ones, twin, twin]
        begin.append(ones)
        begin += [[]] * draw(st.integers(0, 8))
    each = len(begin)
    give_up = draw(st.lists(st.none() | st.integers(0, 9), min_size=each, max_size=each))
    sync = draw(st.lists(st.booleans(), min_size=each, max_size=each)) if syncs else [False] * each
    return Schedule(begin, give_up, sync)


@dataclass
class Played:
    """A trajectory so far."""

    turns: tuple[Turn, ...]
    requests: list[Request] = field(default_factory=list)

    def next_request(self) -> Request:
        before = self.requests[-1] if self.requests else None
        came = [*before.prompt_ids, *before.token_ids] if before else []
        turn = self.turns[len(self.requests)]
        self.requests.append(Request(prompt_ids=[*came, *turn.text], sampling=turn.sampling))
        return self.requests[-1]


def new_weights(model: LlamaForCausalLM, version: int) -> None:
    noise = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)


def play(model: LlamaForCausalLM, schedule: Schedule, **options: Any) -> list[Played]:
    """Decode all of a schedule; the weights are what they were afterwards."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoder = BatchDecoder(model, eos_token_ids=[1], seed=5, decode=letters, **options)
    played: list[Played] = []
    running: dict[int, Played] = {}
    step = 0
    while step < len(schedule.begin) or len(decoder):
        new: list[Request] = []
        if step < len(schedule.begin):
            if schedule.sync[step]:
                new_weights(model, step)
                decoder.weights_changed()
            give_up = schedule.give_up[step]
            if give_up is not None and give_up < len(played):
                decoder.drop(played[give_up].requests[-1:])
                running.pop(id(played[give_up].requests[-1]), None)
            for turns in schedule.begin[step]:
                played.append(Played(turns))
                new.append(played[-1].next_request())
                running[id(new[-1])] = played[-1]
        decoder.admit(new)
        for request in decoder.step() if len(decoder) else []:
            one = running.pop(id(request))
            if len(one.requests) < len(one.turns):
                again = one.next_request()
                running[id(again)] = one
                decoder.admit([again])
        step += 1
    model.load_state_dict(weights)
    return played


def requests_of(played: list[Played]) -> Iterator[Request]:
    for one in played:
        yield from one.requests


@pytest.fixture(scope="module")
def exact_model() -> LlamaForCausalLM:
    """In float64: rounding does not decide which token is drawn."""
    return tiny(torch.float64)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny(torch.float32)


@pytest.mark.slow
@given(schedules(), st.sampled_from([1 << 30, 40_000]))
def test_sharing_prefixes_changes_no_token_and_no_log_prob(exact_model, schedule, size_bytes):
    shared = play(exact_model, schedule, prefix_cache_bytes=size_bytes)
    plain = play(exact_model, schedule, prefix_cache_bytes=0)
    for one, other in zip(requests_of(shared), requests_of(plain), strict=True):
        assert (one.token_ids, one.stop_reason) == (other.token_ids, other.stop_reason)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert other.cached_tokens == 0


@pytest.mark.slow
@settings(max_examples=20)
@given(schedules(syncs=False), st.sampled_from([1 << 30, 0, 40_000]), st.sampled_from([50, 8192]))
def test_deterministic_decoding_gives_the_same_bits_in_any_company(
    model, schedule, size_bytes, budget
):
    options = {"deterministic": True, "max_batched_tokens": budget}
    together = play(model, schedule, prefix_cache_bytes=size_bytes, **options)
    for request in requests_of(together):
        if request.stop_reason is None:
            continue  # given up
        alone = Request(prompt_ids=request.prompt_ids, sampling=request.sampling)
        decoder = BatchDecoder(
            model,
            eos_token_ids=[1],
            seed=0,
            decode=letters,
            prefix_cache_bytes=0,
            deterministic=True,
        )
        decoder.admit([alone])
        while len(decoder):
            decoder.step()
        assert (alone.token_ids, alone.log_probs) == (request.token_ids, request.log_probs)


@pytest.mark.slow
@settings(max_examples=20)
@given(schedules(syncs=False), st.sampled_from([1, 100, 8192]))
def test_a_request_depends_on_its_seed_and_not_on_when_others_come(exact_model, schedule, budget):
    at_once = Schedule(
        [[turns for turns_of_step in schedule.begin for turns in turns_of_step]], [None], [False]
    )
    scattered = Schedule(schedule.begin, [None] * len(schedule.begin), schedule.sync)
    one = play(exact_model, at_once, max_batched_tokens=budget)
    other = play(exact_model, scattered)
    for a, b in zip(requests_of(one), requests_of(other), strict=True):
        assert a.token_ids == b.token_ids
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)

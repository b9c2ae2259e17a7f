"""Continuous batching for a Hugging Face causal LM on a CPU: pure torch, no verl, no Ray.

Requests come and go between steps. In a step each gets one token: the prompts of new ones and the
last tokens of running ones go through the model together, without padding. What a new prompt shares
with a sequence that was or is being decoded is not computed again. Every request has its own
temperature, top_p, top_k, budget, stop tokens, stop strings and seed; its random numbers depend on
nothing else. Log-probs are those of the distribution sampled from.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from agent_loop.cpu.attention import NAME, Chunk, Pass
from agent_loop.cpu.key_values import Known, PrefixCache, Slots
from agent_loop.cpu.sampling import Sampling, draw, process_logits, uniforms
from agent_loop.cpu.stop_strings import StopStrings
from agent_loop.seeds import seed_from

_log = logging.getLogger(__name__)

_TILE = 32
"""Tokens in every pass where results may not depend on company."""

_STATE = np.dtype(
    [
        ("next_id", np.int64),  # the token that is fed next
        ("length", np.int64),  # tokens whose keys and values are there
        ("prompt_length", np.int64),
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
    ]
)


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence being decoded."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: Literal["completed", "length", "aborted"] | None = None
    """None while it runs."""

    cached_tokens: int = 0
    """How much of the prompt was not computed, but shared with another sequence."""


@dataclass(eq=False, slots=True)
class _Row:
    """A running request; its place in the list of rows is its slot."""

    request: Request
    known: Known
    version: int
    """Of the weights that it began with."""

    source: Known | None
    """What its prompt shares a prefix with."""

    shared: int


class BatchDecoder:
    """Decodes a changing set of requests, one token each per `step`.

    Not thread-safe: its owner calls it from one thread at a time. The model's attention is set to
    `agent_loop.cpu.attention`, which elsewhere does what transformers' `sdpa` does.

    Args:
        model: a causal LM of transformers, whose layers attend to all that came before or to a
            window of it.
        eos_token_ids: every request ends after one of these.
        seed: what the seeds of requests without one are made of.
        raw_log_probs: report those of the unscaled model instead.
        decode: text of token ids, special ones included; None refuses stop strings.
        prefix_cache_bytes: what finished sequences may take so that others share their beginning; 0
            shares nothing.
        deterministic: tokens and log-probs of a request are the same bit by bit whatever is
            decoded beside it and however it is batched. Slower.
        max_batched_tokens: new prompts wait where a pass would have more tokens.

    Raises:
        ValueError: the model cannot be decoded so.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        raw_log_probs: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        prefix_cache_bytes: int = 256 << 20,
        deterministic: bool = False,
        max_batched_tokens: int = 8192,
    ) -> None:
        self.model = model
        self.eos_token_ids = frozenset(eos_token_ids)
        self.raw_log_probs = raw_log_probs
        self.prefixes = PrefixCache(prefix_cache_bytes)
        self._max_batched_tokens = max_batched_tokens
        self._stop_strings = None if decode is None else StopStrings(decode)
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._state = np.zeros(16, _STATE)
        self._version = 0
        self.reseed(seed)
        self._slots = _slots_for(model)
        self._tile: int | None = None
        _check_attention(model, self._slots)
        if deterministic:
            self._tile = _TILE if self._is_invariant(_TILE) else 1

    def __len__(self) -> int:
        return len(self._rows) + len(self._waiting)

    def reseed(self, seed: int) -> None:
        """Start the seeds of requests without one of their own anew."""
        self._seed, self._unseeded = seed, 0

    def weights_changed(self) -> None:
        """Share nothing that was computed until now. Running requests go on with what they have."""
        self.prefixes.clear()
        self._version += 1

    def free_memory(self) -> None:
        """Give back the memory of sequences, if none is being decoded."""
        self.prefixes.clear()
        if not self._rows:
            self._slots.clear()

    def check(self, request: Request) -> None:
        """Raises `ValueError` for a request that cannot be decoded here."""
        if not request.prompt_ids:
            raise ValueError("cannot decode an empty prompt: give at least one token id")
        if request.sampling.stop and self._stop_strings is None:
            raise ValueError(
                f"cannot stop at stop={request.sampling.stop!r}: this decoder knows no texts; "
                "give it the tokenizer's `decode`"
            )

    def admit(self, requests: Sequence[Request]) -> None:
        """Let requests take part from the next step on.

        Raises:
            ValueError: see `check`; nothing was admitted.
        """
        for request in requests:
            self.check(request)
        self._waiting.extend(requests)

    @torch.inference_mode()
    def drop(self, requests: Sequence[Request]) -> None:
        """Forget requests."""
        gone = {id(request) for request in requests}
        if gone:
            self._waiting = deque(each for each in self._waiting if id(each) not in gone)
            self._leave([i for i, row in enumerate(self._rows) if id(row.request) in gone])

    def drop_all(self) -> None:
        """Forget every request, and all that was computed."""
        self._waiting.clear()
        self._rows = []
        self.prefixes.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One token for every request.

        Returns:
            The requests that finished with this token.
        """
        assert len(self), "step() needs a request"
        copies = self._begin()
        logits = self._pass_together(copies) if self._tile is None else self._pass_alone(copies)
        return self._sample(logits)

    def _begin(self) -> list[tuple[int, int, int]]:
        """Give waiting requests a slot each.

        Returns:
            (source slot, target slot, tokens) of prefixes that the next pass has to copy.
        """
        budget = self._max_batched_tokens - len(self._rows)
        begun: list[_Row] = []
        while self._waiting:
            prompt_ids = list(self._waiting[0].prompt_ids)
            # The last token is always computed: the next one is sampled from its logits.
            source, shared = self.prefixes.longest(prompt_ids, len(prompt_ids) - 1)
            budget -= len(prompt_ids) - shared
            if budget < 0 and (begun or self._rows):
                break
            request = self._waiting.popleft()
            request.cached_tokens = shared
            row = _Row(request, Known(prompt_ids), self._version, source, shared)
            self.prefixes.add(row.known)
            begun.append(row)
        if not begun:
            return []

        def new_tokens(row: _Row) -> int:
            return len(row.known.token_ids) - row.shared

        in_order = begun
        if self._tile is None:  # `Pass` wants those with one new token first
            begun = sorted(begun, key=lambda row: new_tokens(row) > 1)
        for row in begun:
            row.known.slot = len(self._rows)
            self._rows.append(row)
        longest = max(len(row.known.token_ids) for row in begun)
        self._slots.make_room(len(self._rows), longest)
        if len(self._rows) > len(self._state):
            self._state = np.resize(self._state, len(self._rows) * 2)
        copies: list[tuple[int, int, int]] = []
        for row in in_order:
            slot, source = row.known.slot, row.source
            assert slot is not None
            sampling = row.request.sampling
            self._state[slot] = (
                row.known.token_ids[-1],
                row.shared,
                len(row.known.token_ids),
                self._seed_for(sampling),
                sampling.top_k,
                sampling.temperature,
                sampling.top_p,
            )
            if source is not None and source.stored is not None:
                self._slots.fill(slot, source.stored[:, :, :, : row.shared])
            elif source is not None:
                assert source.slot is not None
                copies.append((source.slot, slot, row.shared))
            row.source = None
        return copies

    def _seed_for(self, sampling: Sampling) -> int:
        if sampling.seed is not None:
            return seed_from(sampling.seed)
        self._unseeded += 1
        return seed_from(self._seed, self._unseeded)

    def _pass_together(self, copies: list[tuple[int, int, int]]) -> torch.Tensor:
        """(B, V): feed all new tokens at once; logits after the last one of each row."""
        state = self._state[: len(self._rows)]
        starts, ends = state["length"], np.maximum(state["prompt_length"], state["length"] + 1)
        self._slots.make_room(len(state), int(ends.max()))
        several = np.flatnonzero(ends - starts > 1)
        singles = int(several[0]) if several.size else len(state)
        ids, places = [state["next_id"][:singles]], [starts[:singles]]
        slots, last = np.arange(len(state)), np.arange(len(state))
        chunks: list[Chunk] = []
        if several.size:
            counts = ends - starts
            slots, last = slots.repeat(counts), counts.cumsum() - 1
            for slot, start, end in zip(several, starts[several], ends[several], strict=True):
                chunks.append(Chunk(int(slot), int(start), int(end - start)))
                ids.append(np.array(self._rows[slot].known.token_ids[start:end]))
                places.append(np.arange(start, end))
        batch = Pass(
            buffer=self._slots.buffer,
            slots=torch.from_numpy(slots),
            places=torch.from_numpy(np.concatenate(places)),
            copies=copies,
            singles=singles,
            chunks=chunks,
        )
        logits = _logits(self.model, np.concatenate(ids), batch, torch.from_numpy(last))
        state["length"] = ends
        return logits

    def _pass_alone(self, copies: list[tuple[int, int, int]]) -> torch.Tensor:
        """The same in passes of one size, `self._tile`, with the bits that each row has alone."""
        assert self._tile is not None
        state = self._state[: len(self._rows)]
        starts, ends = state["length"], np.maximum(state["prompt_length"], state["length"] + 1)
        self._slots.make_room(len(state), int(ends.max()))
        counts = ends - starts
        slots, last = np.arange(len(state)).repeat(counts), counts.cumsum() - 1
        places = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        ids = np.concatenate(
            [
                self._rows[slot].known.token_ids[start:end] if end - start > 1 else [next_id]
                for slot, (start, end, next_id) in enumerate(
                    zip(starts, ends, state["next_id"], strict=True)
                )
            ]
        )
        first = dict(zip(range(len(state)), last - counts + 1, strict=True))
        found: list[torch.Tensor] = []
        for begin in range(0, len(ids), self._tile):
            kept = min(self._tile, len(ids) - begin)
            part, fill = slice(begin, begin + kept), (0, self._tile - kept)
            batch = Pass(
                buffer=self._slots.buffer,
                slots=torch.from_numpy(np.pad(slots[part], fill)),
                places=torch.from_numpy(np.pad(places[part], fill)),
                # In the pass with the first token of who needs it: the source is before it.
                copies=[each for each in copies if begin <= first[each[1]] < begin + kept],
                alone=True,
                kept=kept,
            )
            logits = _logits(self.model, np.pad(ids[part], fill), batch, torch.arange(self._tile))
            wanted = last[(last >= begin) & (last < begin + kept)] - begin
            found.append(logits[torch.from_numpy(wanted)])
        state["length"] = ends
        return torch.cat(found)

    def _sample(self, logits: torch.Tensor) -> list[Request]:
        """Give each row its next token; take finished rows out."""
        state = self._state[: len(self._rows)]
        temperature = torch.from_numpy(state["temperature"])
        processed = process_logits(
            logits, temperature, torch.from_numpy(state["top_k"]), torch.from_numpy(state["top_p"])
        )
        uniform = torch.from_numpy(uniforms(state["seed"], state["length"]))
        chosen, log_probs = draw(processed, temperature == 0, uniform)
        if self.raw_log_probs:
            raw = logits.float().log_softmax(dim=1)
            log_probs = raw.gather(1, chosen.unsqueeze(1)).squeeze(1)
        state["next_id"] = chosen.numpy()

        finished: list[int] = []
        for slot, (row, token_id, log_prob) in enumerate(
            zip(self._rows, chosen.tolist(), log_probs.tolist(), strict=True)
        ):
            request = row.request
            request.token_ids.append(token_id)
            request.log_probs.append(log_prob)
            if self._is_stopped(request):
                request.stop_reason = "completed"
            elif len(request.token_ids) >= request.sampling.max_tokens:
                request.stop_reason = "length"
            if request.stop_reason is not None:
                finished.append(slot)
        requests = [self._rows[slot].request for slot in finished]
        for slot in finished:
            self._remember(slot)
        self._leave(finished)
        return requests

    def _is_stopped(self, request: Request) -> bool:
        """Whether its newest token ends it."""
        newest, sampling = request.token_ids[-1], request.sampling
        if newest in self.eos_token_ids or newest in sampling.stop_token_ids:
            return True
        strings = self._stop_strings
        if not sampling.stop or strings is None:
            return False
        return strings.completed(request.token_ids, sampling.stop)

    def _remember(self, slot: int) -> None:
        """Keep what a finished row computed, if others may share it."""
        row = self._rows[slot]
        if row.version == self._version and self.prefixes.size_bytes:
            length = int(self._state["length"][slot])
            # The token sampled last was not fed: its keys and values do not exist.
            row.known.token_ids = [*row.known.token_ids, *row.request.token_ids[:-1]]
            assert len(row.known.token_ids) == length
            self.prefixes.store(row.known, self._slots.copied(slot, length))

    def _leave(self, slots: Sequence[int]) -> None:
        """Take rows out; the last ones move into their slots."""
        for slot in sorted(slots, reverse=True):
            gone, moved = self._rows[slot], self._rows.pop()
            if gone.known.stored is None:
                self.prefixes.remove(gone.known)
            if moved is not gone:
                last = len(self._rows)
                self._slots.move(last, slot, int(self._state["length"][last]))
                self._state[slot] = self._state[last]
                self._rows[slot], moved.known.slot = moved, slot

    def _is_invariant(self, tile: int) -> bool:
        """Whether this machine's matrix products give a row the same bits at every place of a tile
        and beside any other rows."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = np.random.default_rng(0).integers(0, vocabulary, (3, tile))
        ids[1] = np.roll(ids[0], tile // 2 + 1)
        ids[2, 0] = ids[0, 0]
        found: list[torch.Tensor] = []
        for row in ids:
            self._slots.make_room(tile, 1)
            slots, places = torch.arange(tile), torch.zeros(tile, dtype=torch.long)
            batch = Pass(
                buffer=self._slots.buffer, slots=slots, places=places, copies=[], alone=True
            )
            with torch.inference_mode():
                found.append(_logits(self.model, row, batch, slots))
        first, rolled, other = found
        if torch.equal(first.roll(tile // 2 + 1, 0), rolled) and torch.equal(first[0], other[0]):
            return True
        _log.warning("tile=%d gives other bits beside other rows; decoding one token a pass", tile)
        return False


def _logits(
    model: Any, token_ids: npt.NDArray[np.int64], batch: Pass, wanted: torch.Tensor
) -> torch.Tensor:
    """(len(wanted), V): one pass of new tokens, (T,), through the model."""
    return model(
        input_ids=torch.from_numpy(token_ids).unsqueeze(0),
        # Of four dimensions: transformers takes it as it is. `attend` does not look at it.
        attention_mask=torch.empty((1, 1, 0, 0)),
        position_ids=batch.places.unsqueeze(0),
        use_cache=False,
        logits_to_keep=wanted,
        decoding=batch,
    ).logits[0]


def _slots_for(model: Any) -> Slots:
    """Room for the keys and values of a model, with its attention set to ours.

    Raises:
        ValueError: see `BatchDecoder`.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown or config.is_encoder_decoder or not model._supports_attention_backend:
        raise ValueError(
            f"cannot decode model_type={config.model_type!r} with layer_types={unknown}: its "
            "layers keep something else than keys and values, or fix their attention; set "
            "actor_rollout_ref.rollout.name=vllm"
        )
    model.set_attn_implementation(NAME)
    heads = config.num_attention_heads
    return Slots(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
    )


@torch.inference_mode()
def _check_attention(model: Any, slots: Slots) -> None:
    """See that a model decoded in two passes says what it says in one by itself.

    Raises:
        ValueError: it does not: there is something in its attention that ours lacks.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = np.random.default_rng(0).integers(0, vocabulary, 9)
    slots.make_room(1, len(ids))
    zeros = torch.zeros(1, dtype=torch.long)
    first = Pass(
        buffer=slots.buffer,
        slots=zeros.expand(8),
        places=torch.arange(8),
        copies=[],
        chunks=[Chunk(0, 0, 8)],
    )
    second = Pass(buffer=slots.buffer, slots=zeros, places=zeros + 8, copies=[], singles=1)
    try:
        _logits(model, ids[:8], first, zeros + 7)
        ours = _logits(model, ids[8:], second, zeros)[0].float()
        theirs = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, -1].float()
        off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        cause = f"decoded step by step its logits are off by {off:.1e}"
    except (RuntimeError, TypeError, ValueError) as error:
        off, cause = float("inf"), f"{type(error).__name__}: {error}"
    if not off < (1e-3 if model.dtype == torch.float32 else 5e-2):
        raise ValueError(
            f"cannot decode model_type={model.config.model_type!r}: {cause}; set "
            "actor_rollout_ref.rollout.name=vllm"
        )


T = TypeVar("T")


class AsyncDecoder:
    """Lets coroutines share one `BatchDecoder`: each awaits its own request.

    One thread owns model and decoder, so what `run` does falls between decode steps.

    Args:
        decoder: used by nobody else.
        max_requests: decoded at once; further ones wait.
    """

    def __init__(self, decoder: BatchDecoder, max_requests: int = 256) -> None:
        self._decoder, self._max_requests = decoder, max_requests
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._waiting: list[_Awaited] = []
        self._running: dict[int, _Awaited] = {}  # by the request's id
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Request:
        """Decode a request to its end and return it; cancelled, it is dropped at the next step.

        Raises:
            ValueError: the decoder cannot decode it (see `BatchDecoder.check`).
            RuntimeError: decoding failed; every request under way fails with it.
        """
        self._decoder.check(request)
        future: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Awaited(request, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._decode())
        return await future

    async def run(self, work: Callable[[], T]) -> T:
        """Do something with the model while no step is under way."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def abort_all(self) -> list[Request]:
        """End every request after the step that is under way: whoever awaits one is given what
        there is of it, with `stop_reason="aborted"`.

        Returns:
            Those that were not finished.
        """
        under_way = [*self._running.values(), *self._waiting]
        self._waiting = []
        await self.run(lambda: self._decoder.drop([each.request for each in under_way]))
        aborted: list[Request] = []
        for request, future in under_way:
            self._running.pop(id(request), None)
            if not future.done():
                request.stop_reason = "aborted"
                future.set_result(request)
                aborted.append(request)
        return aborted

    async def _decode(self) -> None:
        """Drop, admit, step, deliver, until nothing waits or runs."""
        try:
            while self._waiting or self._running:
                gone, new = self._take_out_cancelled(), self._take_in_waiting()
                for request in await self.run(partial(self._advance, gone, new)):
                    future = self._running.pop(id(request)).future
                    if not future.done():
                        future.set_result(request)
        except Exception as error:
            # Whoever waits must learn of it, or the step waits for ever.
            futures = [awaited.future for awaited in [*self._waiting, *self._running.values()]]
            self._waiting, self._running = [], {}
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeError(f"decoding failed: {error}"))
            await self.run(self._decoder.drop_all)
            raise

    def _take_out_cancelled(self) -> list[Request]:
        """Forget whom nobody awaits any more; returns those of them that the decoder knows."""
        self._waiting = [awaited for awaited in self._waiting if not awaited.future.done()]
        gone = [awaited.request for awaited in self._running.values() if awaited.future.done()]
        for request in gone:
            del self._running[id(request)]
        return gone

    def _take_in_waiting(self) -> list[Request]:
        room = max(0, self._max_requests - len(self._running))
        new, self._waiting = self._waiting[:room], self._waiting[room:]
        self._running |= {id(awaited.request): awaited for awaited in new}
        return [awaited.request for awaited in new]

    def _advance(self, gone: list[Request], new: list[Request]) -> list[Request]:
        self._decoder.drop(gone)
        self._decoder.admit(new)
        return self._decoder.step() if len(self._decoder) else []


class _Awaited(NamedTuple):
    """A request and who awaits it; a future that is done before it is one that was cancelled."""

    request: Request
    future: "asyncio.Future[Request]"


__all__ = ["AsyncDecoder", "BatchDecoder", "Request", "Sampling"]

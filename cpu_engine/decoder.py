"""Continuous batching for a Hugging Face causal LM on a CPU: pure torch, no verl, no Ray.

Requests are added and removed between steps. In a step every request gets one token: the prompts of
new requests and the last tokens of running ones go through the model together, without padding. A
prefix that a new prompt shares with another sequence is not computed again. Every request has its
own temperature, top_p, top_k, budget, stop tokens, stop strings and seed; its random numbers depend
on its seed only. Log-probs are of the distribution that is sampled from.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from cpu_engine.attention import Chunk, Pass
from cpu_engine.key_values import CachedSequence, PrefixCache
from cpu_engine.model_pass import check_attention, logits_of, slots_for
from cpu_engine.sampling import Sampling, draw, process_logits, uniforms
from cpu_engine.seeds import seed_from
from cpu_engine.stop_strings import StopStrings

_log = logging.getLogger(__name__)

_TILE = 32
"""Tokens in every pass of deterministic decoding."""

_STATE = np.dtype(
    [
        ("next_id", np.int64),  # the token that the model gets next
        ("length", np.int64),  # tokens whose keys and values are computed
        ("prompt_length", np.int64),
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
    ]
)


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence being decoded: each step adds a token id and its log-prob."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: Literal["completed", "length", "aborted"] | None = None
    """None while it runs."""

    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were copied from another sequence."""


@dataclass(eq=False, slots=True)
class _Row:
    """A running request; its index in the list of rows is its slot."""

    request: Request
    sequence: CachedSequence
    version: int
    """Version of the weights when the request began."""

    source: CachedSequence | None
    """Sequence with which its prompt shares a prefix."""

    shared: int
    """Tokens of that prefix."""


class BatchDecoder:
    """Decodes a changing set of requests, one token each per `step`.

    Not thread-safe: only one thread at a time may call it. The model's attention is set to
    `cpu_engine.attention`, which does the same as transformers' `sdpa` outside this class.

    Args:
        model: a causal LM of transformers, whose layers attend to all earlier tokens or to a
            window of them.
        eos_token_ids: every request ends after one of these.
        seed: gives the seeds of requests that have none.
        raw_log_probs: report log-probs of the unscaled model instead.
        decode: text of token ids, with special tokens; without it stop strings are refused.
        prefix_cache_bytes: memory for finished sequences, whose prefixes new ones can share; with 0
            nothing is shared, not even between running sequences.
        deterministic: tokens and log-probs of a request are the same, bit by bit, with any other
            requests beside it. Slower.
        max_batched_tokens: new prompts wait if a pass would have more tokens.

    Raises:
        ValueError: this class cannot decode the model.
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
        self._slots = slots_for(model)
        self._tile: int | None = None
        check_attention(model, self._slots)
        if deterministic:
            self._tile = _TILE if self._is_invariant(_TILE) else 1

    def __len__(self) -> int:
        return len(self._rows) + len(self._waiting)

    def reseed(self, seed: int) -> None:
        """Restart the seeds of requests that have none."""
        self._seed, self._unseeded = seed, 0

    def weights_changed(self) -> None:
        """Forget all stored prefixes. Running requests keep their keys and values."""
        self.prefixes.clear()
        self._version += 1

    def free_memory(self) -> None:
        """Free the prefix cache, and the slots if no request is running."""
        self.prefixes.clear()
        if not self._rows:
            self._slots.clear()

    def check(self, request: Request) -> None:
        """Raise `ValueError` for a request that cannot be decoded."""
        if not request.prompt_ids:
            raise ValueError("cannot decode an empty prompt: give at least one token id")
        if request.sampling.stop and self._stop_strings is None:
            raise ValueError(
                f"cannot stop at stop={request.sampling.stop!r}: this decoder has no tokenizer; "
                "pass the tokenizer's `decode`"
            )

    def admit(self, requests: Sequence[Request]) -> None:
        """Decode requests from the next step on; none of them if `check` refuses one."""
        for request in requests:
            self.check(request)
        self._waiting.extend(requests)

    @torch.inference_mode()
    def drop(self, requests: Sequence[Request]) -> None:
        gone = {id(request) for request in requests}
        if gone:
            self._waiting = deque(each for each in self._waiting if id(each) not in gone)
            self._remove_rows([i for i, row in enumerate(self._rows) if id(row.request) in gone])

    def drop_all(self) -> None:
        """Forget all requests and all stored prefixes."""
        self._waiting.clear()
        self._rows = []
        self.prefixes.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Sample one token for every request, and return those that finished with this token."""
        assert len(self), "step() needs a request"
        copies = self._start_waiting()
        logits = self._pass_batched(copies) if self._tile is None else self._pass_invariant(copies)
        return self._sample(logits)

    def _start_waiting(self) -> list[tuple[int, int, int]]:
        """Give a slot to each waiting request, as many as `max_batched_tokens` allows, and return
        the `Pass.copies` of their prefixes."""
        budget = self._max_batched_tokens - len(self._rows)
        begun: list[_Row] = []
        while self._waiting:
            prompt_ids = list(self._waiting[0].prompt_ids)
            # The last token is always computed, because the next is sampled from its logits.
            source, shared = self.prefixes.longest_prefix(prompt_ids, len(prompt_ids) - 1)
            budget -= len(prompt_ids) - shared
            if budget < 0 and (begun or self._rows):
                break
            request = self._waiting.popleft()
            request.cached_tokens = shared
            row = _Row(request, CachedSequence(prompt_ids), self._version, source, shared)
            self.prefixes.add(row.sequence)
            begun.append(row)
        if not begun:
            return []
        in_order = begun
        if self._tile is None:  # `Pass` wants those with one new token first
            begun = sorted(begun, key=lambda row: len(row.sequence.token_ids) - row.shared > 1)
        for row in begun:
            row.sequence.slot = len(self._rows)
            self._rows.append(row)
        longest = max(len(row.sequence.token_ids) for row in begun)
        self._slots.make_room(len(self._rows), longest)
        if len(self._rows) > len(self._state):
            self._state = np.resize(self._state, len(self._rows) * 2)
        copies: list[tuple[int, int, int]] = []
        for row in in_order:
            slot, source = row.sequence.slot, row.source
            assert slot is not None
            sampling = row.request.sampling
            self._state[slot] = (
                row.sequence.token_ids[-1],
                row.shared,
                len(row.sequence.token_ids),
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

    def _new_tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B,) state of the rows; (B,) first place and (B,) end of their new tokens, with room."""
        state = self._state[: len(self._rows)]
        ends = np.maximum(state["prompt_length"], state["length"] + 1)
        self._slots.make_room(len(state), int(ends.max()))
        return state, state["length"], ends

    def _pass_batched(self, copies: list[tuple[int, int, int]]) -> torch.Tensor:
        """(B, V): logits after the last token of each row, from one pass of all new tokens."""
        state, starts, ends = self._new_tokens()
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
                ids.append(np.array(self._rows[slot].sequence.token_ids[start:end]))
                places.append(np.arange(start, end))
        batch = Pass(
            buffer=self._slots.buffer,
            slots=torch.from_numpy(slots),
            places=torch.from_numpy(np.concatenate(places)),
            copies=copies,
            singles=singles,
            chunks=chunks,
        )
        logits = logits_of(self.model, np.concatenate(ids), batch, torch.from_numpy(last))
        state["length"] = ends
        return logits

    def _pass_invariant(self, copies: list[tuple[int, int, int]]) -> torch.Tensor:
        """(B, V): the same from passes of `self._tile` tokens, whose other rows change no bit."""
        assert self._tile is not None
        state, starts, ends = self._new_tokens()
        counts = ends - starts
        slots, last = np.arange(len(state)).repeat(counts), counts.cumsum() - 1
        places = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        ids = np.concatenate(
            [
                self._rows[slot].sequence.token_ids[start:end] if end - start > 1 else [next_id]
                for slot, (start, end, next_id) in enumerate(
                    zip(starts, ends, state["next_id"], strict=True)
                )
            ]
        )
        first = dict(zip(range(len(state)), last - counts + 1, strict=True))
        parts: list[torch.Tensor] = []
        for begin in range(0, len(ids), self._tile):
            kept = min(self._tile, len(ids) - begin)
            part, fill = slice(begin, begin + kept), (0, self._tile - kept)
            batch = Pass(
                buffer=self._slots.buffer,
                slots=torch.from_numpy(np.pad(slots[part], fill)),
                places=torch.from_numpy(np.pad(places[part], fill)),
                # A prefix is copied in the pass with the first token of its target: passes before
                # that one have computed the source.
                copies=[each for each in copies if begin <= first[each[1]] < begin + kept],
                invariant=True,
                kept=kept,
            )
            logits = logits_of(self.model, np.pad(ids[part], fill), batch, torch.arange(self._tile))
            wanted = last[(last >= begin) & (last < begin + kept)] - begin
            parts.append(logits[torch.from_numpy(wanted)])
        state["length"] = ends
        return torch.cat(parts)

    def _sample(self, logits: torch.Tensor) -> list[Request]:
        """Sample the next token of each row, and remove finished rows."""
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
            self._store_prefix(slot)
        self._remove_rows(finished)
        return requests

    def _is_stopped(self, request: Request) -> bool:
        newest, sampling = request.token_ids[-1], request.sampling
        if newest in self.eos_token_ids or newest in sampling.stop_token_ids:
            return True
        strings = self._stop_strings
        if not sampling.stop or strings is None:
            return False
        return strings.completed(request.token_ids, sampling.stop)

    def _store_prefix(self, slot: int) -> None:
        """Store keys and values of a finished row, unless the weights changed meanwhile."""
        row = self._rows[slot]
        if row.version == self._version and self.prefixes.size_bytes:
            length = int(self._state["length"][slot])
            # The token sampled last has not gone through the model: it has no keys and values.
            row.sequence.token_ids = [*row.sequence.token_ids, *row.request.token_ids[:-1]]
            assert len(row.sequence.token_ids) == length
            self.prefixes.store(row.sequence, self._slots.copied(slot, length))

    def _remove_rows(self, slots: Sequence[int]) -> None:
        """Remove rows. The last rows move into the free slots."""
        for slot in sorted(slots, reverse=True):
            gone, moved = self._rows[slot], self._rows.pop()
            if gone.sequence.stored is None:
                self.prefixes.remove(gone.sequence)
            if moved is not gone:
                last = len(self._rows)
                self._slots.move(last, slot, int(self._state["length"][last]))
                self._state[slot] = self._state[last]
                self._rows[slot], moved.sequence.slot = moved, slot

    def _is_invariant(self, tile: int) -> bool:
        """Whether matrix products of this machine give a row the same bits at every place of a
        tile, and beside any other rows."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = np.random.default_rng(0).integers(0, vocabulary, (3, tile))
        ids[1] = np.roll(ids[0], tile // 2 + 1)
        ids[2, 0] = ids[0, 0]
        parts: list[torch.Tensor] = []
        for row in ids:
            self._slots.make_room(tile, 1)
            slots, places = torch.arange(tile), torch.zeros(tile, dtype=torch.long)
            batch = Pass(
                buffer=self._slots.buffer, slots=slots, places=places, copies=[], invariant=True
            )
            with torch.inference_mode():
                parts.append(logits_of(self.model, row, batch, slots))
        first, rolled, other = parts
        if torch.equal(first.roll(tile // 2 + 1, 0), rolled) and torch.equal(first[0], other[0]):
            return True
        _log.warning("tile=%d: bits depend on the other rows; decoding one token a pass", tile)
        return False

"""Continuous batching for a Hugging Face causal LM on a CPU: pure torch, no verl, no Ray.

New requests are admitted between decode steps: they are prefilled together and their key-value
cache is laid beside the running one, padded on the left. Every request has its own temperature,
top_p, top_k, budget, stop tokens, stop strings and, if it wants, seed. Log-probs are those of the
distribution sampled from.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from transformers.cache_utils import DynamicCache

_BROKEN = "\ufffd"
"""What bytes decode to that are no whole character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request samples; vLLM's names and meanings."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; its log-prob is the unscaled model's."""

    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: all tokens."""

    stop_token_ids: frozenset[int] = frozenset()
    """Sampling ends after one of these, which stays in the output; the end-of-sequence ids too."""

    stop: tuple[str, ...] = ()
    """Sampling ends after the token that completes one of these in the generated text. The token
    stays in the output whole, as with vLLM's `include_stop_str_in_output=True`."""

    seed: int | None = None
    """Makes this request's tokens independent of what else is in the batch."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be >= 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
        for text in self.stop:
            if not isinstance(text, str) or not text or _BROKEN in text:
                raise ValueError(f"stop={self.stop!r} must hold texts: not empty, without U+FFFD")


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence being decoded."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: Literal["completed", "length"] | None = None
    """None while it runs."""

    generator: torch.Generator | None = None


class StopStrings:
    """Sees which token completes a stop string, without decoding all that came before it.

    Says what decoding the whole output after every token would, as long as a token's bytes are the
    same in any company. So they are in byte-level BPE; at most the first token of what is decoded
    may look otherwise, as where a tokenizer drops a leading space.

    Args:
        decode: text of token ids, special ones included.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._own: dict[int, str] = {}

    def completed(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the newest token completes a stop string; those before it completed none."""
        newest = self._text(token_ids[-1])
        if not any(_may_end(newest, text[-1]) for text in stop):
            return False
        # Every token with a text holds a byte of it at least; one more, for it may look otherwise.
        needed = 1 + max(len(text.encode(errors="surrogatepass")) for text in stop)
        start = len(token_ids)
        while start and needed:
            start -= 1
            needed -= bool(self._text(token_ids[start]))
        tail = self._decode(token_ids[start:])
        return any(text in tail for text in stop)

    def _text(self, token_id: int) -> str:
        """What a token looks like: twice, as a first one and as a later one."""
        if token_id not in self._own:
            self._own[token_id] = self._decode([token_id, token_id])
        return self._own[token_id]


def _may_end(token_text: str, character: str) -> bool:
    """Whether a token may hold the last byte of a character."""
    return character in token_text or (not character.isascii() and _BROKEN in token_text)


def process_logits(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Log-probs of the distribution that is sampled from.

    Args:
        logits: (B, V).
        temperature: (B,); rows with 0 are left unscaled.
        top_k: (B,), values < 1 keep all tokens.
        top_p: (B,) in (0, 1]; the smallest set of tokens whose mass reaches it is kept.

    Returns:
        (B, V) log-probs, -inf where a token is filtered out.
    """
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    vocabulary = scaled.shape[1]
    if bool((top_k > 0).any()):
        kept = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
        ordered = scaled.sort(dim=1, descending=True).values
        scaled = scaled.masked_fill(scaled < ordered.gather(1, (kept - 1).unsqueeze(1)), -torch.inf)
    if bool((top_p < 1).any()):
        ordered, order = scaled.sort(dim=1, descending=True)
        mass = ordered.softmax(dim=1)
        drop = (mass.cumsum(dim=1) - mass) >= top_p.unsqueeze(1)
        scaled = scaled.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return scaled.log_softmax(dim=1)


class BatchDecoder:
    """Decodes a changing set of requests, one token each per `step`.

    Not thread-safe: its owner calls it from one thread at a time.

    Args:
        model: a causal LM of transformers.
        eos_token_ids: every request ends after one of these.
        pad_token_id: what stands left of shorter prompts.
        seed: of the requests without one of their own.
        raw_log_probs: report those of the unscaled model instead.
        decode: text of token ids, special ones included; None refuses stop strings.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        raw_log_probs: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.model = model
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.raw_log_probs = raw_log_probs
        self._stop_strings = None if decode is None else StopStrings(decode)
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: list[Request] = []
        self._cache: Any = None  # a DynamicCache; its layers are typed as of any kind
        self._attention = torch.zeros((0, 0), dtype=torch.long)  # (B, L), 0 = padding
        self._next_ids = torch.zeros((0, 1), dtype=torch.long)  # (B, 1)
        self._temperature = torch.zeros(0)
        self._top_k = torch.zeros(0, dtype=torch.long)
        self._top_p = torch.zeros(0)

    def __len__(self) -> int:
        return len(self._rows)

    def reseed(self, seed: int) -> None:
        """Start the random numbers of requests without a seed of their own anew."""
        self._generator.manual_seed(seed)

    def check(self, request: Request) -> None:
        """Raises `ValueError` for a request that cannot be decoded here."""
        if request.sampling.stop and self._stop_strings is None:
            raise ValueError(
                f"cannot stop at stop={request.sampling.stop!r}: this decoder knows no texts; "
                "give it the tokenizer's `decode`"
            )

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> list[Request]:
        """Prefill new requests and sample their first token.

        Returns:
            Those that are finished already.

        Raises:
            ValueError: stop strings without `decode`; nothing was admitted.
        """
        if not requests:
            return []
        for request in requests:
            self.check(request)
        lengths = [len(request.prompt_ids) for request in requests]
        width = max(lengths)
        ids = torch.full((len(requests), width), self.pad_token_id)
        attention = torch.zeros_like(ids)
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            ids[row, width - length :] = torch.tensor(request.prompt_ids)
            attention[row, width - length :] = 1
            if request.sampling.seed is not None:
                request.generator = torch.Generator().manual_seed(request.sampling.seed)
        output = self.model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=(attention.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=DynamicCache(),
            use_cache=True,
            logits_to_keep=1,
        )
        self._join(list(requests), output.past_key_values, attention)
        return self._sample(output.logits[:, -1], first_row=len(self._rows) - len(requests))

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One token for every running request.

        Returns:
            The requests that finished with this token.
        """
        assert self._rows, "step() needs a running request"
        self._attention = torch.cat(
            [self._attention, torch.ones((len(self._rows), 1), dtype=torch.long)], dim=1
        )
        output = self.model(
            input_ids=self._next_ids,
            attention_mask=self._attention,
            position_ids=self._attention.sum(dim=1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        return self._sample(output.logits[:, -1], first_row=0)

    @torch.inference_mode()
    def drop(self, requests: Sequence[Request]) -> None:
        """Forget running requests."""
        gone = {id(request) for request in requests}
        if gone:
            self._keep([row for row, request in enumerate(self._rows) if id(request) not in gone])

    def drop_all(self) -> list[Request]:
        """Forget every running request and return them."""
        rows, self._rows, self._cache = self._rows, [], None
        self._keep([])
        return rows

    def _sample(self, logits: torch.Tensor, first_row: int) -> list[Request]:
        """Sample for the rows from `first_row` on; take finished rows out."""
        rows = self._rows[first_row:]
        temperature = self._temperature[first_row:]
        log_probs = process_logits(
            logits, temperature, self._top_k[first_row:], self._top_p[first_row:]
        )
        uniform = torch.rand((len(rows), 1), generator=self._generator)
        for row, request in enumerate(rows):
            if request.generator is not None:
                uniform[row] = torch.rand(1, generator=request.generator)
        cumulative = log_probs.exp().cumsum(dim=1)
        sampled = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        sampled = sampled.clamp(max=logits.shape[1] - 1)
        chosen = torch.where(temperature.unsqueeze(1) > 0, sampled, log_probs.argmax(1, True))
        reported = logits.float().log_softmax(dim=1) if self.raw_log_probs else log_probs
        chosen_log_probs = reported.gather(1, chosen).squeeze(1).tolist()
        self._next_ids[first_row:] = chosen

        finished: list[Request] = []
        keep = list(range(first_row))
        for row, (request, token_id) in enumerate(
            zip(rows, chosen.squeeze(1).tolist(), strict=True), start=first_row
        ):
            request.token_ids.append(token_id)
            request.log_probs.append(chosen_log_probs[row - first_row])
            if self._is_stopped(request):
                request.stop_reason = "completed"
            elif len(request.token_ids) >= request.sampling.max_tokens:
                request.stop_reason = "length"
            if request.stop_reason is None:
                keep.append(row)
            else:
                finished.append(request)
        if finished:
            self._keep(keep)
        return finished

    def _is_stopped(self, request: Request) -> bool:
        """Whether its newest token ends it."""
        newest, sampling = request.token_ids[-1], request.sampling
        if newest in self.eos_token_ids or newest in sampling.stop_token_ids:
            return True
        strings = self._stop_strings
        if not sampling.stop or strings is None:
            return False
        return strings.completed(request.token_ids, sampling.stop)

    def _join(self, requests: list[Request], cache: Any, attention: torch.Tensor) -> None:
        """Lay prefilled rows beside the running ones, both padded on the left to one width."""
        if self._rows:
            assert self._cache is not None
            width = max(self._attention.shape[1], attention.shape[1])
            self._attention = torch.cat(
                [_pad_left(self._attention, width), _pad_left(attention, width)]
            )
            # The running cache lacks the token sampled last: it is fed in the next step.
            for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
                ours.keys = torch.cat(
                    [_pad_cache(ours.keys, width), _pad_cache(theirs.keys, width)]
                )
                ours.values = torch.cat(
                    [_pad_cache(ours.values, width), _pad_cache(theirs.values, width)]
                )
        else:
            self._cache, self._attention = cache, attention
        self._rows = self._rows + requests
        zeros = torch.zeros((len(requests), 1), dtype=torch.long)
        self._next_ids = torch.cat([self._next_ids, zeros])
        samplings = [request.sampling for request in requests]
        self._temperature = torch.cat(
            [self._temperature, torch.tensor([float(s.temperature) for s in samplings])]
        )
        self._top_k = torch.cat([self._top_k, torch.tensor([int(s.top_k) for s in samplings])])
        self._top_p = torch.cat([self._top_p, torch.tensor([float(s.top_p) for s in samplings])])

    def _keep(self, rows: list[int]) -> None:
        """Drop all but `rows`, and the columns that only the dropped rows needed."""
        index = torch.tensor(rows, dtype=torch.long)
        self._rows = [self._rows[row] for row in rows]
        self._next_ids, self._temperature = self._next_ids[index], self._temperature[index]
        self._top_k, self._top_p = self._top_k[index], self._top_p[index]
        if not rows:
            self._cache, self._attention = None, torch.zeros((0, 0), dtype=torch.long)
            return
        attention = self._attention[index]
        unused = int((attention.sum(dim=0) > 0).int().argmax())
        self._attention = attention[:, unused:]
        assert self._cache is not None
        for layer in self._cache.layers:
            layer.keys = layer.keys[index][:, :, unused:]
            layer.values = layer.values[index][:, :, unused:]


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
            self._decoder.drop_all()
            for future in futures:
                if not future.done():
                    future.set_exception(RuntimeError(f"decoding failed: {error}"))
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
        finished = self._decoder.admit(new)
        return finished + self._decoder.step() if len(self._decoder) else finished


class _Awaited(NamedTuple):
    """A request and who awaits it; a future that is done before it is one that was cancelled."""

    request: Request
    future: "asyncio.Future[Request]"


def _pad_left(attention: torch.Tensor, width: int) -> torch.Tensor:
    """(B, L) -> (B, width)."""
    return torch.nn.functional.pad(attention, (width - attention.shape[1], 0))


def _pad_cache(cached: torch.Tensor, width: int) -> torch.Tensor:
    """(B, H, L, D) -> (B, H, width, D)."""
    return torch.nn.functional.pad(cached, (0, 0, width - cached.shape[2], 0))

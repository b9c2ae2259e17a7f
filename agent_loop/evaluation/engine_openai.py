"""An OpenAI-compatible server in the place of verl's rollout servers, for evaluations.

verl adapter: `LLMServerClient.generate` (workers/rollout/llm_server.py at 0.9.1). Servers differ in
what they take and say, so the client begins with the most exact form and goes on with the first
one that the server takes:

| | exact | otherwise |
| --- | --- | --- |
| prompt | token ids | its text, with special tokens |
| answer | `token_ids` of the server (vLLM) | its text, encoded with the tokenizer |
| stop strings | in the answer, or named (`stop_reason`, `matched_stop`) | none are sent |

Without stop strings the loop cuts a turn at its tag, as for any engine that cannot stop there.
Log-probs are 0: an evaluation does not need any. Requests go over the tool client, which asks a
server again that is away, overloaded or fails.
"""

import asyncio
import logging
import os
from typing import Any

import msgspec
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from agent_loop.calls.client import ToolClient
from agent_loop.calls.routes import local_route
from agent_loop.calls.servers import Server
from agent_loop.watchdog import unwatched
from config.tool_entries import without_secrets
from tool_server.wire.http import Peer, post, unreadable
from tool_server.wire.protocol import Again, ToolCall, ToolResult, ToolUnavailable
from tool_server.wire.responses import dumps

logger = logging.getLogger(__name__)

KEY_VARIABLE = "OPENAI_API_KEY"
"""Variable with the key of the server."""

SEED_BITS = (1 << 31) - 1
"""Servers take seeds of 31 bits at least."""

REQUEST_S = 1800.0
"""Deadline of a completion, with all attempts. That of its trajectory is usually shorter."""

ATTEMPTS = 8
"""Of a request that the server fails, or answers with no completion."""

MOST_BYTES = 64 << 20

FORMS = ((True, True), (True, False), (False, True), (False, False))
"""(prompt as token ids, fields beyond OpenAI's), in the order in which they are tried."""


class OpenAIClient(LLMServerClient):
    """verl's client of rollout servers, for a server at a URL.

    It is sent to agent loop workers, and connects there.

    Args:
        config: the run config.
        base_url: ends with the version, as `http://10.0.0.4:8000/v1`.
        model: its name at the server.
        most: requests at once, of one worker.
    """

    tokenizer: Any
    """The worker sets it."""

    def __init__(self, config: Any, base_url: str, model: str, most: int = 64) -> None:
        super().__init__(config)
        self.base_url, self.model, self.most = base_url, model, most
        self._calls: ToolClient | None = None
        self._form = 0
        self._sends_stops, self._has_warned = True, False

    async def connect(self, **options: Any) -> ToolClient:
        """Open the client of the server; `options` are those of `ToolClient`."""
        places = asyncio.Semaphore(self.most)
        url = f"{self.base_url.rstrip('/')}/completions"
        remedy = f"has this server the model, and the key in {KEY_VARIABLE}?"
        self._peer = Peer(
            name=without_secrets(url),
            tool="engine",
            address_key="--base-url",
            remedy=remedy,
            refused=remedy,
            secret=os.environ.get(KEY_VARIABLE, ""),
        )
        client = ToolClient(url, limiter=None, slots=lambda _: places, caches=False, **options)
        route = local_route(
            url,
            self._post,
            key="completions",
            timeout_s=REQUEST_S,
            clock=client.clock,
            max_retries=ATTEMPTS - 1,
            advice="look at the log of that server",
        )
        self._calls = await client.on(route).__aenter__()
        return self._calls

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **ignored: Any,
    ) -> TokenOutput:
        """Continue `prompt_ids`.

        Raises:
            ValueError: images, video or audio were given.
            ToolUnavailable: the server refuses the request, the key or the model, or gave no
                completion in its time.
        """
        if image_data or video_data or audio_data:
            raise ValueError("an evaluation with --base-url gives the model text only")
        ids, params = [int(token) for token in prompt_ids], dict(sampling_params)
        most = int(
            params.get("max_tokens") or self.config.actor_rollout_ref.rollout.response_length
        )
        while True:
            stops = _texts(params.get("stop")) if self._sends_stops else []
            payload = {"ids": ids, "params": params, "most": most, "stops": stops}
            calls = self._calls or await self.connect()
            with unwatched():  # the trajectory waits for its engine
                choice = (await calls.call(ToolCall(tool="engine", payload=payload))).body
            token_ids = self._tokens(choice, stops)
            if token_ids is not None:
                break
            self._sends_stops = False  # this server does not say at which string it stopped
        reason = choice.get("finish_reason")
        return TokenOutput(
            token_ids=token_ids[:most],
            log_probs=[0.0] * len(token_ids[:most]),
            stop_reason="aborted" if reason == "abort" else "completed",
            num_preempted=0,
            extra_fields={"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0},
        )

    async def _post(self, call: ToolCall, server: Server) -> ToolResult:
        """The first choice of the server's answer, in the first form that it takes."""
        assert self._calls is not None
        refusals: list[ToolUnavailable] = []
        for form in range(self._form, len(FORMS)):
            data = dumps(self._body(**call.payload, form=form))
            try:
                raw, _ = await post(
                    self._calls.session, server.url, data, self._peer, limit=MOST_BYTES
                )
                choice = dict(msgspec.json.decode(raw)["choices"][0])
            except ToolUnavailable as fault:
                if fault.is_away and not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "%s does not answer (%s); it is asked again for %g s: does it run, and is "
                        "--base-url its address?",
                        *(self._peer.name, fault, REQUEST_S),
                    )
                if fault.again is not Again.NEVER:
                    raise
                refusals.append(fault)
            except (ValueError, LookupError, TypeError) as error:
                raise unreadable(error, self._peer) from error
            else:
                self._form = max(self._form, form)
                return ToolResult(body=choice)
        raise refusals[0]

    def _body(
        self, ids: list[int], params: dict[str, Any], most: int, stops: list[str], form: int
    ) -> dict[str, Any]:
        by_ids, more = FORMS[form]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ids if by_ids else self.tokenizer.decode(ids, skip_special_tokens=False),
            "max_tokens": most,
            "temperature": float(params.get("temperature", 1.0)),
            "top_p": float(params.get("top_p", 1.0)),
            "stream": False,
        }
        if params.get("seed") is not None:
            body["seed"] = int(params["seed"]) & SEED_BITS
        if stops:
            body["stop"] = stops
        if guide := params.get("structured_outputs"):
            body["structured_outputs"] = guide  # vLLM's
        if more:
            body |= {
                "return_token_ids": True,
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "add_special_tokens": False,
            }
        if (top_k := int(params.get("top_k") or -1)) > 0:
            body["top_k"] = top_k
        return body

    def _tokens(self, choice: dict[str, Any], stops: list[str]) -> list[int] | None:
        """The tokens of an answer; None if it may have stopped at a string that is not said."""
        if ids := choice.get("token_ids"):
            return [int(token) for token in ids]
        text, is_over = str(choice.get("text") or ""), choice.get("finish_reason") == "stop"
        ends_message = is_over
        if is_over and stops:
            says = [name for name in ("stop_reason", "matched_stop") if name in choice]
            said = choice[says[0]] if says else None
            if any(text.endswith(stop) for stop in stops):
                ends_message = False
            elif said in stops:
                text, ends_message = text + str(said), False
            elif not says:
                return None
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        if ends_message and end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        return ids


def _texts(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or [])

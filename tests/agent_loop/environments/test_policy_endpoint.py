"""The endpoint that an environment asks in place of a model."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agent_loop.environments.policy_endpoint import PolicyEndpoint, text_of

RULES = {"role": "system", "content": "Play."}
FIRST = {
    "role": "user",
    "content": [{"type": "text", "text": "Go "}, {"type": "text", "text": "on"}],
}


@pytest.fixture
async def endpoint() -> AsyncIterator[PolicyEndpoint]:
    made = PolicyEndpoint()
    await made.start()
    yield made
    await made.close()


class Agent:
    """Asks the endpoint as a program with OpenAI's client does."""

    def __init__(self, endpoint: PolicyEndpoint, http: aiohttp.ClientSession) -> None:
        self._endpoint, self._http = endpoint, http

    async def ask(self, messages: list[dict[str, Any]], key: str = "", **fields: Any) -> Any:
        async with self._http.post(
            f"{self._endpoint.url}/chat/completions",
            json={"model": "policy", "messages": messages, **fields},
            headers={"Authorization": f"Bearer {key or self._endpoint.key}"},
        ) as response:
            body = await response.json()
            return body["choices"][0] if response.status == 200 else response.status


@pytest.fixture
async def agent(endpoint: PolicyEndpoint) -> AsyncIterator[Agent]:
    async with aiohttp.ClientSession() as http:
        yield Agent(endpoint, http)


async def test_requests_of_an_episode_are_its_observations(endpoint: PolicyEndpoint, agent: Agent):
    async def episode() -> str:
        messages: list[dict[str, Any]] = [RULES, FIRST]
        for said in ("one", "two"):
            messages.append((await agent.ask(messages))["message"])
            messages.append({"role": "user", "content": said})
        return (await agent.ask(messages))["message"]["content"]

    played = asyncio.ensure_future(episode())
    assert await endpoint.asked(played) == [RULES, {"role": "user", "content": "Go on"}]
    endpoint.reply("a")
    assert await endpoint.asked(played) == [{"role": "user", "content": "one"}]
    endpoint.reply("b")
    assert await endpoint.asked(played) == [{"role": "user", "content": "two"}]
    endpoint.reply("c")
    assert await endpoint.asked(played) is None
    assert played.result() == "c"


async def test_a_call_of_a_tool_is_a_reply_too(endpoint: PolicyEndpoint, agent: Agent):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def episode() -> Any:
        choice = await agent.ask([FIRST], tools=[tool])
        call = choice["message"]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await agent.ask([FIRST, choice["message"], result], tools=[tool])
        return choice["finish_reason"], call["function"]

    played = asyncio.ensure_future(episode())
    await endpoint.asked(played)
    assert endpoint.tools == [tool]
    endpoint.reply({"name": "add", "arguments": {"a": 1}})
    assert await endpoint.asked(played) == [{"role": "tool", "content": "3"}]
    endpoint.reply("It is 3.")
    assert await endpoint.asked(played) is None
    assert played.result() == ("tool_calls", {"name": "add", "arguments": '{"a": 1}'})


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ([{"role": "user", "content": "Another"}], "another conversation"),
        ([FIRST, {"role": "assistant", "content": "no"}, FIRST], "another conversation"),
        ([FIRST, {"role": "assistant", "content": "a"}], "without an answer of its own"),
    ],
)
async def test_a_trajectory_is_one_conversation(
    later: list[dict[str, Any]], said: str, endpoint: PolicyEndpoint, agent: Agent
):
    async def episode() -> None:
        await agent.ask([FIRST])
        await agent.ask(later)

    played = asyncio.ensure_future(episode())
    await endpoint.asked(played)
    endpoint.reply("a")
    with pytest.raises(ValueError, match=said):
        await endpoint.asked(played)
    played.cancel()


async def test_two_requests_at_once_are_refused(endpoint: PolicyEndpoint, agent: Agent):
    first, second = (asyncio.ensure_future(agent.ask([FIRST])) for _ in range(2))
    done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert [each.result() for each in done] == [400]
    with pytest.raises(ValueError, match="two messages at once"):
        await endpoint.asked(first)
    for each in (first, second):
        each.cancel()
    await asyncio.wait((first, second))


async def test_a_stream_is_refused(endpoint: PolicyEndpoint, agent: Agent):
    played = asyncio.ensure_future(agent.ask([FIRST], stream=True))
    with pytest.raises(ValueError, match="asks for a stream"):
        await endpoint.asked(played)
    assert await played == 400


async def test_a_request_needs_the_episode_s_key(endpoint: PolicyEndpoint, agent: Agent):
    assert await agent.ask([FIRST], key="other") == 401
    assert await endpoint.asked(asyncio.ensure_future(asyncio.sleep(0))) is None


async def test_a_reply_to_a_request_that_was_given_up_is_left_out(
    endpoint: PolicyEndpoint, agent: Agent
):
    played = asyncio.ensure_future(agent.ask([FIRST]))
    await endpoint.asked(played)
    played.cancel()
    await asyncio.wait([played])
    await asyncio.sleep(0.05)  # the server sees that its client is gone
    endpoint.reply("a")
    assert await endpoint.asked(played) is None


def test_pictures_are_refused():
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ValueError, match="only texts are supported"):
        text_of({"role": "user", "content": [part]})

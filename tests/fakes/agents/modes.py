"""The modes of frameworks from PyPI: `python modes.py FRAMEWORK`, with sessions as JSON on stdin.

A session is `<protocol>.<mode>` -> its addresses. Each line that is printed is the JSON of a
session's name and of what the framework made of the policy's messages, or its error.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

ASK = "question"
NO_RETRY = {"max_retries": 0}


class City(BaseModel):
    """A place."""

    city: str


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def search(query: str) -> str:
    """Search a text.

    Args:
        query: what to look for
    """
    return f"nothing of {query}"


async def pydantic_ai(protocol: str, mode: str, at: dict[str, str]) -> Any:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    model: Any
    if protocol == "messages":
        provider = AnthropicProvider(base_url=at["url"], api_key=at["key"])
        model = AnthropicModel("claude-sonnet-4-5", provider=provider)
    else:
        kind = OpenAIChatModel if protocol == "chat" else OpenAIResponsesModel
        model = kind("policy", provider=OpenAIProvider(base_url=at["openai"], api_key=at["key"]))
    output: Any = str
    if "structured" in mode:
        output = NativeOutput(City)
    elif mode == "required":  # the output is a tool that must be called
        output = ToolOutput(City, name="place")
    tools = [add, search] if "tools" in mode or mode == "parallel" else []
    agent = Agent(model, tools=tools, output_type=output)
    if mode.startswith("stream"):
        async with agent.run_stream(ASK) as streamed:
            return await streamed.get_output()
    return (await agent.run(ASK)).output


async def openai_agents(protocol: str, mode: str, at: dict[str, str]) -> Any:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=at["openai"], api_key=at["key"], max_retries=0)
    models = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    tools: list[Any] = []
    if "tools" in mode or mode in ("parallel", "required"):
        tools = [agents.function_tool(add), agents.function_tool(search)]
    choice = "required" if mode == "required" else None
    agent = agents.Agent(
        name="Assistant",
        model=models[protocol](model="policy", openai_client=client),
        tools=tools,
        output_type=City if "structured" in mode else None,
        model_settings=agents.ModelSettings(tool_choice=choice),
    )
    if mode.startswith("stream"):
        streamed = agents.Runner.run_streamed(agent, ASK)
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output
    return (await agents.Runner.run(agent, ASK)).final_output


async def autogen(protocol: str, mode: str, at: dict[str, str]) -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelFamily
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(
        model="policy",
        base_url=at["openai"],
        api_key=at["key"],
        max_retries=0,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": ModelFamily.UNKNOWN,
            "structured_output": True,
        },
    )
    tools: list[Any] = []
    if "tools" in mode or mode == "parallel":
        tools = [FunctionTool(each, each.__doc__ or "", strict=True) for each in (add, search)]
    agent = AssistantAgent(
        "assistant",
        client,
        tools=tools or None,
        max_tool_iterations=3,
        reflect_on_tool_use=False,
        output_content_type=City if "structured" in mode else None,
        model_client_stream=mode.startswith("stream"),
    )
    return (await agent.run(task=ASK)).messages[-1].content  # type: ignore[union-attr]


async def dspy(protocol: str, mode: str, at: dict[str, str]) -> Any:
    import dspy as ds

    ds.configure_cache(enable_disk_cache=False, enable_memory_cache=False)
    names = {"chat": "openai/policy", "responses": "openai/policy", "messages": "anthropic/policy"}
    lm = ds.LM(
        names[protocol],
        model_type="responses" if protocol == "responses" else "chat",
        api_base=at["openai"],
        api_key=at["key"],
        cache=False,
        num_retries=0,
    )
    with ds.context(lm=lm, adapter=ds.JSONAdapter()):
        said = (await ds.Predict("question -> answer: str").acall(question=ASK)).answer
    return json.loads(f'"{said}"')


async def langchain(protocol: str, mode: str, at: dict[str, str]) -> Any:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    key: Any = at["key"]
    model: Any
    if protocol == "messages":
        model = ChatAnthropic(
            model_name="claude-sonnet-4-5", base_url=at["url"], api_key=key, max_retries=0
        )
    else:
        model = ChatOpenAI(
            model="policy",
            base_url=at["openai"],
            api_key=key,
            max_retries=0,
            use_responses_api=protocol == "responses",
        )
    if mode == "stream":
        return "".join([chunk.text async for chunk in model.astream(ASK)])
    if mode == "stream_structured":
        chain = model.with_structured_output(City, method="json_schema")
        return [each async for each in chain.astream(ASK)][-1]
    if mode == "required":
        bound = model.bind_tools([City], tool_choice="any")
        return City(**(await bound.ainvoke(ASK)).tool_calls[0]["args"])
    agent = create_agent(
        model,
        [add, search] if "tools" in mode or mode == "parallel" else [],
        response_format=ProviderStrategy(City) if "structured" in mode else None,
    )
    ended = [
        each async for each in agent.astream({"messages": [("user", ASK)]}, stream_mode="values")
    ]
    return ended[-1].get("structured_response") or ended[-1]["messages"][-1].text


async def smolagents(protocol: str, mode: str, at: dict[str, str]) -> Any:
    import smolagents as smol

    model = smol.OpenAIServerModel("policy", api_base=at["openai"], api_key=at["key"])
    agent = smol.ToolCallingAgent(
        tools=[smol.tool(add)],
        model=model,
        verbosity_level=0,
        max_steps=3,
        stream_outputs=mode.startswith("stream"),
    )
    return await asyncio.to_thread(agent.run, ASK)


FRAMEWORKS: dict[str, Callable[[str, str, dict[str, str]], Any]] = {
    "pydantic-ai": pydantic_ai,
    "openai-agents": openai_agents,
    "autogen": autogen,
    "dspy": dspy,
    "langchain": langchain,
    "smolagents": smolagents,
}


async def main() -> None:
    framework = FRAMEWORKS[sys.argv[1]]
    for name, address in json.load(sys.stdin).items():
        try:
            made = await framework(*name.split("."), address)
            said = made.city if isinstance(made, City) else str(made)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(f"\n{json.dumps([name, said])}", flush=True)  # smolagents prints what streams


asyncio.run(main())

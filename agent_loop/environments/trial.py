"""Begins and ends one episode of an environment outside a run, to see whether it works."""

from agent_loop.environments.episode import Start
from agent_loop.environments.provider import EnvironmentProvider
from agent_loop.row import Row
from agent_loop.toolbox.listing import client_of
from config.environments import EnvironmentEntry
from config.schema import ToolConfig


async def try_environment(entry: EnvironmentEntry, row: Row, tools: ToolConfig) -> Start:
    """What the model reads first in the episode of a row, without the run's rate and slots.

    Raises:
        ToolUnavailable: the environment does not start, fails or gives no answer in time.
        ValueError: the entry is wrong.
    """
    plain = entry.model_copy(update={"rate": None, "slots": None})
    async with client_of(tools) as client:
        provider = client.resource("environment", lambda: EnvironmentProvider(plain, client))
        episode = await provider.begin(client.for_source(row.source), row)
        await episode.end()
        return episode.start

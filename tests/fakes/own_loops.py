"""Agent loops as a user writes them, named by `agent_loops.<name>._target_`."""

from agent_loop.native_agent_loop import NativeAgentLoop
from agent_loop.turn_agent_loop import TaggedAgentLoop


class Tagged(TaggedAgentLoop): ...


class Native(NativeAgentLoop): ...

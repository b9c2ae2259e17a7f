"""The demo's tests run under what those of its rewards and tools do."""

from tests.agent_loop.conftest import busy_rewards as busy_rewards
from tests.tool_server.conftest import busy_server as busy_server

"""What tests of loops, rewards and calls run under."""

import pytest

from tests.tool_server.conftest import busy_server as busy_server


@pytest.fixture(autouse=True)
def busy_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `busy_server`, for rewards that judge in processes."""
    monkeypatch.setattr("agent_loop.rewards.scoring.WALL_S", 240.0)

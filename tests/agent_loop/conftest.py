"""What tests of loops, rewards and tools run under."""

import pytest


@pytest.fixture(autouse=True)
def busy_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict is refused because the machine is busy with other tests.

    A server that gets no processor refuses to judge (`SandboxUnavailable`, `ToolTimeout`,
    `Overloaded`). The tests of these refusals set their own limits.
    """
    monkeypatch.setattr("agent_loop.rewards.killable_pool.WALL_S", 240.0)
    monkeypatch.setattr("agent_loop.tools.algebra.pool.WALL_FACTOR", 1000)
    if "starved" not in request.fixturenames:
        monkeypatch.setattr("agent_loop.tools.sandbox.sandbox.WALL_FACTOR", 1000)

"""What tests of the tool server run under."""

import pytest


@pytest.fixture(autouse=True)
def busy_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict is refused because the machine is busy with other tests.

    A server that gets no processor refuses to judge (`SandboxUnavailable`). The tests of these
    refusals set their own limits.
    """
    if "starved" not in request.fixturenames:
        monkeypatch.setattr("tool_server.sandbox.sandbox.WALL_FACTOR", 1000)

"""512 callers at once on a real tool server: every call answered right, and nothing left over."""

from itertools import islice

import pytest

from benchmarks.tool_soak import soak, table
from tool_server.sandbox import SandboxUnavailable, choose_sandbox

pytestmark = [pytest.mark.slow, pytest.mark.sandbox, pytest.mark.timeout(600)]

CALLERS, WARM_UP, REST = 512, 1024, 2560


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        choose_sandbox().close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def test_hundreds_of_callers_are_all_answered_and_leave_nothing():
    result = soak(CALLERS, [lambda s: islice(s, WARM_UP), lambda s: islice(s, REST)])
    print(table(result))
    assert result.account.bad == {}
    assert result.account.calls == WARM_UP + REST
    assert result.strays == 0
    before, after = result.looks
    assert after.descriptors <= before.descriptors
    assert after.processes <= before.processes
    # A program may print ten megabytes; the allocator gives them back when it likes.
    assert after.server_mb <= before.server_mb + 20
    assert after.tree_mb <= before.tree_mb * 1.1 + 20

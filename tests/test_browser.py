"""A browser that hangs or ends is named; it is never waited for in silence."""

import asyncio
import os
from pathlib import Path

import pytest

from tests import browser
from tests.browser import open_page

pytestmark = pytest.mark.browser


def test_a_test_outlasts_what_it_may_wait_for(request: pytest.FixtureRequest):
    limit = request.node.get_closest_marker("timeout").args[0]
    assert limit > 2 * browser.START_TIMEOUT_S + browser.REPLY_TIMEOUT_S


async def test_a_browser_that_does_not_listen_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mute = tmp_path / "chromium"
    mute.write_text("#!/bin/sh\nexec sleep 1000\n")
    mute.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(browser, "START_TIMEOUT_S", 0.1)
    with pytest.raises(asyncio.TimeoutError, match="Chromium has started and does not listen"):
        async with open_page("about:blank"):
            pass


async def test_a_wait_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch):
    async with open_page("about:blank") as page:
        with monkeypatch.context() as patched:
            patched.setattr(browser, "REPLY_TIMEOUT_S", 0.1)
            with pytest.raises(
                asyncio.TimeoutError, match=r"no answer .* to Runtime.evaluate .*nev"
            ):
                await page.until("window.never")


@pytest.mark.parametrize(
    ("crash", "says"),
    [("Page.crash", "the page crashed"), ("Browser.crash", "Chromium closed the connection")],
)
async def test_a_browser_that_ends_is_named_to_all_who_wait(crash: str, says: str):
    with pytest.raises(RuntimeError, match=says):
        async with open_page("about:blank") as page:
            waiting = asyncio.create_task(page.until("window.never"))
            with pytest.raises(RuntimeError, match=says):
                await page.call(crash)
            with pytest.raises(RuntimeError, match=says):
                await waiting
            await page.evaluate("1")

"""MCP servers that others wrote, from PyPI and npm, as tools; in an environment of their own."""

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.agent_loop.toolbox.mcp_rig import opened
from tests.fakes.pinned_environment import ROOT, cache_of, npm_packages, python_with
from tool_server.wire.protocol import ToolUnavailable

pytestmark = [pytest.mark.toolservers, pytest.mark.slow, pytest.mark.timeout(600)]

PINS = ROOT / "tests/fakes/tool_servers"


@pytest.fixture(scope="module")
def cache() -> Path:
    """A folder for what the pinned versions install."""
    return cache_of([*PINS.iterdir()], "tool-servers")


@pytest.fixture(scope="module")
def python(cache: Path) -> Path:
    """The interpreter with the servers from PyPI."""
    return python_with(PINS / "requirements.txt", cache)


@pytest.fixture(scope="module")
def packages(cache: Path) -> Path:
    """The folder with the servers from npm."""
    return npm_packages(PINS / "package.json", cache) / "@modelcontextprotocol"


async def test_time(python, tmp_path):
    command = f"{python} -m mcp_server_time --local-timezone UTC"
    async with opened(tmp_path, command) as rig:
        assert sorted(rig.tools) == ["convert_time", "get_current_time"]
        assert '"timezone": "Europe/Paris"' in await rig.text(
            "get_current_time", timezone="Europe/Paris"
        )
        converted = await rig.text(
            "convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo"
        )
        assert "T21:00:00+09:00" in converted and '"time_difference": "+9.0h"' in converted
        wrong = await rig.ask("get_current_time", timezone="Mars/Olympus")
        assert wrong.rejected and "Mars/Olympus" in wrong.text


@asynccontextmanager
async def _site() -> AsyncIterator[str]:
    """A web site whose robots.txt keeps robots from /private."""
    pages = {
        "/robots.txt": ("text/plain", "User-agent: *\nDisallow: /private\n"),
        "/page": ("text/html", "<html><body><h1>News</h1><p>It rains.</p></body></html>"),
        "/private": ("text/html", "<p>secret</p>"),
    }

    async def answer(request: web.Request) -> web.Response:
        if request.path not in pages:
            return web.Response(status=404)
        kind, text = pages[request.path]
        return web.Response(text=text, content_type=kind)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_fetch_reads_pages_and_obeys_robots_txt(python, tmp_path):
    command = f"{python} -m mcp_server_fetch --allow-private-ips"
    async with _site() as site, opened(tmp_path, command) as rig:
        assert list(rig.tools) == ["fetch"]
        page = await rig.text("fetch", url=f"{site}/page")
        assert "It rains." in page and f"{site}/page" in page
        refused = await rig.ask("fetch", url=f"{site}/private")
        assert refused.rejected and "robots.txt" in refused.text and "secret" not in refused.text
        missing = await rig.ask("fetch", url=f"{site}/missing")
        assert missing.rejected and "status code 404" in missing.text


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and one change since."""
    place = tmp_path / "repository"
    git = ["git", "-C", place, "-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", "-b", "trunk", place], check=True)
    (place / "a.txt").write_text("one\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "the first one"], check=True)
    (place / "a.txt").write_text("two\n")
    return place


async def test_git(python, repository, tmp_path):
    command = f"{python} -m mcp_server_git --repository {repository}"
    only = ["git_status", "git_log", "git_diff_unstaged", "git_show"]
    async with opened(tmp_path, command, only=only) as rig:
        assert list(rig.tools) == only
        place = {"repo_path": str(repository)}
        assert "modified:   a.txt" in await rig.text("git_status", **place)
        assert "the first one" in await rig.text("git_log", **place)
        difference = await rig.text("git_diff_unstaged", **place)
        assert "-one" in difference and "+two" in difference
        wrong = await rig.ask("git_show", revision="no-such-revision", **place)
        assert wrong.rejected and "no-such-revision" in wrong.text


async def test_filesystem(packages, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.txt").write_text("hello")
    (folder / "a.png").write_bytes(b"\x89PNG")
    command = f"node {packages}/server-filesystem/dist/index.js {folder}"
    async with opened(tmp_path, command) as rig:
        assert {"read_text_file", "write_file", "list_directory"} <= rig.tools.keys()
        assert "[FILE] a.txt" in await rig.text("list_directory", path=str(folder))
        assert await rig.text("read_text_file", path=str(folder / "a.txt")) == "hello"
        await rig.ask("write_file", path=str(folder / "b.txt"), content="new")
        assert (folder / "b.txt").read_text() == "new"
        wrong = await rig.ask("read_text_file", path="/etc/passwd")
        assert wrong.rejected and "outside allowed directories" in wrong.text
        with pytest.raises(ToolUnavailable, match=r"'read_media_file' of .* returned an image"):
            await rig.ask("read_media_file", path=str(folder / "a.png"))
        (folder / "big.txt").write_text("x" * (20 << 20))
        with pytest.raises(ToolUnavailable, match="more than 4 MiB"):
            await rig.ask("read_text_file", path=str(folder / "big.txt"))
        assert await rig.text("read_text_file", path=str(folder / "a.txt")) == "hello"


async def test_everything(packages, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "value of my key")
    command = f"node {packages}/server-everything/dist/index.js"
    async with opened(tmp_path, command, env=["MY_KEY"]) as rig:
        assert {"echo", "get-sum", "get-env"} <= rig.tools.keys()
        assert await rig.text("echo", message="hi") == "Echo: hi"
        assert "5" in await rig.text("get-sum", a=2, b=3)
        environment = await rig.text("get-env")
        assert "value of my key" in environment
        weather = await rig.text("get-structured-content", location="New York")
        assert json.loads(weather)["conditions"] == "Cloudy"
        links = await rig.text("get-resource-links", count=2)
        assert "Text Resource 2: demo://resource/dynamic/text/2" in links
        inside = await rig.text("get-resource-reference", resourceType="Text", resourceId=1)
        assert "This is a plaintext resource" in inside
        wrong = await rig.ask("get-sum", a="x", b=1)
        assert wrong.rejected and "expected number, received string" in wrong.text
        with pytest.raises(ToolUnavailable, match="returned an image"):
            await rig.ask("get-tiny-image")

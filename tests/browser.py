"""Headless Chromium for tests of pages, over the DevTools protocol.

Each page has a profile of its own. Its requests and its console errors are recorded.
"""

import asyncio
import base64
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from async_timeout import timeout

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 240.0
REPLY_TIMEOUT_S = 240.0
"""Long, so that no test fails because the machine is busy. A test that hangs names its step: the
time limit of a test (tests/conftest.py) is longer than two slow starts and one reply.
"""

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-port=0",
)

_KEYS = {  # name -> (windows key code, text)
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "Backspace": (8, ""),
    " ": (32, " "),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "PageUp": (33, ""),
    "PageDown": (34, ""),
}


def chromium() -> str:
    """The browser's path; skips the test without a browser."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium here: apt-get install chromium")


class Page:
    """One open page.

    Args:
        socket: DevTools connection to the browser.
    """

    def __init__(self, socket: "aiohttp.ClientWebSocketResponse[bool]") -> None:
        self._socket = socket
        self._session: str | None = None
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._end = ""
        self.requests: list[str] = []
        """Every requested address; the page's own is the first."""

        self.console_errors: list[str] = []
        """Exceptions, errors and warnings of scripts, policies and the network."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call one method of the DevTools protocol.

        Raises:
            RuntimeError: the browser refused the call, or ended.
            asyncio.TimeoutError: the browser does not answer.
        """
        if self._end:
            raise RuntimeError(f"{method}: {self._end}")
        number = len(self._replies)
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        async with _within(REPLY_TIMEOUT_S, f"no answer from Chromium to {method} {parameters}"):
            answer = await reply
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def evaluate(self, js: str) -> Any:
        """The value of an expression; a promise is awaited.

        Raises:
            RuntimeError: the expression threw.
        """
        answer = await self.call(
            "Runtime.evaluate", expression=js, returnByValue=True, awaitPromise=True
        )
        if details := answer.get("exceptionDetails"):
            raise RuntimeError(f"{js}: {_exception(details)}")
        return answer["result"].get("value")

    async def until(self, js: str) -> Any:
        """Wait in the page until an expression is truthy, and return it."""
        return await self.evaluate(
            "new Promise((done, fail) => { const look = () => { try {"
            f" const value = ({js}); value ? done(value) : setTimeout(look, 20);"
            " } catch (error) { fail(error); } }; look(); })"
        )

    async def press(self, key: str) -> None:
        """Press and release a key: a character, or a name such as `Enter` or `ArrowDown`."""
        code, text = _KEYS.get(key, (ord(key[0].upper()), key if len(key) == 1 else ""))
        common: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        down: dict[str, Any] = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        await self.call("Input.dispatchKeyEvent", **down, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def click(self, selector: str) -> None:
        """Click in the middle of the first element of a CSS selector, as a mouse does."""
        box = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView();"
            " const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        common = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **common)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **common)

    async def goto(self, address: str | Path) -> None:
        """Open an address or a file, and wait until it has loaded."""
        url = _url(address)
        self._loaded.clear()
        answer = await self.call("Page.navigate", url=url)
        if error := answer.get("errorText"):
            raise RuntimeError(f"cannot open {url}: {error}")
        async with _within(REPLY_TIMEOUT_S, f"{url} has not loaded"):
            await self._loaded.wait()

    async def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """Write the window as a PNG file.

        Args:
            path: of the file.
            whole: the whole page instead of the visible part.
        """
        answer = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))
        return path

    async def _close_browser(self) -> None:
        """Ask the browser to end: a killed browser would leave its child processes behind."""
        if self._socket.closed:
            return
        self._session, self._end = None, ""
        with suppress(RuntimeError, ConnectionError):  # the browser may end before it answers
            await self.call("Browser.close")

    async def _listen(self) -> None:
        try:
            await self._take_messages()
        finally:
            self._fail("Chromium closed the connection")

    def _fail(self, end: str) -> None:
        """Let all waiting calls raise, because no answer will come."""
        self._end = self._end or end
        self._loaded.set()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(RuntimeError(self._end))

    async def _take_messages(self) -> None:
        async for message in self._socket:
            if message.type != aiohttp.WSMsgType.TEXT:
                continue
            event = message.json()
            if "id" in event:
                reply = self._replies[event["id"]]
                if not reply.done():
                    reply.set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, details: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Inspector.targetCrashed":
            self._fail("the page crashed")
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console_errors.append(_exception(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.console_errors.append(str([a.get("value") for a in details["args"]]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.console_errors.append(details["entry"]["text"])

    async def _attach(self, size: tuple[int, int], dark: bool) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Inspector", "Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def open_page(
    address: str | Path, size: tuple[int, int] = (1280, 720), *, dark: bool = False
) -> AsyncIterator[Page]:
    """A page that has loaded, in a browser of its own that ends with the block.

    Args:
        address: a URL, or a file's path.
        size: width and height of the window in pixels.
        dark: the page gets `prefers-color-scheme: dark`.
    """
    browser = chromium()
    profile = tempfile.mkdtemp(prefix="chromium-")
    process = await asyncio.create_subprocess_exec(
        browser,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    tasks: list[asyncio.Task[None]] = []
    try:
        async with _within(START_TIMEOUT_S, "Chromium has started and does not listen"):
            endpoint = await _endpoint(process)
        assert process.stderr is not None
        tasks.append(asyncio.create_task(_drain(process.stderr)))
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(endpoint, max_msg_size=0) as socket,
        ):
            page = Page(socket)
            tasks.append(asyncio.create_task(page._listen()))
            await page._attach(size, dark)
            await page.goto(address)
            try:
                yield page
            finally:
                await page._close_browser()
                async with _within(REPLY_TIMEOUT_S, "Chromium has closed and does not end"):
                    await process.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


@contextmanager
def viewing(run_dir: Path) -> Iterator[str]:
    """The address of a `verl-mixed view` that runs as a process."""
    command = [sys.executable, "-m", "verl_mixed", "view", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("http://"), f"{command} printed {line!r}"
            yield line.split()[0]
        finally:
            server.terminate()


@asynccontextmanager
async def _within(seconds: float, problem: str) -> AsyncIterator[None]:
    """A time limit whose error names the step that did not end."""
    try:
        async with timeout(seconds):
            yield
    except asyncio.TimeoutError as error:
        raise asyncio.TimeoutError(f"{problem} after {seconds:.0f} s") from error


async def _endpoint(process: asyncio.subprocess.Process) -> str:
    """The DevTools address, which the browser prints on its standard error."""
    assert process.stderr is not None
    lines = []
    async for line in process.stderr:
        lines.append(line.decode(errors="replace"))
        if lines[-1].startswith("DevTools listening on "):
            return lines[-1].split()[-1]
    raise RuntimeError(f"Chromium ended before it listened: {''.join(lines)[-2000:]}")


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


def _url(address: str | Path) -> str:
    return address.resolve().as_uri() if isinstance(address, Path) else address


def _exception(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])

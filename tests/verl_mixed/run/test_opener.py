"""The one opener of the command: redirects are errors, and a proxy is asked only on request."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError

import pytest

from verl_mixed.run.opener import opener


class Server(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def url() -> Iterator[str]:
    Server.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("use_proxy", [False, True])
def test_a_redirect_is_an_error_and_not_followed(url: str, use_proxy: bool) -> None:
    with pytest.raises(HTTPError, match="302"):
        opener(use_proxy=use_proxy).open(f"{url}/moved", timeout=5)
    assert Server.asked == ["/moved"]


def test_a_proxy_is_asked_only_on_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    opener(use_proxy=False).open(f"{url}/here", timeout=5).close()
    with pytest.raises(OSError):
        opener(use_proxy=True).open(f"{url}/here", timeout=5)
    assert Server.asked == ["/here"]

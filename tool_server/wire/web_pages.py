"""Which requests a page in somebody's browser could have sent to a server of ours.

The tool server, an environment server, the gateway and the viewer ask this before anything else. Of
our modules it imports `tokens` alone, so that an interpreter with aiohttp can serve environments.
"""

import re
from collections.abc import Mapping

from tool_server.wire.tokens import is_loopback


def web_page_fault(
    headers: Mapping[str, str], *, only_loopback: bool, own_page: bool = False
) -> str:
    """Why a request may come from a web page; empty if it cannot.

    Browsers send `Origin` with each POST and with each request to another site. A page whose own
    name is made to resolve to this machine (DNS rebinding) is found by its `Host`.

    Args:
        headers: of the request; their names in any case.
        only_loopback: the server listens on this machine alone, so `Host` is a name of loopback.
        own_page: the server has a page, which may send requests to it.
    """
    sites = ("none", "same-origin") if own_page else ("none",)
    if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") not in sites:
        return "web pages are not served: there is an Origin, or a Sec-Fetch-Site of another site"
    host = headers.get("Host")
    if only_loopback and host is not None and not is_loopback(_name_of(host)):
        return f"no Host {host[:100]!r} here: the server listens on loopback, send its address"
    return ""


def _name_of(host: str) -> str:
    """The name or address in a `Host` header, without its port; empty if it has another form."""
    match = re.fullmatch(r"(?:\[(.*)\]|([^:]*))(?::\d*)?", host)
    return "" if match is None else (match[1] or match[2] or "").lower()

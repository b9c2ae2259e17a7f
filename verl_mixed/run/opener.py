"""Opens URLs for requests with a key or a token.

No redirect is followed, because urllib would send the key to the other host too.
"""

from typing import Any
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, build_opener


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Makes an `HTTPError` of a redirect."""


def opener(*, use_proxy: bool) -> OpenerDirector:
    """An opener; `use_proxy`: the proxy that the environment names is used, and sees the key."""
    return build_opener(_NoRedirects, *([] if use_proxy else [ProxyHandler({})]))

"""Bearer tokens of tool servers: one from the environment, or one that a user has on this machine.

The user's token protects servers that were started by hand without any: other users of the machine
cannot read its file, and this user's clients find it there. It is sent to loopback addresses only.
"""

import ipaddress
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

TOKEN_VARIABLE = "TOOL_SERVER_TOKEN"
"""Environment variable with the bearer token of the tool servers."""


def token_for(url: str, environ: Mapping[str, str]) -> str:
    """The token to send to the tool server at `url`; "" if there is none."""
    token = environ.get(TOKEN_VARIABLE, "")
    if token or not is_loopback(urlsplit(url).hostname or ""):
        return token
    try:
        return user_token_file(environ).read_text().strip()
    except (OSError, ValueError):
        return ""


def user_token_file(environ: Mapping[str, str]) -> Path:
    """File of the user's token, which may not exist."""
    folder = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    return Path(folder) / "verl-mixed" / "tool_server_token"


def user_token(environ: Mapping[str, str]) -> str:
    """The user's token; the first call makes it.

    Raises:
        OSError: the file cannot be read or made.
        ValueError: other users can read the file, or it is another user's.
    """
    path = user_token_file(environ)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16))
        try:
            os.link(draft, path)  # unlike a rename, it keeps the file of another server's start
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    about = path.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ValueError(f"{path}: others can read or change it; delete it, and a new one is made")
    return path.read_text().strip()


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

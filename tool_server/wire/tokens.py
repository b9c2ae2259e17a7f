"""Bearer tokens of tool servers: one from the environment, or one that a user has on this machine.

The user's token protects servers that were started by hand without any: other users of the machine
cannot read its file, and this user's clients find it there. It is sent to loopback addresses only.
"""

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

TOKEN_VARIABLE = "TOOL_SERVER_TOKEN"
"""Environment variable with the bearer token of the tool servers."""


def token_for(url: str, environ: Mapping[str, str]) -> str:
    """The token to send to the tool server at `url`; "" if there is none."""
    token = environ.get(TOKEN_VARIABLE, "")
    parts = urlsplit(url)
    if token or not is_loopback(parts.hostname or ""):
        return token
    if not listeners(parts.port or 80) <= {os.geteuid()}:  # another user waits for our token there
        return ""
    try:
        return _read_own(user_token_file(environ))
    except (OSError, ValueError):
        return ""


def listeners(port: int, tables: Path = Path("/proc/net")) -> set[int]:
    """Users who listen on a TCP port of this machine; empty where the kernel shows none."""
    users = set[int]()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (tables / name).read_text().splitlines()[1:]:
                # sl, local address, remote address, state (0A listens), ..., uid (proc_net_tcp)
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    users.add(int(words[7]))
    return users


def user_token_file(environ: Mapping[str, str]) -> Path:
    """File of the user's token, which may not exist."""
    folder = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    return Path(folder) / "verl-mixed" / "tool_server_token"


def user_token(environ: Mapping[str, str]) -> str:
    """The user's token; the first call makes it.

    Raises:
        OSError: the file cannot be read or made.
        ValueError: other users can read or change the file, or it holds no token.
    """
    path = user_token_file(environ)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_shared_folder(path.parent)
    if not os.path.lexists(path):
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as draft:
            draft.write(secrets.token_hex(16).encode())
            draft.flush()
            with suppress(FileExistsError):  # another process made it
                os.link(draft.name, path)
    return _read_own(path)


def _read_own(path: Path) -> str:
    """The token in a file that only this user can read, in a folder that only this user can change.

    Otherwise another user who made the folder, for example because `XDG_CONFIG_HOME=/tmp`, could
    put a link to a secret file of this user there, and a server of that user would get its content.
    """
    _refuse_shared_folder(path.parent)
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: others can read it; delete it, and a new one is made")
    token = path.read_text("ascii", errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ValueError(f"{path}: it holds no token; delete it, and a new one is made")
    return token


def _refuse_shared_folder(path: Path) -> None:
    about = os.stat(path)
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise ValueError(f"{path}: others can change this folder; it must be yours, with go-w")


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""What a start prints about Ray: the address of its dashboard, and a Ray that it does not join."""

import getpass
import re
import socket
from collections.abc import Mapping
from typing import Any

from cluster.ray_cluster import listens, recorded_address
from config.lookup import at

LOOK_S = 1.0

_SAID = re.compile(r"View the dashboard at \S*:(\d+)")


def dashboard_line(
    config: Mapping[str, Any], cluster: str | None, environ: Mapping[str, str], log: str = ""
) -> str | None:
    """Where to open the dashboard, and the tunnel to it if this machine was reached by ssh.

    Args:
        config: the resolved run config.
        cluster: address of the cluster that the run joins, whose dashboard follows
            RAY_DASHBOARD_PORT; None if the run starts its own Ray.
        log: text of train.log, where the run's own Ray says its port; None until it does.
        environ: with SSH_HEAD, the jumphost's ssh command for this machine, or SSH_CONNECTION.
    """
    ray_init = at(config, "ray_kwargs.ray_init", {})
    host, said = ray_init.get("dashboard_host") or "127.0.0.1", _SAID.search(log)
    port = environ.get("RAY_DASHBOARD_PORT") if cluster is not None else said and said[1]
    if not port:
        return None
    if not host.startswith("127.") and host not in ("::1", "localhost"):
        reached = socket.gethostname() if host in ("0.0.0.0", "::") else host
        return f"http://{reached}:{port}"
    ssh = environ.get("SSH_HEAD") or _ssh_here(environ.get("SSH_CONNECTION", ""))
    tunnel = f" through: {ssh} -N -L {port}:127.0.0.1:{port}" if ssh else ""
    return f"http://127.0.0.1:{port}{tunnel}"


def _ssh_here(connection: str) -> str:
    """The ssh command for this machine; `connection` is sshd's SSH_CONNECTION."""
    words = connection.split()  # address and port of the client, address and port of the server
    if len(words) != 4:
        return ""
    port = "" if words[3] == "22" else f"-p {words[3]} "
    return f"ssh {port}{getpass.getuser()}@{words[2]}"


def found_line(config: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """The Ray that a `ray start` on this machine left running, for a run that does not join it."""
    address = recorded_address(environ, at(config, "ray_kwargs.ray_init._temp_dir"))
    if address is None or not listens(address, LOOK_S):
        return None
    return (
        f"found {address}, started by hand; this run starts its own; RAY_ADDRESS={address} joins it"
    )

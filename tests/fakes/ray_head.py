"""A Ray that `ray start --head` starts for a test, beside the test's own process."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_ports


@contextmanager
def ray_head(*words: str, environ: Mapping[str, str], until: str) -> Generator[str]:
    """Start a head without a dashboard on free ports; yields its address and ends it.

    Args:
        words: more words for `ray start`.
        environ: variables besides those of this process.
        until: what it prints when it can be used.
    """
    port, client_port, agent_port = free_ports(3)
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    command += [f"--port={port}", f"--ray-client-server-port={client_port}"]
    command += [f"--dashboard-agent-listen-port={agent_port}", "--include-dashboard=false"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats", *words]
    with subprocess.Popen(
        command,
        env={**os.environ, **environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as head:
        assert head.stdout is not None
        said = []
        for line in head.stdout:
            said.append(line)
            if until in line:
                break
        else:
            pytest.fail("".join(said))
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.send_signal(signal.SIGTERM)
            head.stdout.read()  # it ends its children before itself
            head.wait()

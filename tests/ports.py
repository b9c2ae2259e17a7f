"""Free ports for servers that start later."""

import random
import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports that are free, and that the system gives to nobody before they are used: they are
    below the ephemeral ports and those of tests/shell, and above those that Ray's workers take."""
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.Random().sample(range(20_000, 30_000), 100 + count):
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"fewer than {count} of {100 + count} ports of 20000 to 30000 are free")

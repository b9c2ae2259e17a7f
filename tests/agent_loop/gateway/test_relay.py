"""Connections of a sandbox on their way to the gateway."""

import asyncio
import socket
from functools import partial
from pathlib import Path

import pytest

from agent_loop.gateway.pace import Pace
from agent_loop.gateway.relay import relayed


async def test_connections_above_the_pace_wait_and_those_before_them_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_loop.gateway.relay.Pace", partial(Pace, 1e-6, 2))
    answered = list[bytes]()

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered.append(await reader.readline())
        writer.write(answered[-1])
        writer.close()

    path = str(tmp_path / "gateway.sock")
    gateway = await asyncio.start_unix_server(repeat, path)
    listener = socket.create_server(("127.0.0.1", 0))
    async with gateway, relayed(listener, path):
        streams = [await asyncio.open_connection(*listener.getsockname()[:2]) for _ in range(4)]
        for _, writer in streams:
            writer.write(b"hello\n")
        assert [await reader.readline() for reader, _ in streams[:2]] == [b"hello\n"] * 2
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(answered) == 2
        for _, writer in streams:
            writer.close()


async def test_the_listener_is_closed_also_if_its_end_is_cancelled():
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        async with relayed(listener, "/none"):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert listener.fileno() == -1

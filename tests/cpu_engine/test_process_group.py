"""The ranks of a worker group find one store, also where another process has verl's port."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cpu_engine import process_group


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch):
    """verl's choice of a port, on which another listens by the time of its use."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        monkeypatch.setenv("WG_PREFIX", "abc")
        yield


def test_a_worker_starts_although_its_port_was_taken(taken_port, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    process_group.initialize(None, timeout_second=None)

    try:
        assert torch.distributed.get_world_size() == 1
    finally:
        torch.distributed.destroy_process_group()


def test_all_ranks_have_one_store(taken_port, monkeypatch: pytest.MonkeyPatch):
    told: dict[bytes, bytes] = {}
    looked = threading.Event()
    monkeypatch.setattr(process_group.internal_kv, "_internal_kv_put", told.__setitem__)

    def look(key: bytes) -> bytes | None:
        looked.set()
        return told.get(key)

    monkeypatch.setattr(process_group.internal_kv, "_internal_kv_get", look)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(process_group._open_store)
        assert looked.wait(60)  # it has read its rank
        monkeypatch.setenv("RANK", "0")
        first = process_group._open_store()
        second = waiting.result()

    first.set("weights", "1")
    assert second.get("weights") == b"1"

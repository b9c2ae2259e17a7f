"""A worker has a bounded number of requests open at each rollout server, however they end."""

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("verl")

import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from agent_loop.loop_settings import most_open_requests
from agent_loop.training.verl_adapters import loop_worker
from agent_loop.training.verl_adapters.engine_client import RecordingClient
from agent_loop.training.verl_adapters.loop_worker import SessionRunner
from tests.fakes.parking_server import parking_server
from tests.fakes.real_ray import own_ray
from tests.fakes.real_tokenizers import real_tokenizer
from verl_mixed.run.compose import compose_config, resolve

ANSWER = TokenOutput(token_ids=[7], stop_reason="completed", extra_fields={"global_steps": 1})


class Servers:
    """A load balancer, and rollout servers that answer when the test says so. A request's id
    begins with the id of its server.

    Args:
        actor: is asked in the place of these servers.
    """

    def __init__(self, actor: Any = None) -> None:
        self.actor = actor
        self.in_flight = Counter[str]()
        """Server -> requests, as verl's load balancer counts them."""

        self.open: defaultdict[str, list[asyncio.Future[Any]]] = defaultdict(list)
        """Server -> requests that it has not answered, the oldest first."""

        for name in ("acquire_server", "release_server"):
            setattr(self, name, Remote(getattr(self, f"_{name}")))
        for name in ("require_acquire_fields", "require_release_fields"):
            setattr(self, name, Remote(self._fields))

    async def _fields(self) -> list[str]:
        return []

    async def _acquire_server(self, request_id: str) -> tuple[str, Any]:
        server_id = request_id.partition(" ")[0]
        self.in_flight[server_id] += 1
        handle = SimpleNamespace(generate=Remote(lambda **_: self._request(server_id)))
        return server_id, self.actor or handle

    def _release_server(self, server_id: str) -> None:
        self.in_flight[server_id] -= 1

    def _request(self, server_id: str) -> asyncio.Future[Any]:
        request = asyncio.get_running_loop().create_future()
        self.open[server_id].append(request)
        request.add_done_callback(self.open[server_id].remove)
        return request


class Remote:
    """A method of an actor."""

    def __init__(self, method: Any) -> None:
        self.remote = method


CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "hf"}}})


def client_of(balancer: Any, most_open: int) -> Any:
    """A worker's client in the asynchronous modes."""
    client: Any = FullyAsyncLLMServerClient(config=CONFIG, load_balancer_handle=balancer)
    return RecordingClient(client, most_open=most_open)


def ask(client: Any, *request_ids: str) -> list[asyncio.Task[Any]]:
    return [
        asyncio.create_task(client.generate(request_id, prompt_ids=[1], sampling_params={}))
        for request_id in request_ids
    ]


async def settle() -> None:
    """Let every task run until it waits for something from outside."""
    for _ in range(50):
        await asyncio.sleep(0)


async def end(servers: Servers, tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Answer all requests, until no further one is sent; what the tasks returned or raised."""
    while requests := [one for its in servers.open.values() for one in its]:
        for request in requests:
            request.set_result(ANSWER)
        await settle()
    assert all(task.done() for task in tasks)
    assert servers.in_flight.total() == 0
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that the servers were told to cancel."""
    requests: list[Any] = []
    monkeypatch.setattr(ray, "cancel", requests.append)
    return requests


async def test_a_server_never_has_more_requests_open_than_the_bound():
    servers = Servers()
    tasks = ask(client_of(servers, 3), *(f"a {number}" for number in range(10)))
    seen = []
    for _ in tasks:
        await settle()
        seen.append(len(servers.open["a"]))
        servers.open["a"][0].set_result(ANSWER)
    await settle()
    assert seen == [3, 3, 3, 3, 3, 3, 3, 3, 2, 1]
    assert [answer.token_ids for answer in await end(servers, tasks)] == [[7]] * 10


async def test_servers_do_not_share_a_bound():
    servers = Servers()
    tasks = ask(client_of(servers, 2), "a 1", "a 2", "a 3", "b 1", "b 2", "b 3")
    await settle()
    assert {name: len(requests) for name, requests in servers.open.items()} == {"a": 2, "b": 2}
    await end(servers, tasks)


@pytest.mark.parametrize("ending", ["answered", "failed", "cancelled"])
async def test_the_next_request_is_sent_however_one_ends(ending: str, cancelled: list[Any]) -> None:
    servers = Servers()
    first, second = tasks = ask(client_of(servers, 1), "a 1", "a 2")
    await settle()
    (request,) = servers.open["a"]
    if ending == "answered":
        request.set_result(ANSWER)
    elif ending == "failed":
        request.set_exception(ConnectionError("the actor died"))
    else:
        first.cancel()
    await settle()
    assert len(servers.open["a"]) == 1 and servers.open["a"] != [request]
    assert cancelled == ([request] if ending == "cancelled" else [])
    await end(servers, tasks)
    assert second.result().token_ids == [7]


@pytest.mark.parametrize("passes", range(-1, 12))
async def test_a_request_cancelled_before_it_is_sent_keeps_no_slot(passes: int) -> None:
    """It is cancelled before the one ahead of it is answered (-1), or so many passes of the event
    loop later: before, while and after it gets the slot."""
    servers = Servers()
    _, second, third = tasks = ask(client_of(servers, 1), "a 1", "a 2", "a 3")
    await settle()
    if passes < 0:
        second.cancel()
        await settle()
        assert (len(servers.open["a"]), servers.in_flight["a"]) == (1, 2)
    servers.open["a"][0].set_result(ANSWER)
    for _ in range(passes):
        await asyncio.sleep(0)
    second.cancel()
    await settle()
    assert len(servers.open["a"]) == 1
    await end(servers, tasks)
    assert third.result().token_ids == [7]


def test_a_worker_has_its_share_of_the_slots_of_verls_servers():
    assert most_open_requests(256, 8) == 123  # of 1,000 slots, 16 are verl's
    assert most_open_requests(984, 3) == 328
    assert most_open_requests(None, 1) == 984
    assert most_open_requests(985, 1) == 985  # of 1,001
    assert most_open_requests(2048, 8) == 256
    assert most_open_requests(256, 984) == most_open_requests(256, 985) == 1


class VerlsWorker:
    """What `SessionRunner` needs of verl's worker."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        self.config, self.llm_client = config, llm_client
        self.tokenizer, self.model_config = real_tokenizer("pieces"), None


class Runner(SessionRunner, VerlsWorker): ...


async def test_a_worker_reads_its_bound_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_worker, "_agent_loop_registry", {})
    rollout = "actor_rollout_ref.rollout"
    words = (f"{rollout}.max_num_seqs=1200", f"{rollout}.agent.num_workers=600")
    composed = resolve(compose_config(["mixed.run_dir=/r", *words]), complete=False)
    servers = Servers()
    client: Any = FullyAsyncLLMServerClient(config=CONFIG, load_balancer_handle=servers)
    runner = Runner(OmegaConf.create(cast(Any, composed)), client)
    tasks = ask(runner.llm_client, *(f"a {number}" for number in range(5)))
    await settle()
    assert len(servers.open["a"]) == 2
    await end(servers, tasks)


SLOTS, REQUESTS = 10, 12


@pytest.fixture(scope="module")
def own_cluster() -> Generator[None]:
    with own_ray(1):
        yield


@pytest.mark.ray
@pytest.mark.parametrize(
    ("most_open", "resumes"),
    [(sys.maxsize, False), (SLOTS - 2, True)],
    ids=["without a bound", "with a bound"],
)
async def test_a_server_whose_slots_are_all_taken_cannot_be_resumed(
    most_open: int, resumes: bool, own_cluster: None
) -> None:
    server = parking_server(SLOTS)
    tasks = ask(client_of(Servers(server), most_open), *(f"a {n}" for n in range(REQUESTS)))
    await settle()
    while await server.parked.remote() < min(SLOTS, most_open):
        await settle()
    resumed = server.resume_generation.remote()
    answered, _ = ray.wait([resumed], timeout=60.0 if resumes else 1.0)
    assert bool(answered) == resumes
    if not resumes:  # nothing ends that would give it a slot
        assert await server.parked.remote() == SLOTS
        ray.kill(server)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, BaseException) for answer in answers] == [not resumes] * REQUESTS

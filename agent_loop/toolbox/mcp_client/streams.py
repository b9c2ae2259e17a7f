"""The two streams of messages that the SDK asks of a transport, over a server's process."""

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import Self

from agent_loop.toolbox.mcp_client.messages import BAD_ANSWER, error_answer

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage


class Process(Protocol):
    """What the streams need of a server's process."""

    async def next_answer(self) -> dict[str, Any] | None: ...
    def write(self, message: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class _Stream:
    """What the SDK asks of both streams. The process is ended by the transport."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._process.close()


class Answers(_Stream):
    """The server's responses, as the SDK reads them."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> "SessionMessage | Exception":
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        while (answer := await self._process.next_answer()) is not None:
            try:
                message = jsonrpc_message_adapter.validate_python(answer, by_name=False)
            except ValueError:
                fault = error_answer(answer.get("id"), BAD_ANSWER, "it is no JSON-RPC response")
                try:
                    message = jsonrpc_message_adapter.validate_python(fault, by_name=False)
                except ValueError:  # nobody asked under this id
                    continue
            return SessionMessage(message)
        raise StopAsyncIteration

    async def receive(self) -> "SessionMessage | Exception":
        from anyio import EndOfStream

        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise EndOfStream from None


class Requests(_Stream):
    """Our messages, as the SDK writes them."""

    async def send(self, item: "SessionMessage") -> None:
        from anyio import BrokenResourceError

        try:
            self._process.write(item.message.model_dump(by_alias=True, exclude_unset=True))
        except BrokenPipeError as error:
            raise BrokenResourceError from error

"""A harness of verifiers that runs in the process of the episode.

verifiers' own harnesses start a program for each turn, with packages that uv downloads. This one
has the same conversation, and the task's tools, without a program. verifiers finds harnesses by the
name of a top-level module, so `register` gives this module such a name.

Source: verifiers 0.4.0, v1/harness.py (`launch`) and v1/harnesses/utils/core.py (`run_chat_loop`).
"""

# The package verifiers is in an interpreter of its own.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

HARNESS_ID = "mixed_in_process_harness"


def register() -> str:
    """Make the harness known to verifiers; its id."""
    if HARNESS_ID not in sys.modules:
        module = sys.modules[HARNESS_ID] = sys.modules[__name__]
        vars(module).update(InProcessHarness=_harness_class(), __all__=["InProcessHarness"])
    return HARNESS_ID


def _harness_class() -> Any:
    import httpx
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class InProcessConfig(HarnessConfig):
        pass

    class InProcessHarness(Harness[InProcessConfig]):
        """Asks for a message, calls the tools in it, and ends with a message without calls."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> ProgramResult:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            async with AsyncExitStack() as stack:
                http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                schemas, names, opened = await connect_mcp({"mcpServers": servers}, stack)
                asked: dict[str, Any] = {"model": ctx.model, "messages": messages}
                if schemas:
                    asked["tools"] = schemas
                while True:
                    response = await http.post(
                        f"{endpoint}/chat/completions",
                        json=asked,
                        headers={"Authorization": f"Bearer {secret}"},
                    )
                    if response.status_code != 200:  # a @stop, a limit, or a fault
                        return ProgramResult(exit_code=1, stdout="", stderr=response.text[-2000:])
                    message = response.json()["choices"][0]["message"]
                    messages.append(message)
                    calls = message.get("tool_calls")
                    if not calls:
                        return ProgramResult(exit_code=0, stdout="", stderr="")
                    for call in calls:
                        function = call["function"]
                        content = await call_mcp(
                            opened, names, function["name"], json.loads(function["arguments"])
                        )
                        messages.append(
                            {"role": "tool", "tool_call_id": call["id"], "content": content}
                        )

    return InProcessHarness

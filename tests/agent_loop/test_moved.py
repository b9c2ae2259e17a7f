"""Modules that have moved are found under the names that runs' configs and users' code have."""

from importlib import import_module

import pytest

from agent_loop import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_same_module(old: str) -> None:
    pytest.importorskip("verl")
    assert import_module(old) is import_module(MOVED[old])
    assert import_module(MOVED[old]).__name__ == MOVED[old]


def test_names_that_documents_of_1_1_told_users_to_import() -> None:
    from agent_loop.tools.protocol import ToolRejected, run_code_call  # pyright: ignore
    from tool_server.wire import protocol

    assert (ToolRejected, run_code_call) == (protocol.ToolRejected, protocol.run_code_call)


def test_other_modules_of_a_folder_that_is_gone_are_not_found() -> None:
    for name in ("tokens", "client", "no_such_module"):
        with pytest.raises(ModuleNotFoundError):
            import_module(f"agent_loop.tools.{name}")

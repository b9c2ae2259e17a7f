"""A real viewer server for the run of a test."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import pytest
from aiohttp import web

from tests.listening import listening
from verl_mixed.run.compose import load_config
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.server import create_app
from verl_mixed.views.viewer.tokens import tokenizer_of

Serve = Callable[[Path], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def served(run_dir: Path) -> AsyncIterator[str]:
    """The address of a viewer of a run."""
    decode, note = tokenizer_of(load_config(run_dir / "config.yaml"))
    with closing(Index(run_dir)) as index:
        app = create_app(run_dir.name, index, decode, note)
        async with listening(web.AppRunner(app, access_log=None)) as address:
            yield address


@pytest.fixture
def serve() -> Serve:
    return served

"""Hostile programs, what is watched while they run, and how they are judged."""

from tests.tool_server.hostile.kernel import MEMORY, SERVER, SHARED
from tests.tool_server.hostile.powers import PRIVILEGES, PROCESSES
from tests.tool_server.hostile.program import Hostile
from tests.tool_server.hostile.reach import DESCRIPTORS, FILES, NETWORK, WRITING
from tests.tool_server.hostile.resources import RESOURCES
from tests.tool_server.hostile.review import REVIEW
from tests.tool_server.hostile.tricks import CRASHES, FORGING, INTERPRETER

PROGRAMS: list[Hostile] = [
    *FILES,
    *WRITING,
    *NETWORK,
    *PROCESSES,
    *PRIVILEGES,
    *RESOURCES,
    *DESCRIPTORS,
    *FORGING,
    *CRASHES,
    *INTERPRETER,
    *SHARED,
    *MEMORY,
    *SERVER,
    *REVIEW,
]

__all__ = ["PROGRAMS", "Hostile"]

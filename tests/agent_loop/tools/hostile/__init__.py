"""Hostile programs, what is watched while they run, and how they are judged."""

from tests.agent_loop.tools.hostile.kernel import MEMORY, SERVER, SHARED
from tests.agent_loop.tools.hostile.powers import PRIVILEGES, PROCESSES
from tests.agent_loop.tools.hostile.program import Hostile
from tests.agent_loop.tools.hostile.reach import DESCRIPTORS, FILES, NETWORK, WRITING
from tests.agent_loop.tools.hostile.resources import RESOURCES
from tests.agent_loop.tools.hostile.review import REVIEW
from tests.agent_loop.tools.hostile.tricks import CRASHES, FORGING, INTERPRETER

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

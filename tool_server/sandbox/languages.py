"""The languages besides Python that a sandbox runs if the machine has their programs.

The names are SandboxFusion's.
"""

import os
from dataclasses import dataclass

FOLDER = "/usr/bin"
"""Folder of compilers and interpreters; a sandbox sees no other programs of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """Commands of a language, which run in the folder of the source file."""

    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()

    reserves_memory: bool = False
    """The runtime reserves far more address space than it uses, so only its memory is limited."""

    @property
    def is_here(self) -> bool:
        """Whether this machine has the compiler, or the interpreter if there is no compiler."""
        first = self.compile or self.run
        return os.access(f"{FOLDER}/{first[0]}", os.X_OK)


LANGUAGES = {
    "bash": Language(source="main.sh", run=("bash", "main.sh")),
    "c": Language(source="main.c", compile=("gcc", "main.c", "-o", "main", "-lm"), run=("./main",)),
    "cpp": Language(
        source="main.cpp", compile=("g++", "-std=c++17", "main.cpp", "-o", "main"), run=("./main",)
    ),
    "lua": Language(source="main.lua", run=("lua", "main.lua")),
    "nodejs": Language(source="main.js", run=("node", "main.js"), reserves_memory=True),
    "perl": Language(source="main.pl", run=("perl", "main.pl")),
    "php": Language(source="main.php", run=("php", "main.php")),
    "R": Language(source="main.R", run=("Rscript", "main.R")),
    "ruby": Language(source="main.rb", run=("ruby", "main.rb")),
}

"""The languages besides Python that a sandbox runs, as far as the machine has them.

Names are SandboxFusion's.
"""

import os
from dataclasses import dataclass

FOLDER = "/usr/bin"
"""Where their programs are looked for; of the host's programs, a sandbox sees these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How its programs are run, in the folder that holds the source."""

    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()

    reserves_memory: bool = False
    """Takes address space far beyond what it uses: only its memory is limited."""

    @property
    def is_here(self) -> bool:
        """Whether this machine has what it takes."""
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

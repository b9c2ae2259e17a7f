"""What the scripts print with `--dry-run`, and what they refuse: `dry_runs.txt`.

    python -m tests.recorded.dry_runs --write | --check

The recording holds its own input: `--write` makes each call again whose line begins with `$`, after
the lines with `#` above it, and records exit code, stdout and stderr. A new case is a block with a
name and these lines. The scripts run in a copied checkout in `/site`, with stand-ins first on PATH:
an `ssh` that reaches nothing, a `python3` with the standard library alone, no GPU.

    # hosts NAME              /site/hosts becomes the block `hosts file NAME`
    # block SCRIPT LINE       a line of its settings block, with `\\n` for line breaks
    # record HEAD WORKER...   what setup_cluster.sh records of a cluster, and NAME=VALUE settings
    # home CLUSTER HEAD NAME  the file `env` that setup leaves in ~/.verl_mixed/NAME of a node
    # with NAME               one of the stand-ins of `_MORE`
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.recorded.compare import RECORDED, REPO_ROOT, joined, main, normalised, split

FILE = "dry_runs.txt"
NOTE = """\
What the scripts print with --dry-run, and what they refuse. Made again by
    python -m tests.recorded.dry_runs --write
which makes each call again whose line begins with `$`; tests/recorded/dry_runs.py says what the
lines with # mean. A long line is in a block of its own at the end, in pieces; its name is here."""

_SCRIPTS = ("setup_cluster.sh", "run_mixed_training.sh")

_LEFT_OUT = ("tests", "benchmarks", "docs", "runs", "data", "logs", "outputs")
"""Folders of the checkout that no script reads."""

_PROGRAMS = {
    "ssh": 'echo "ssh $*" >>/site/calls\nexit 255',
    "python3": f'exec {shlex.quote(sys.executable)} -S "$@"',
    "python3.11": 'echo "python3.11 $*" >>/site/calls\nexit 1',
    "hostname": "echo this-host",
    "id": 'case "$1" in -un) echo me ;; *) echo 1000 ;; esac',
    "nvidia-smi": "exit 127",
    "scontrol": "printf '%s\\n' gpu1 gpu2",
    "srun": 'echo "  --nodes=N"',
}
"""Name of a stand-in -> its shell text."""

_MORE: Mapping[str, Mapping[str, str]] = {
    "venv": {
        "venv/bin/python": (
            '[[ "$2" != verl_mixed.checks.packages ]] || exit "${PACKAGES_EXIT:-0}"\n'
            'echo "python $*"'
        ),
        "venv/bin/verl-mixed": (
            'printf "verl-mixed"\nprintf " <%s>" "$@"\necho " PROFILE=${PROFILE:-}"'
        ),
    },
    "gpu": {"bin/nvidia-smi": "echo GPU 0"},
    "no-python": {f"bin/python3{minor}": "exit 1" for minor in ("", ".10", ".11", ".12", ".13")},
    "python": {"bin/python-of-mine": _PROGRAMS["python3"]},
    "conda": {
        "conda/etc/profile.d/conda.sh": (
            'conda() { echo "conda $*"; PATH="/site/venv/bin:${PATH}"; }'
        ),
    },
    "no-nodes": {"bin/scontrol": "true"},
    "binary-hosts": {"hosts": "\udcff\udcfe[head]"},
}
"""Word of a line `# with` -> file in `/site` -> its text."""

_HOSTS = "hosts file "


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A checkout, a home folder and stand-ins in one temporary folder."""

    folder: Path

    @property
    def checkout(self) -> Path:
        """The copied checkout."""
        return self.folder / "checkout"

    def text(self, text: str) -> str:
        """The text with this site's folder for `/site`."""
        return re.sub(r"/site\b", str(self.folder), text)

    def write(self, name: str, text: str) -> None:
        """Write a file, which can be run."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(text), encoding="utf-8", errors="surrogateescape")
        path.chmod(0o755)

    def reset(self) -> None:
        """Take back what a case before may have changed."""
        own = [self.folder / name for name in ("home", "bin", "venv", "conda", "hosts", "calls")]
        made = [self.checkout / name for name in (".cluster", "runs", ".venv")]
        for path in (*own, *made, self.folder / "link"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for script in _SCRIPTS:
            shutil.copy(REPO_ROOT / script, self.checkout / script)
        (self.folder / "home").mkdir()
        for name, text in _PROGRAMS.items():
            self.write(f"bin/{name}", f"#!/usr/bin/env bash\n{text}\n")

    def files(self) -> set[str]:
        """What is there now, but for Python's caches."""
        found = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}
        return {name for name in found if "__pycache__" not in name}


@contextmanager
def site() -> Generator[Site]:
    """A site that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="dry") as folder:
        made = Site(folder=Path(folder).resolve())
        made.checkout.mkdir()
        for entry in REPO_ROOT.iterdir():
            if entry.name in _LEFT_OUT or entry.name.startswith(".") or entry.is_symlink():
                continue
            if entry.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(entry, made.checkout / entry.name, ignore=ignored)
            else:
                shutil.copy(entry, made.checkout)
        yield made


# --- what is there before a call ----------------------------------------------------------------


def _prepare(line: str, on: Site, hosts: Mapping[str, str]) -> None:
    """Do what a line with `#` says."""
    what, _, rest = line.removeprefix("# ").partition(" ")
    if what == "hosts":
        on.write("hosts", hosts[_HOSTS + rest] + "\n")
    elif what == "block":
        script, _, text = rest.partition(" ")
        _set_in_block(on.checkout / script, on.text(text.replace("\\n", "\n")))
    elif what == "record":
        _record(on, rest.split())
    elif what == "home":
        cluster, head, name = rest.split()
        text = f"export VERL_MIXED_CLUSTER={cluster} VERL_MIXED_NODE={cluster}/x\n"
        text += f"export MASTER_IP={head} RAY_PORT=6379\n"
        on.write(f"home/.verl_mixed/{name}/env", text)
    elif what == "with":
        for name, text in _MORE[rest].items():
            on.write(name, f"{text}\n" if name == "hosts" else f"#!/usr/bin/env bash\n{text}\n")
    else:
        raise ValueError(f"cannot prepare a case by {line!r}: see the head of dry_runs.py")


def _set_in_block(script: Path, line: str) -> None:
    """Put an assignment into the settings block of a script, in the place of its variable's."""
    text, put = script.read_text(), f"  {line}".replace("\\", r"\\")
    own = re.compile(rf"^  {re.escape(line.partition('=')[0])}=.*$", re.MULTILINE)
    if own.search(text):
        script.write_text(own.sub(put, text, count=1))
    else:
        script.write_text(re.sub(r"^\{$", "{\n" + put, text, count=1, flags=re.MULTILINE))


def _record(on: Site, words: Sequence[str]) -> None:
    settings = [word for word in words if "=" in word]
    head, *workers = [word for word in words if "=" not in word]
    lines = ["[head]", f"{head} ip={head}", *(["", "[workers]"] if workers else []), *workers]
    on.write(f"checkout/.cluster/{head}/hosts", "\n".join(lines) + "\n")
    on.write(f"checkout/.cluster/{head}/settings.env", "\n".join(settings) + "\n")


# --- a call -------------------------------------------------------------------------------------


def run(block: str, on: Site, hosts: Mapping[str, str]) -> str:
    """A block with the call of its input made again."""
    given = [line for line in block.split("\n") if line.startswith(("# ", "$ "))]
    before, (call, *more) = given[:-1], given[-1:]
    if not call.startswith("$ ") or more or not all(line.startswith("# ") for line in before):
        raise ValueError(f"cannot make this call again: want lines with # and one with $: {given}")
    on.reset()
    for line in before:
        _prepare(line, on, hosts)
    environment = {
        "PATH": f"{on.folder}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(on.folder / "home"),
        **{"USER": "me", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
    }
    there = on.files()
    done = subprocess.run(
        ["bash", "-c", on.text(call.removeprefix("$ "))],
        cwd=on.checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        text=True,
    )
    lines = [f"exit {done.returncode}"]
    for name, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        if text:
            lines += [f"{name}:", *(f"| {line}" for line in text.rstrip("\n").split("\n"))]
    lines += [f"made: {name}" for name in sorted(on.files() - there) if name != "link"]
    calls = on.folder / "calls"
    if calls.is_file():
        lines += [f"called: {line}" for line in calls.read_text().splitlines()]
    return "\n".join([*given, _plain("\n".join(lines), on)])


def _plain(text: str, on: Site) -> str:
    """The text without what depends on the machine."""
    text = normalised(text, [(on.folder, "/site"), (sys.executable, "PYTHON")])
    text = re.sub(r"/tmp/verl_mixed\.\w{6}\b", "/tmp/verl_mixed.WORK", text)
    text = re.sub(r"(--ray-client-server-port) (10001|200\d\d)\b", r"\1 FREE_PORT", text)
    text = re.sub(r"(-- shared \w+) \d+_\d+", r"\1 NONCE", text)
    # podman's words depend on whether root prints them
    text = text.replace("--userns keep-id --group-add keep-groups", '--user "$(id -u):$(id -g)"')
    return re.sub(r"(: line )\d+(: )", r"\1N\2", text)  # bash's own message


def blocks(chosen: Sequence[str] | None = None) -> dict[str, str]:
    """Name -> block with its call made again; `chosen` are the names of some of them."""
    recorded = expanded(split((RECORDED / FILE).read_text(encoding="utf-8")))
    cases = {name: body for name, body in recorded.items() if not name.startswith(_HOSTS)}
    with site() as on:
        return {name: run(cases[name], on, recorded) for name in (chosen or cases)}


# --- long lines ---------------------------------------------------------------------------------

_LONG_LINE = 240
"""Longer lines are recorded once."""

_OF_LONG = "long line "


def compact(found: Mapping[str, str]) -> dict[str, str]:
    """The blocks with each long line once, in a block of its own that is named after its first."""
    names: dict[str, str] = {}
    short: dict[str, str] = {}
    for name, body in found.items():
        lines: list[str] = []
        own = 0
        for line in body.split("\n"):
            if len(line) > _LONG_LINE and line not in names and line.startswith("| "):
                own += 1
                names[line] = f"{_OF_LONG}{own} of {name}"
            lines.append(f"<{names[line]}>" if line in names else line)
        short[name] = "\n".join(lines)
    return short | {name: line.replace("\\n", "\\n\n") for line, name in names.items()}


def expanded(found: Mapping[str, str]) -> dict[str, str]:
    """The inverse of `compact`."""
    long = {
        f"<{name}>": body.replace("\\n\n", "\\n")
        for name, body in found.items()
        if name.startswith(_OF_LONG)
    }
    return {
        name: "\n".join(long.get(line, line) for line in body.split("\n"))
        for name, body in found.items()
        if not name.startswith(_OF_LONG)
    }


def make() -> dict[str, str]:
    """File name -> text."""
    recorded = split((RECORDED / FILE).read_text(encoding="utf-8"))
    hosts = {name: body for name, body in recorded.items() if name.startswith(_HOSTS)}
    return {FILE: joined(hosts | compact(blocks()), NOTE)}


if __name__ == "__main__":
    sys.exit(main(make, __doc__))

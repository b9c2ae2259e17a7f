"""Bring machines up and leave them, to try things by hand.

python -m tests.nodes.up NAME                  bring the site NAME up
python -m tests.nodes.up NAME enter MACHINE    a shell there: jumphost, gateway, host1, host2, ...
python -m tests.nodes.up NAME run MACHINE CMD  one command there
python -m tests.nodes.up NAME copy             bring this checkout there again
python -m tests.nodes.up NAME kill MACHINE     the machine dies
python -m tests.nodes.up NAME boot MACHINE     and starts again, with its disk
python -m tests.nodes.up NAME down             take all of it down
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.nodes.site import ENVIRON, PREFIXES, REPOSITORY, Machine, Site, missing


def main(arguments: list[str]) -> int:
    match arguments:
        case [name] if name.isalnum():
            return bring_up(name)
        case [name, "down"]:
            site_of(name).close()
            file_of(name).unlink()
        case [name, "copy"]:
            site_of(name).copy_checkout()
        case [name, "kill" | "boot" as what, machine]:
            site = site_of(name)
            (site.kill if what == "kill" else site.boot)(machine_of(site, machine))
            file_of(name).write_text(site.state())
        case [name, "enter", machine]:
            # `script` makes a terminal of the machine's own: tmux takes no other
            return enter(name, machine, "exec script -q -c 'bash -i' /dev/null")
        case [name, "run", machine, *words] if words:
            return enter(name, machine, " ".join(words))
        case _:
            print(__doc__)
            return 2
    return 0


def bring_up(name: str) -> int:
    if file_of(name).exists():
        print(f"the site {name} is up already, or was left: python -m tests.nodes.up {name} down")
        return 1
    began = time.monotonic()
    site = Site(stay=True)
    file_of(name).write_text(site.state())
    hosts = " ".join(host.address for host in site.hosts)
    print(
        f"up after {time.monotonic() - began:.1f} s\n"
        f"hosts {hosts}, repository {REPOSITORY}; the jumphost reaches them through the gateway:\n"
        f"  export SSH_JUMP={site.gateway.addresses['outside']} VENV={PREFIXES[0]}\n"
        f"  python -m tests.nodes.up {name} enter jumphost\n"
        f"  python -m tests.nodes.up {name} down"
    )
    return 0


def enter(name: str, machine: str, script: str) -> int:
    found = machine_of(site_of(name), machine)
    return subprocess.run(found.command(script), env=ENVIRON).returncode


def machine_of(site: Site, name: str) -> Machine:
    names = {machine.name: machine for machine in site.machines}
    if name not in names:
        raise SystemExit(f"no machine {name} in the site: it has {', '.join(names)}")
    return names[name]


def file_of(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"nodes-{os.getuid()}-{name}.json"


def site_of(name: str) -> Site:
    if not file_of(name).exists():
        raise SystemExit(f"no site {name} is up: python -m tests.nodes.up {name}")
    return Site.at(file_of(name).read_text())


if __name__ == "__main__":
    sys.exit(missing() or main(sys.argv[1:]))

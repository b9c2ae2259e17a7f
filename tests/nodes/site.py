"""A jumphost, a gateway and hosts, each with an sshd, on this one machine.

Every machine has its own network, processes, mounts, hostname and shared memory. It sees `/usr` and
the Python environment of the tests, read-only, and nothing else of this machine's files. The
jumphost reaches the hosts only through the gateway (ProxyJump). All of it hangs on one process, the
holder: with that gone, however it went, so are the networks, mounts, files and processes.

Not modelled: machines share the kernel, its clock, the memory and the processors.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
REPOSITORY = Path("/srv/mixed")
"""Where every machine but the gateway has its own copy of this checkout."""

SHARED = ("runs", "data")
"""Folders of the repository that are the same on all hosts, as on NFS."""

OUTSIDE, INSIDE = "10.10.0", "10.20.0"
"""Networks: jumphost and gateway; gateway and hosts."""

STORE = "/run"
"""In the holder's mount namespace alone: a tmpfs with the files of all machines."""

DEADLINE_S = 60.0
PREFIXES = tuple(dict.fromkeys(str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix)))
"""The Python environment, and the installation that it was made from."""

PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{PREFIXES[-1]}/bin"
ENVIRON = {"PATH": PATH, "HOME": "/root", "USER": "root", "SHELL": "/bin/bash", "TERM": "xterm"}
PROGRAMS = ("bwrap", "git", "ip", "nsenter", "setpriv", "ssh-keygen", "sshd", "tmux", "unshare")

_SSHD = """\
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
"""
_PASSWD = """\
root:x:0:0:root:/root:/bin/bash
sshd:x:100:65534::/run/sshd:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_SHADOW = "root:*:19000:0:99999:7:::\n"
"""No password; without this file sshd takes the account for locked."""

_SYSTEM_FILES = (
    *("alternatives", "bash.bashrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("nsswitch.conf", "profile", "protocols", "services", "shells", "ssl", "terminfo"),
)
"""Of /etc; the rest of it is made here."""


@dataclass(kw_only=True)
class Machine:
    """One of the site's machines."""

    name: str
    addresses: dict[str, str]
    """bridge -> address, a network interface each."""

    init: int = 0
    """The process whose death is the machine's, by its number outside."""

    starter: int = 0
    """The process outside that waits for it."""

    @property
    def address(self) -> str:
        """Of the network that is nearest to the jumphost."""
        return next(iter(self.addresses.values()))

    def path(self, path: str | Path) -> Path:
        """A file of the machine, as this process can open it."""
        return Path(f"/proc/{self.init}/root") / str(path).lstrip("/")

    def command(self, script: str) -> list[str]:
        """The command that runs a shell script on the machine, as root in /root."""
        inside = ("setpriv", "--pdeathsig", "KILL", "bash", "-c", f"cd; {script}")
        return [which("nsenter"), "--target", str(self.init), "--all", "--", *inside]

    def run(
        self,
        script: str,
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 120,
        input: str = "",
    ) -> "subprocess.CompletedProcess[str]":
        """Run a shell script on the machine, in a clean environment.

        What it leaves in the background must not hold the outputs, or this waits for its end.

        Raises:
            AssertionError: it failed and `check` is set; the message has what it printed.
        """
        done = subprocess.run(
            self.command(script),
            env=ENVIRON | dict(env or {}),
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
            errors="replace",
        )
        if check:
            said = f"{self.name}: {script}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
            assert done.returncode == 0, said
        return done

    def popen(
        self, script: str, *, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a shell script on the machine; both outputs are in `stdout`."""
        return subprocess.Popen(
            self.command(script),
            env=ENVIRON | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def processes(self) -> dict[int, str]:
        """Command lines by process id, as the machine numbers them."""
        found = {}
        for folder in self.path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended while we looked
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                if line := words.decode(errors="replace").strip():  # a zombie has none
                    found[int(folder.name)] = line
        return found

    def environ(self, pid: int) -> dict[str, str]:
        """Environment that a process of the machine was started with."""
        words = self.path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)

    def files(self) -> set[str]:
        """Every path on the machine that is its own: not `/usr`, not the Python environment."""
        folders = "/root /tmp /run /srv /var /etc /dev/shm"
        return set(self.run(f"find {folders} -xdev -print").stdout.splitlines())

    def listens(self, port: int) -> bool:
        """Whether something accepts TCP connections there, on any address (IPv4)."""
        with suppress(OSError):
            lines = Path(f"/proc/{self.init}/net/tcp").read_text().splitlines()[1:]
            return any(
                words[1].endswith(f":{port:04X}") and words[3] == "0A"
                for words in (line.split() for line in lines)
            )
        return False

    def stop_network(self) -> None:
        """Cut the machine off: what is sent to it is lost, and nothing tells the sender."""
        self._links("down")

    def start_network(self) -> None:
        self._links("up")

    def _links(self, state: str) -> None:
        for number in range(len(self.addresses)):
            self.ip(f"link set eth{number} {state}")

    def ip(self, words: str) -> None:
        """Run `ip` in the machine's network."""
        _run("nsenter", "-t", str(self.init), "-n", "ip", *words.split())


class Site:
    """A jumphost, a gateway and hosts; close it, or end this process, and nothing is left.

    Args:
        hosts: how many, named host1, host2, ...
        stay: leave it up when this process ends; `Site.at(site.state())` finds it again.
    """

    def __init__(self, hosts: int = 3, *, stay: bool = False):
        both = {"outside": f"{OUTSIDE}.2", "inside": f"{INSIDE}.2"}
        self.jumphost = Machine(name="jumphost", addresses={"outside": f"{OUTSIDE}.1"})
        self.gateway = Machine(name="gateway", addresses=both)
        self.hosts = [
            Machine(name=f"host{n}", addresses={"inside": f"{INSIDE}.{10 + n}"})
            for n in range(1, hosts + 1)
        ]
        self._holder = 0
        self._stay = stay
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._hold()
            self._make_disks()
            self.copy_checkout()
            for machine in self.machines:
                self._launch(machine)
            for machine in self.machines:
                self._connect(machine)
        except BaseException:
            self.close()
            raise

    @classmethod
    def at(cls, state: str) -> "Site":
        """The site that another process left up; `close` does nothing when it is gone."""
        self = cls.__new__(cls)
        words = json.loads(state)
        self.jumphost, self.gateway, *self.hosts = (Machine(**m) for m in words["machines"])
        # the number may be another process's by now
        self._holder = words["holder"] if _space(words["holder"]) == words["space"] else 0
        self._stay, self._processes = True, []
        return self

    def state(self) -> str:
        machines = [vars(machine) for machine in self.machines]
        space = _space(self._holder)
        return json.dumps({"holder": self._holder, "space": space, "machines": machines})

    @property
    def machines(self) -> list[Machine]:
        return [self.jumphost, self.gateway, *self.hosts]

    def close(self) -> None:
        """End every process; with them go the networks, the mounts and the files."""
        if not self._holder:
            return
        kill(self._holder)  # the first of a process namespace: the kernel ends all others with it
        for machine in self.machines:
            self._wait_for(machine.starter)
        for process in self._processes:
            process.wait()

    def kill(self, machine: Machine) -> None:
        """The machine dies at once; its disk stays, for `boot`."""
        kill(machine.init)
        self._wait_for(machine.starter)
        for bridge in machine.addresses:
            with suppress(subprocess.CalledProcessError):  # gone with the machine's network
                self._switch(f"link delete {machine.name}-{bridge[:3]}")

    def boot(self, machine: Machine) -> None:
        """Start a machine that was killed: its disk is as it was, /tmp and /run are empty."""
        self._launch(machine)
        self._connect(machine)

    def copy_checkout(self) -> None:
        """Bring this checkout, as it is now, to the jumphost with its .git, and to the hosts."""
        listed = _run("git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard").split("\0")
        paths = [path for path in listed if path and os.path.lexists(ROOT / path)]
        for machine in (self.jumphost, *self.hosts):
            folder = self._disk(machine) / "srv/mixed"
            for path in folder.iterdir():
                if path.name not in (*SHARED, ".cluster"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            history = [".git"] * (machine is self.jumphost)
            archive = _archive([*paths, *history])
            subprocess.run(["tar", "-C", str(folder), "-xf", "-"], input=archive, check=True)

    def _hold(self) -> None:
        """Start the holder, pid 1 of a process namespace; add the bridges and room for disks."""
        guard = [] if self._stay else [which("setpriv"), "--pdeathsig", "KILL"]
        spaces = ("--kill-child", "--fork", "--pid", "--mount-proc", "--net")
        outer = self._popen([*guard, which("unshare"), *spaces, "sleep", "infinity"])

        def is_there() -> bool:
            if outer.poll() is not None:
                raise RuntimeError("cannot make namespaces: `unshare` ended")
            self._holder = last_child(outer.pid)
            return command_of(self._holder).startswith("sleep")

        wait_until(is_there, "the holder of the namespaces")
        self._in_holder("-m", "mount", "-t", "tmpfs", "-o", "mode=755", "site", STORE)
        for bridge in ("outside", "inside"):
            self._switch(f"link add {bridge} type bridge")
            self._switch(f"link set {bridge} up")

    def _make_disks(self) -> None:
        """The files of each machine: keys, names, and an empty repository."""
        disks = self._disk()
        for name in SHARED:
            (disks / "shared" / name).mkdir(parents=True)
        for machine in self.machines:
            disk = self._disk(machine)
            for name in ("etc/ssh", "root/.ssh", "srv", "var/log", "var/tmp"):
                (disk / name).mkdir(parents=True)
            (disk / "root/.ssh").chmod(0o700)
            for name in SHARED if machine in self.hosts else ():
                (disk / "srv/mixed" / name).mkdir(parents=True)
            for name in _SYSTEM_FILES:
                if Path("/etc", name).exists():
                    _run("cp", "-a", f"/etc/{name}", f"{disk}/etc")
            _make_key(disk / "etc/ssh/host_key")
        (self._disk(self.jumphost) / "srv/mixed").mkdir()
        key = self._disk(self.jumphost) / "root/.ssh/id_ed25519"
        _make_key(key)
        names = "".join(f"{m.address} {m.name}\n" for m in self.machines)
        known = ""
        for machine in self.machines:
            public = (self._disk(machine) / "etc/ssh/host_key.pub").read_text()
            known += f"{','.join([machine.name, *machine.addresses.values()])} {public}"
        (key.parent / "known_hosts").write_text(known)
        for machine in self.machines:
            etc = self._disk(machine) / "etc"
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (etc / "hostname").write_text(f"{machine.name}\n")
            (etc / "passwd").write_text(_PASSWD)
            (etc / "shadow").write_text(_SHADOW)
            (etc / "group").write_text("root:x:0:\nnogroup:x:65534:\ntty:x:5:\n")
            (etc / "ssh/sshd_config").write_text(_SSHD)
            shutil.copy(f"{key}.pub", etc / "ssh/authorized_keys")

    def _launch(self, machine: Machine) -> None:
        """Start the machine's first processes: bwrap's own, and sshd."""
        disk = f"{STORE}/{machine.name}"
        words = [which("bwrap"), "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        words += ["--unshare-uts", "--hostname", machine.name, "--cap-add", "ALL", "--clearenv"]
        words += [
            "--setenv",
            "PATH",
            PATH,
            "--ro-bind",
            "/usr",
            "/usr",
            "--ro-bind",
            "/sys",
            "/sys",
        ]
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):
                words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                words += ["--ro-bind", f"/{name}", f"/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "--dir", "/run/sshd"]
        words += ["--perms", "1777", "--tmpfs", "/dev/shm", "--perms", "1777", "--tmpfs", "/tmp"]
        for name in ("etc", "root", "srv", "var"):
            words += ["--bind", f"{disk}/{name}", f"/{name}"]
        if machine in self.hosts:
            for name in SHARED:
                words += ["--bind", f"{STORE}/shared/{name}", f"{REPOSITORY}/{name}"]
        for prefix in PREFIXES if machine in self.hosts else PREFIXES[-1:]:
            if not prefix.startswith("/usr"):
                words += ["--ro-bind", prefix, prefix]
        words += ["--chdir", "/root", which("sshd"), "-D", "-E", "/var/log/sshd.log"]
        enter = (which("nsenter"), "--target", str(self._holder), "-m", "-n", "-p", "--")
        machine.starter = self._popen(
            [*enter, *words], self._disk(machine) / "var/log/boot.log"
        ).pid

    def _connect(self, machine: Machine) -> None:
        """Wait for the machine to be up, and plug it in."""
        starter = next(p for p in self._processes if p.pid == machine.starter)

        def is_up() -> bool:
            if starter.poll() is not None:
                log = (self._disk(machine) / "var/log/boot.log").read_text()
                raise RuntimeError(f"{machine.name} did not start: {log}")
            sshd = last_child(starter.pid)
            machine.init = psutil.Process(sshd).ppid()
            return command_of(sshd).startswith("sshd:") and machine.listens(22)

        wait_until(is_up, f"{machine.name}'s sshd")
        for number, (bridge, address) in enumerate(machine.addresses.items()):
            link, near = f"{machine.name}-{bridge[:3]}", f"eth{number}"
            # the same after a boot, as a network card's: neighbours remember it
            mac = "02:00" + "".join(f":{int(part):02x}" for part in address.split("."))
            peer = f"peer name {near} address {mac} netns {machine.init}"
            self._switch(f"link add {link} type veth {peer}")
            self._switch(f"link set {link} master {bridge} up")
            machine.ip(f"address add {address}/24 dev {near}")
        machine.start_network()

    def _popen(
        self, words: Sequence[str], log: Path = Path(os.devnull)
    ) -> "subprocess.Popen[bytes]":
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._processes.append(process)
        return process

    def _wait_for(self, pid: int) -> None:
        """Wait for a process that has nothing more to do but to end."""
        for process in self._processes:
            if process.pid == pid:
                process.wait()
        wait_until(lambda: not psutil.pid_exists(pid), f"process {pid}")

    def _disk(self, machine: Machine | None = None) -> Path:
        """The machine's files, alive or not; without one, the folder of all."""
        store = Path(f"/proc/{self._holder}/root{STORE}")
        return store / machine.name if machine else store

    def _switch(self, words: str) -> None:
        self._in_holder("-n", "ip", *words.split())

    def _in_holder(self, space: str, *words: str) -> None:
        _run("nsenter", "-t", str(self._holder), space, *words)


def which(program: str) -> str:
    """Where a program is; sshd insists on its full path."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(f"cannot find the program {program}; install its package")
    return found


def missing() -> str:
    """Why there can be no site here; empty when there can."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    try:
        for program in PROGRAMS:
            which(program)
        apart = "--unshare-pid --unshare-net --ro-bind / / --proc /proc --dev /dev"
        probe = (
            f"{which('ip')} link add name probe type bridge && mount -t tmpfs probe {STORE} && "
            f"{which('bwrap')} {apart} true"
        )
        _run("unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", probe)
    except FileNotFoundError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return f"cannot make namespaces with a network here: {error.stderr.strip()}"
    return ""


def wait_until(
    condition: Callable[[], object], what: str, *, deadline_s: float = DEADLINE_S
) -> None:
    """Look until it holds.

    Raises:
        TimeoutError: it did not hold in time.
    """
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline_s} s for {what}")
        time.sleep(0.05)


def kill(pid: int) -> None:
    """End a process, which is the first of its process namespace, and wait until it is gone."""
    if pid:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.send_signal(signal.SIGKILL)
            wait_until(lambda: not process.is_running() or process.status() == "zombie", f"{pid}")


def last_child(pid: int) -> int:
    """The youngest of a line of only children."""
    while below := psutil.Process(pid).children():
        pid = below[0].pid
    return pid


def _space(pid: int) -> str:
    """The process namespace of a process; empty without the process."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _make_key(path: Path) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path))


def _archive(paths: Sequence[str]) -> bytes:
    """A tar archive of files of this checkout.

    Exit 1 says that a file changed while it was read: a `git status` of another test writes to
    `.git`. Then the archive is made again.
    """
    command = ["tar", "-C", str(ROOT), "--null", "-T", "-", "-cf", "-"]
    files, tries = "\0".join(paths).encode(), 20
    while True:
        done = subprocess.run(command, input=files, stdout=subprocess.PIPE, check=False)
        tries -= 1
        if done.returncode != 1 or not tries:
            done.check_returncode()
            return done.stdout


def _run(*words: str) -> str:
    program = which(words[0])
    done = subprocess.run([program, *words[1:]], check=True, capture_output=True, text=True)
    return done.stdout

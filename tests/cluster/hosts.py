"""Real hosts on one Linux machine, for the launchers: namespaces that a process holds, so that they end with it.

    with Hosts(2, folder) as hosts:
        hosts[0].run(["hostname"]); hosts[1].processes(); hosts[1].link("down")

Each host has its own host name, loopback, interface eth0 (and eth1, ...) on a switch, process numbers, /dev/shm, /run,
/etc/hosts (in which its own name is 127.0.1.1, as Debian writes it), and an sshd with a key of its own. All other files
are shared. The switch is a bridge in a namespace of its own: nothing is added to the machine's network, and no packet
leaves. Nobody's ~/.ssh is read: `hosts.ssh_options` names a configuration made for the test.

The kernel ends every process of a host with its first one, and that one when the process that made it ends, killed or
not: nothing can be left behind. Not here: containers (one file system, one user), and hosts that differ in speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "sshd", "ssh", "ssh-keygen", "pdsh", "mpirun")
HELD = ("setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child=KILL", "--fork", "--pid", "--mount-proc", "--net")
START = """
set -e
read -r _  # until the links are in
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
hostname "$2"
ip link set lo up
number=0
for address in $3; do
    ip address add "$address/24" dev "eth$number"
    ip link set "eth$number" up
    number=$((number + 1))
done
exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -E "$1/sshd.log" -f "$1/sshd_config"
"""
SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {keys}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
Subsystem sftp internal-sftp
"""
SSH = """
IdentityFile {keys}/key
IdentitiesOnly yes
UserKnownHostsFile {keys}/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
BatchMode yes
"""


def why_not() -> str | None:
    """What keeps this machine from having hosts, in words; None where nothing does."""
    if os.geteuid() != 0:
        return "hosts are network namespaces: only root makes them"
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed; `make cluster-test` installs what it needs on Debian"
    tried = subprocess.run([*HELD, "--uts", "--mount", "--ipc", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _first_process(holder: subprocess.Popen[bytes]) -> int:
    """The process, by its number out here, that is number 1 in there."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        assert holder.poll() is None, "a host ended while it was made"
        for child in psutil.Process(holder.pid).children():
            if os.readlink(f"/proc/{child.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                return child.pid
        time.sleep(0.02)
    raise AssertionError("a host did not start within 20 s")


@dataclass(frozen=True)
class Host:
    """One of them. pid: its first process, as numbered out here."""

    name: str
    addresses: tuple[str, ...]
    pid: int
    switch: int

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--ipc", "--pid", "--", *command]

    def start(
        self, command: Sequence[str], *, folder: Path, output: Path, environ: dict[str, str]
    ) -> subprocess.Popen[str]:
        """The command in `folder`; nsenter passes no signal on: see `signal`."""
        words = self.inside(["env", "-C", str(folder), *command])
        with output.open("a") as file:
            return subprocess.Popen(
                words, env={"PATH": os.environ["PATH"]} | environ, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip

    def signal(self, started: subprocess.Popen[str], number: int) -> None:
        """To what `start` started."""
        psutil.Process(started.pid).children()[0].send_signal(number)

    def run(self, command: Sequence[str], *, timeout: float = 60) -> str:
        done = subprocess.run(self.inside(command), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{command} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All that run on it but its sshd's."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                theirs = os.readlink(f"/proc/{process.pid}/ns/pid")
            except OSError:
                continue
            if theirs == mine and process.pid != self.pid and not (process.info["name"] or "").startswith("sshd"):
                found.append(process)
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def link(self, state: str) -> None:
        """Pull its cables out of the switch ("down"), or put them back ("up")."""
        for number in range(len(self.addresses)):
            self._at_switch("ip", "link", "set", f"{self.name}-{number}", state)

    def lose(self, folder: Path) -> None:
        """Take a shared folder away from it, as a network file system goes with its network."""
        self.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)])

    def rate(self, kilobits: int | None) -> None:
        """Let no more than that through to it in a second; None: as much as it takes."""
        for number in range(len(self.addresses)):
            port = f"{self.name}-{number}"
            limit = ["tbf", "rate", f"{kilobits}kbit", "burst", "10kb", "latency", "1s"] if kilobits else ["noqueue"]
            self._at_switch("tc", "qdisc", "replace", "dev", port, "root", *limit)

    def _at_switch(self, *command: str) -> None:
        _call("nsenter", f"--target={self.switch}", "--net", "--", *command)


class Hosts:
    """with Hosts(count, folder) as hosts: the hosts w0, w1, ...; `networks`: interfaces a host has."""

    def __init__(self, count: int, folder: Path, *, networks: int = 1):
        self.folder = folder
        self.count, self.networks = count, networks
        self._hosts: list[Host] = []
        self._holders: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def ssh_options(self) -> str:
        return f"-F {self.folder}/ssh_config"

    def hostfile(self, path: Path, *, slots: int = 1) -> Path:
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self._hosts))
        return path

    def processes(self) -> list[psutil.Process]:
        return [process for host in self._hosts for process in host.processes()]

    def __enter__(self) -> Hosts:
        try:
            self._make_keys()
            switch = self._hold(["bash", "-c", "while sleep 1000; do :; done"])
            for number in range(self.networks):
                _call("nsenter", f"--target={switch}", "--net", "ip", "link", "add", f"net{number}", "type", "bridge")
                _call("nsenter", f"--target={switch}", "--net", "ip", "link", "set", f"net{number}", "up")
            for number in range(self.count):
                self._hosts.append(self._make(f"w{number}", number, switch))
            for host in self._hosts:
                self._wait_for_sshd(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _hold(self, command: Sequence[str]) -> int:
        words = [*HELD, "--uts", "--mount", "--ipc", "--", *command]
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        self._holders.append(holder)
        return _first_process(holder)

    def _addresses(self, number: int) -> tuple[str, ...]:
        return tuple(f"10.77.{network}.{number + 1}" for network in range(self.networks))

    def _make_keys(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "ssh_config").write_text(SSH.format(keys=self.folder))
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key"))
        known = []
        for number in range(self.count):
            mine = self.folder / f"w{number}"
            mine.mkdir()
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(mine / "host_key"))
            known.append(f"w{number},{self._addresses(number)[0]} {(mine / 'host_key.pub').read_text()}")
            names = [f"{self._addresses(n)[0]} w{n}\n" for n in range(self.count) if n != number]
            (mine / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 w{number}\n{''.join(names)}")
            (mine / "sshd_config").write_text(SSHD.format(folder=mine, keys=self.folder))
        (self.folder / "known_hosts").write_text("".join(known))

    def _make(self, name: str, number: int, switch: int) -> Host:
        addresses = self._addresses(number)
        pid = self._hold(["bash", "-c", START, "host", str(self.folder / name), name, " ".join(addresses)])
        for network in range(self.networks):
            port = f"{name}-{network}"
            _call(
                "ip", "link", "add", f"eth{network}", "netns", str(pid),
                "type", "veth", "peer", "name", port, "netns", str(switch),
            )  # fmt: skip
            _call("nsenter", f"--target={switch}", "--net", "ip", "link", "set", port, "master", f"net{network}", "up")
        stdin = self._holders[-1].stdin
        assert stdin is not None
        stdin.write(b"go\n")
        stdin.close()
        return Host(name, addresses, pid, switch)

    def mend(self) -> None:
        """All cables back, and every host reached from every other: what one was told of a lost one lasts seconds."""
        for host in self._hosts:
            host.link("up")
        for host in self._hosts:
            for other in self._hosts:
                self._wait_for_sshd(host, seen_from=other)

    def _wait_for_sshd(self, host: Host, *, seen_from: Host | None = None) -> None:
        end = time.monotonic() + 20
        knock = ["bash", "-c", f"exec 3<>/dev/tcp/{host.addresses[0]}/22"]
        while subprocess.run((seen_from or host).inside(knock), stderr=subprocess.DEVNULL).returncode != 0:
            assert time.monotonic() < end, f"{host.name}: no sshd; see {self.folder}/{host.name}/sshd.log"
            time.sleep(0.05)

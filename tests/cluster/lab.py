"""Hosts on one machine: each with its own network, host name, processes and sshd, in Linux namespaces. Needs root."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

NETWORK, NETWORK_6 = "10.77.0", "fd77::"
HAS_IPV6 = Path("/proc/sys/net/ipv6").exists()
_PROGRAMS = {"ip": "iproute2", "nft": "nftables", "sshd": "openssh-server", "ssh": "openssh-client",
             "ssh-keygen": "openssh-client", "unshare": "util-linux", "nsenter": "util-linux"}  # fmt: skip
DAEMONS = ("munged", "slurmctld", "slurmd")
_ENTRY = "from distlaunch.cli.main import main; main()"
# as the installed script starts: the current directory is not searched for modules
COMMAND = [sys.executable, "-P", "-c", _ENTRY]


def what_is_missing(programs: Mapping[str, str] = _PROGRAMS) -> str:
    """Return why hosts cannot be made on this machine; empty if they can.

    Args:
        programs: what is needed, with the Debian package of each.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, for network namespaces"
    missing = sorted({package for name, package in programs.items() if _program(name) is None})
    if missing:
        return f"needs the packages {', '.join(missing)}"
    name = f"dlprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], stderr=subprocess.DEVNULL).returncode:
        return "network namespaces may not be made here"
    _run("ip", "netns", "del", name)
    return ""


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _run(*words: str) -> None:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}"


class Job:
    """A command of distlaunch on a host."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.output = ""
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Waits until the command has printed a text."""
        self.wait_until(lambda: text in self.output, seconds)

    def wait_until(self, is_there: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until the output meets a condition."""
        with self._grown:
            found = self._grown.wait_for(lambda: is_there() or not self._reader.is_alive(), seconds)
        assert found, self.output
        assert is_there(), self.output

    @property
    def said(self) -> str:
        """Return the output, without the line breaks of the screen."""
        return " ".join(self.output.split())

    def end(self, seconds: float = 120) -> int:
        """Wait for the end of the command, and return its exit code."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None
        self._reader.join(seconds)
        return code

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 65536):
            with self._grown:
                self.output += data.decode(errors="replace")
                self._grown.notify_all()
        with self._grown:
            self._grown.notify_all()


class Lab:
    """A login host, number 0, and others, on one bridge.

    Args:
        folder: for keys, logs and ssh's settings.
        own_disk: a folder that each host but the login host has for itself.
    """

    def __init__(self, folder: Path, num_hosts: int, own_disk: Path) -> None:
        self.folder, self._own_disk = folder, own_disk
        self._prefix = f"dl{os.getpid()}x"
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._jobs: list[Job] = []
        self.names = [f"host{number}" for number in range(num_hosts + 1)]
        self._write_settings()
        _run("ip", "netns", "add", f"{self._prefix}s")
        _run("ip", "-n", f"{self._prefix}s", "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", f"{self._prefix}s", "link", "set", "br0", "up")
        for number in range(num_hosts + 1):
            self._add_network(number)
            self.up(number)

    def address(self, number: int) -> str:
        return f"{NETWORK}.{10 + number}"

    def add_ipv6(self) -> None:
        """Gives each host a second address, until `clean`."""
        for number in range(len(self.names)):
            address = f"{NETWORK_6}{10 + number}/64"
            # usable at once: nobody else has it
            _run("ip", "-n", f"{self._prefix}{number}", "addr", "add", address, "dev", "eth0", "nodad")

    def up(self, number: int) -> None:
        """Starts a host; it has only what is on the shared disk."""
        home = self.folder / self.names[number]
        ready, tell = os.pipe()
        mounts = "" if number == 0 else f"mount -t tmpfs tmpfs {self._own_disk};"
        # the shell is process 1 of the host: when it is killed, so is everything on it
        script = (
            f"hostname {self.names[number]}; mount --bind {self.folder}/hosts /etc/hosts; {mounts}"
            "mount -t tmpfs tmpfs /run; mkdir -p /run/sshd;"
            f"{_program('sshd')} -f {home}/sshd_config -E {home}/sshd.log;"
            f"echo up >&{tell}; exec {tell}>&-; exec tail -f /dev/null"
        )
        self._hosts[number] = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self._prefix}{number}", "unshare", "-m", "-u", "-p", "-f", "--mount-proc",
             "--kill-child", "bash", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(tell,),
        )  # fmt: skip
        os.close(tell)
        assert select.select([ready], [], [], 20)[0], f"{self.names[number]} does not come up"
        assert os.read(ready, 10), f"{self.names[number]} does not come up"
        os.close(ready)

    def kill(self, number: int) -> None:
        """Kill a host like a power failure: none of its processes can close connections."""
        self.cut(number)
        there = self.processes(number, everything=True)
        host = self._hosts.pop(number)
        # its first process ends with it, and so all others
        host.kill()
        host.wait()
        psutil.wait_procs(there, 20)

    def cut(self, number: int, other: int | None = None) -> None:
        """Cut the connection between two hosts, or between a host and all others, in both directions."""
        packets = f"ip saddr {self.address(other)}" if other is not None else ""
        rules = (
            f"add chain inet fault in {{ type filter hook input priority 0; }}; add rule inet fault in {packets} drop"
        )
        if other is None:
            rules += "; add chain inet fault out { type filter hook output priority 0; }; add rule inet fault out drop"
        _run("ip", "netns", "exec", f"{self._prefix}{number}", _program("nft") or "", f"add table inet fault; {rules}")

    def start(self, *words: str, folder: Path | None = None) -> Job:
        """Starts a command of distlaunch on the login host."""
        return self.run(0, [*COMMAND, *words], folder=folder)

    def run(self, number: int, words: Sequence[str], folder: Path | None = None, **environ: str) -> Job:
        """Starts a program on a host."""
        leader = psutil.Process(self._hosts[number].pid).children()[0].pid
        inside = ["nsenter", "-t", str(leader), "-m", "-u", "-n", "-p", f"--wd={folder or os.getcwd()}"]
        env = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}:/usr/sbin", **environ}
        process = subprocess.Popen(
            [*inside, *words], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._jobs.append(job := Job(process))
        return job

    def processes(self, number: int, *, everything: bool = False) -> list[psutil.Process]:
        """Return the processes on a host, without those that make it a host."""
        network = os.stat(f"/run/netns/{self._prefix}{number}").st_ino
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            try:
                is_here = os.stat(f"/proc/{process.pid}/ns/net").st_ino == network
            except OSError:
                continue
            # a server that was cut off keeps a session without a program in it, until its TCP gives up
            program = os.path.basename(words[0]) if words else ""
            told = " ".join(words)
            makes_host = (
                program in ("unshare", "tail", "bash", *DAEMONS) or told.startswith("sshd: ") or "slurmscriptd" in told
            )
            if is_here and words and (everything or not makes_host):
                found.append(process)
        return found

    def task(self, number: int, name: str) -> psutil.Process:
        """The process of a task on a host."""
        return next(
            process
            for process in self.processes(number)
            if "distlaunch.tasks.worker" in process.cmdline() and name in process.cmdline()
        )

    def launcher(self, job: Job) -> psutil.Process:
        """Return the launcher's own process; the process that was started has only entered the host."""
        return next(each for each in psutil.Process(job.pid).children() if _ENTRY in each.cmdline())

    def files(self, number: int, folder: Path) -> list[str]:
        """Return the names in a folder of a host."""
        leader = psutil.Process(self._hosts[number].pid).children()[0].pid
        return os.listdir(f"/proc/{leader}/root{folder}")

    def left(self, seconds: float = 20) -> list[str]:
        """Return the processes that still run on any host after some time, in which ending processes may end."""
        running = [process for number in self._hosts for process in self.processes(number)]
        _, alive = psutil.wait_procs(running, seconds)
        found = []
        for process in alive:
            # one that has just ended, and nobody has reaped
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return found

    def clean(self) -> None:
        """Ends what a test has left, and gives every host its network back."""
        for job in self._jobs:
            job.close()
        self._jobs.clear()
        for number in range(len(self.names)):
            if number in self._hosts:
                for process in self.processes(number):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            else:  # and nothing is killed there: its sshd has no name yet by which it is known
                self.up(number)
            tables = ["ip", "netns", "exec", f"{self._prefix}{number}", _program("nft") or "", "flush", "ruleset"]
            subprocess.run(tables, check=True)
            if HAS_IPV6:
                space = f"{self._prefix}{number}"
                _run("ip", "-n", space, "-6", "addr", "flush", "dev", "eth0", "scope", "global")

    def down(self) -> None:
        self.clean()
        for host in self._hosts.values():
            host.kill()
            host.wait()
        for name in [*(f"{self._prefix}{number}" for number in range(len(self.names))), f"{self._prefix}s"]:
            _run("ip", "netns", "del", name)

    def _add_network(self, number: int) -> None:
        space, switch = f"{self._prefix}{number}", f"{self._prefix}s"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", f"v{number}", "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "-n", switch, "link", "set", f"v{number}", "master", "br0", "up")
        _run("ip", "-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")

    def _write_settings(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        key, known = self.folder / "id", self.folder / "known_hosts"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        # a name that means the host itself by another address, as Debian has it
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{self.address(number)} {name}" for number, name in enumerate(self.names)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        for number, name in enumerate(self.names):
            home = self.folder / name
            home.mkdir()
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "host_key"))
            public = " ".join((home / "host_key.pub").read_text().split()[:2])
            with known.open("a") as file:
                file.write(f"{name},{self.address(number)} {public}\n")
            (home / "sshd_config").write_text(
                f"ListenAddress {self.address(number)}\nHostKey {home}/host_key\nAuthorizedKeysFile {key}.pub\n"
                "StrictModes no\nPidFile none\nUsePAM no\nPermitRootLogin prohibit-password\n"
                f"PasswordAuthentication no\nSetEnv BASH_ENV={self.folder}/bashrc\n"
            )
        (self.folder / "ssh_config").write_text(
            f"User root\nIdentityFile {key}\nIdentitiesOnly yes\nUserKnownHostsFile {known}\n"
            "GlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n"
        )
        # as a start-up file of a shell that greets whoever comes
        (self.folder / "bashrc").write_text("echo Welcome; echo 'to this host' >&2\n")
        (self.folder / "bin").mkdir()
        wrapper = self.folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {_program("ssh")} -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)

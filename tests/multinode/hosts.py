"""Hosts for tests: network namespaces with an sshd each, joined by a bridge. Needs root, iproute2, sshd and pdsh.

A host sees the files of this machine, and its processes can be listed. Nothing outside the namespaces is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("ip", "tc", "pdsh", "ssh", "sshd", "ssh-keygen")


def why_impossible() -> str | None:
    """Return why this machine can have no such hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: openssh-server pdsh iproute2)"
    name = f"dsprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"network namespaces are not permitted: {made.stderr.strip()}" if made.returncode else None


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


class Hosts:
    """`count` hosts, 10.77.0.1 and up; a context manager that takes them down with all that runs on them.

    folder: for keys, configurations and the hostfile, which gives each host a rank.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.hostfile = folder / "hostfile"
        self._switch = f"ds{os.getpid()}s"
        self.names = [f"ds{os.getpid()}h{number}" for number in range(count)]  # Names of the network namespaces

    def __enter__(self) -> Hosts:
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("id", "hostkey"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        shutil.copy(self.folder / "id.pub", self.folder / "authorized_keys")
        (self.folder / "config").write_text(
            f"Host 10.77.0.*\n  IdentityFile {self.folder}/id\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        programs = self.folder / "bin"
        programs.mkdir()
        wrapper = programs / "ssh"  # pdsh and deepspeed call ssh by name
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/config "$@"\n')
        wrapper.chmod(0o755)
        self.hostfile.write_text("".join(f"{address} slots=1\n" for address in self.addresses))
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _do("ip", "netns", "add", name)
            port = f"port{number}"
            _do("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
            _do("ip", "-n", self._switch, "link", "set", port, "up")
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "eth0", "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            self._start_sshd(number, name, address)
        return self

    def _start_sshd(self, number: int, name: str, address: str) -> None:
        configuration = self.folder / f"sshd{number}.conf"
        lines = (
            f"ListenAddress {address}",
            f"HostKey {self.folder}/hostkey",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            f"PidFile {self.folder}/sshd{number}.pid",
            "StrictModes no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "UsePAM no",
        )
        configuration.write_text("\n".join(lines) + "\n")
        sshd = shutil.which("sshd", path=_path())
        _do("ip", "netns", "exec", name, sshd, "-f", str(configuration))

    def __exit__(self, *exception: object) -> None:
        for name in self.names:
            for process in self.all_processes(name):
                process.kill()
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "netns", "del", self._switch], capture_output=True)

    def start(self, command: Sequence[str], output: Path, cwd: Path) -> subprocess.Popen:
        """Start a command on the first host, its output in a file."""
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{_path()}",
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
        }
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[0], *command],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def processes(self, *hosts: int) -> list[psutil.Process]:
        """Return what runs on some hosts, or all, without their ssh daemons and whatever pytest started there."""
        ours = {process.pid for process in psutil.Process().children(recursive=True)}
        names = [self.names[host] for host in hosts] or self.names
        found = [p for name in names for p in self.all_processes(name) if p.pid not in ours]
        return [process for process in found if _name(process) not in ("sshd", "")]

    def cut_link(self, host: int) -> None:
        """Take a host's link down: nothing arrives, and nobody is told."""
        _do("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def all_processes(self, name: str) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        found = []
        for pid in listed.split():
            try:
                found.append(psutil.Process(int(pid)))
            except psutil.NoSuchProcess:
                continue
        return found


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

"""Machines for a test: network namespaces with addresses of their own, on a bridge in one more."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Returned = TypeVar("Returned")
BRIDGE, GATEWAY = "bridge", "10.77.0.254"
CLONE_NEWNET = 0x40000000
LISTEN = "0A"  # as /proc/net/tcp has it


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not shutil.which("ip"):
        return "needs iproute2, for network namespaces"
    probe = f"protofed-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        made = subprocess.run(["ip", "netns", "del", probe], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


class Machines:
    """Some machines with a folder each; `close` ends all that runs on them and takes them away."""

    def __init__(self, home: Path, addresses: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.addresses, self.environment = addresses, environment
        self.folders = {name: home / name for name in addresses}
        self._names = {name: f"protofed-{os.getpid()}-{name}" for name in (BRIDGE, *addresses)}
        _remove_old()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _ip("netns", "add", self._names[BRIDGE])
        self._in(BRIDGE, "link", "add", "br0", "type", "bridge")
        self._in(BRIDGE, "addr", "add", f"{GATEWAY}/24", "dev", "br0")
        self._in(BRIDGE, "link", "set", "br0", "up")
        for name, address in self.addresses.items():
            self.folders[name].mkdir(parents=True)
            _ip("netns", "add", self._names[name])
            peer = ("peer", "name", name, "netns", self._names[BRIDGE])
            self._in(name, "link", "add", "eth0", "type", "veth", *peer)
            self._in(BRIDGE, "link", "set", name, "master", "br0", "up")
            self._in(name, "link", "set", "lo", "up")
            self._in(name, "addr", "add", f"{address}/24", "dev", "eth0")
            self._in(name, "link", "set", "eth0", "up")
            self._in(name, "route", "add", "default", "via", GATEWAY)  # who calls out is heard, and not answered

    def _in(self, name: str, *words: str) -> None:
        _ip("-n", self._names[name], *words)

    def cable(self, name: str, state: str) -> None:
        """Pull a machine's cable out (`down`), or put it in (`up`)."""
        self._in(BRIDGE, "link", "set", name, state)

    def start(self, name: str, code: str, log: Path) -> "subprocess.Popen[bytes]":
        """Some bash on a machine, in its folder; it ends at the first command that fails."""
        folder = self.folders[name]
        words = ["ip", "netns", "exec", self._names[name], "bash", "-e", "-o", "pipefail", "-c", code]
        own = {**self.environment, "HOME": str(folder), "HOSTNAME": name}
        with open(log, "ab") as file:
            return subprocess.Popen(words, cwd=folder, env=own, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def inside(self, name: str, do: Callable[[], Returned]) -> Returned:
        """Call it in a machine's network: the sockets that it makes are that machine's."""

        def enter() -> Returned:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{self._names[name]}", "rb") as place:
                if libc.setns(place.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {name}")
            return do()

        with ThreadPoolExecutor(1) as thread:  # which alone enters
            return thread.submit(enter).result()

    def listening(self, name: str) -> set[tuple[bool, int]]:
        """The TCP ports on which a machine listens, and whether on loopback only."""

        def read() -> set[tuple[bool, int]]:
            found = set()
            for table in ("tcp", "tcp6"):
                lines = Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]
                for address, port in (line.split()[1].split(":") for line in lines if line.split()[3] == LISTEN):
                    found.add((address in ("0100007F", "00000000000000000000000001000000"), int(port, 16)))
            return found

        return self.inside(name, read)

    def processes(self) -> list[int]:
        """All that run on the machines, whoever started them."""
        return [pid for name in self._names.values() for pid in _processes(name)]

    def signal(self, name: str, number: signal.Signals) -> None:
        """To all processes of a machine; twice, for those that were just being started."""
        for _ in range(2):
            for pid in _processes(self._names[name]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """End every process on the machines by its id, and remove the machines."""
        for name in self._names.values():
            _remove(name)


def _remove_old() -> None:
    """Machines of a test that was killed."""
    for name in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split():
        owner = re.match(r"protofed-(\d+)-", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(name)


def _processes(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()
    return [int(word) for word in listed if int(word) != os.getpid()]


def _remove(name: str) -> None:
    end = time.monotonic() + 10
    while (left := _processes(name)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")

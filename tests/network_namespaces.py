"""Two hosts on one machine: network namespaces joined by one cable, each with its own name, address and processes. Test support only.

    hosta 10.77.0.1 ---- veth pair ---- hostb 10.77.0.2

A command on a host sees its own loopback, its own /etc/hosts and host name, and only processes of that host. Files are shared, as on
a cluster. Nothing is left on the machine: names carry this process's id, and what a killed test left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

HOSTS = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}
_PREFIX = "mppo"
_ENTER = 'echo "$1" > /proc/sys/kernel/hostname; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class TwoHosts:
    """A context manager. ``why_not`` tells beforehand whether the machine allows it."""

    def __init__(self, folder: Path) -> None:
        """``folder`` gets the hosts file that both hosts read."""
        _remove_left_over()
        self._hosts_file = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in HOSTS.items())]
        self._hosts_file.write_text("\n".join(lines) + "\n", encoding="ascii")

    def __enter__(self) -> TwoHosts:
        names = list(HOSTS)
        try:
            for name in names:
                _ip("netns", "add", self._namespace(name))
            _ip("link", "add", self._cable(names[0]), "type", "veth", "peer", "name", self._cable(names[1]))
            for name in names:
                _ip("link", "set", self._cable(name), "netns", self._namespace(name))
                self._ip(name, "addr", "add", f"{HOSTS[name]}/24", "dev", self._cable(name))
                self._ip(name, "link", "set", "lo", "up")
                self._ip(name, "link", "set", self._cable(name), "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """``command`` as it is run on ``host``. Its end, however it comes, is the end of all that it has started."""
        own_world = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["sh", "-c", _ENTER, "sh", host, str(self._hosts_file)]
        return ["ip", "netns", "exec", self._namespace(host), *own_world, *enter, *command]

    def pull_the_cable(self) -> None:
        """No packet passes between the hosts any more, and nobody is told."""
        self._ip("hostb", "link", "set", self._cable("hostb"), "down")

    def plug_it_in(self) -> None:
        """The end of ``pull_the_cable``."""
        self._ip("hostb", "link", "set", self._cable("hostb"), "up")

    def _remove(self) -> None:
        for name in HOSTS:  # the cable goes with the first namespace that has an end of it
            with contextlib.suppress(subprocess.CalledProcessError):  # the set-up may have failed before it was made
                _ip("netns", "del", self._namespace(name))

    def _namespace(self, host: str) -> str:
        return f"{_PREFIX}{os.getpid()}{host[-1]}"

    def _cable(self, host: str) -> str:
        return f"v{os.getpid()}{host[-1]}"

    def _ip(self, host: str, *arguments: str) -> None:
        _ip("-n", self._namespace(host), *arguments)


def why_not() -> str | None:
    """Why this machine cannot have network namespaces, or None."""
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (packages iproute2, util-linux, mount)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_PREFIX}{os.getpid()}t"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", f"v{os.getpid()}t", "type", "veth", "peer", "name", f"v{os.getpid()}u")
        finally:
            _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


def _remove_left_over() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name, pid in re.findall(rf"^({_PREFIX}(\d+)[a-z])\b", listed, re.M):
        if not Path(f"/proc/{pid}").exists():
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)

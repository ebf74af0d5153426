"""Several "hosts" on one machine: network, mount and host-name namespaces, joined by a bridge.

Each host has an address, a name that the others can resolve, and if asked a disk of its own under one
path; its cable can be pulled. Needs Linux with user namespaces (inside a container that forbids
`unshare`, run with --cap-add SYS_ADMIN) and the commands ip, unshare, nsenter and mount.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import suppress
from pathlib import Path

SETUP = r"""
set -e
mount --make-rprivate /
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
trap 'kill $(jobs -p)' EXIT
for host in $(seq 0 $((COUNT - 1))); do
  unshare --net --mount --uts sleep infinity &
  until [ "$(readlink /proc/$!/ns/uts)" != "$(readlink /proc/$$/ns/uts)" ]; do sleep 0.01; done
  ip link add cable$host type veth peer name eth0 netns $!
  ip link set cable$host master bridge up
  inside="nsenter --target $! --net --mount --uts"
  $inside hostname host$host
  $inside mount --bind "$FOLDER/names" /etc/hosts
  [ -z "$DISK" ] || $inside mount --bind "$FOLDER/disk$host" "$DISK"
  $inside ip link set lo up
  $inside ip addr add 10.77.0.$((host + 1))/24 dev eth0
  $inside ip link set eth0 up
  echo $!
done
cat
"""
NAMESPACES = (
    0x10000000 | 0x40000000 | 0x00020000 | 0x04000000
)  # CLONE_NEWUSER, NEWNET, NEWNS, NEWUTS


class Hosts:
    """Context manager: `count` hosts named host0, host1, ...

    folder: scratch. With `disk`, an empty folder, each host sees its own folder there, which is
    `folder/disk0` and so on from outside.
    """

    def __init__(self, count: int, folder: Path, disk: Path | None = None):
        self.count, self.folder, self.disk = count, Path(folder), disk

    def __enter__(self) -> Hosts:
        names = "".join(f"10.77.0.{h + 1} host{h}\n" for h in range(self.count))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "names").write_text(f"127.0.0.1 localhost\n{names}")
        for host in range(self.count):
            (self.folder / f"disk{host}").mkdir(exist_ok=True)
        env = os.environ | dict(
            COUNT=str(self.count), FOLDER=str(self.folder), DISK=str(self.disk or "")
        )
        self.holder = subprocess.Popen(
            [
                "unshare",
                "--user",
                "--map-root-user",
                "--net",
                "--mount",
                "--uts",
                "bash",
                "-c",
                SETUP,
            ],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pids = [self.holder.stdout.readline().strip() for _ in range(self.count)]
        if not all(self.pids):
            raise OSError(f"no hosts in namespaces: {self.holder.stderr.read()}")
        return self

    def __exit__(self, *_):
        self.holder.communicate("")  # its end of file: the hosts go

    def inside(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return [
            "nsenter",
            "--target",
            self.pids[host],
            "--user",
            "--net",
            "--mount",
            "--uts",
            "--preserve-credentials",
        ]

    def processes(self, host: int) -> list[int]:
        """Process ids of what runs on a host."""
        found, place = [], os.readlink(f"/proc/{self.pids[host]}/ns/net")
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if os.readlink(folder / "ns/net") == place:
                    found.append(int(folder.name))
        return found

    def cable(self, host: int, state: str):
        """Pull a host's cable out (`down`) or plug it in (`up`)."""
        subprocess.run(
            [
                "nsenter",
                "--target",
                str(self.holder.pid),
                "--user",
                "--net",
                "--preserve-credentials",
                "ip",
                "link",
                "set",
                f"cable{host}",
                state,
            ],
            check=True,
        )


def enter(pid: str):
    """Move this process, which must have one thread, to the host of another (`Hosts.pids`) for good."""
    descriptor = os.pidfd_open(int(pid))
    folder = os.getcwd()
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, NAMESPACES):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)
    os.chdir(folder)

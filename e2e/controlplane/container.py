"""Runs one container's command with its own file system, like a container runtime. A separate program.

`process_pod` starts it as root: `python -I container.py SPEC.json`. It creates mount, PID and IPC namespaces, builds a root
from the folders in the specification, drops every right that it does not grant, and runs the
command below a PID 1 that forwards SIGTERM and reaps, as in the agent's image. It uses no image and no separate
network, and does not limit memory or processors. It exits with the command's status, or with 128 plus the signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_IPC, _NEW_PIDS = 0x00020000, 0x08000000, 0x20000000
_READ_ONLY, _NO_SUID, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x2, 0x20, 0x1000, 0x4000, 0x40000
_SET_DEATH_SIGNAL, _DROP_BOUNDING, _SET_NO_NEW_PRIVILEGES = 1, 24, 38
_CAPABILITIES = {"CHOWN": 0, "SYS_PTRACE": 19}
_CAPABILITY_MAX = 40
_DEVICES = ("null", "zero", "full", "random", "urandom")
_EXIT_NO_COMMAND = 127


def main() -> NoReturn:
    """Run the specification in the first argument."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    _call("unshare", _LIBC.unshare(_NEW_MOUNTS | _NEW_IPC | _NEW_PIDS))
    # Signals stay blocked until there is a process to which they can be forwarded.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    first = os.fork()
    if first == 0:
        _be_first(spec)
    _pass_on(first)
    os._exit(_wait(first))


def _be_first(spec: dict[str, Any]) -> NoReturn:
    """Run as PID 1. When this process ends, the kernel ends all other processes of the container."""
    _call("prctl", _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    _build_root(spec)
    command = os.fork()
    if command == 0:
        _become(spec)
    _pass_on(command)
    os._exit(_wait(command))


def _pass_on(pid: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _wait(pid: int) -> int:
    """Reap until `pid` has ended; return its exit status."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _build_root(spec: dict[str, Any]) -> None:
    root = spec["root"]
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", 0, "mode=755,size=16m")
    for name in ("proc", "dev", "sys", "etc"):
        Path(root, name).mkdir()
    _mount("proc", f"{root}/proc", "proc", 0)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    for link, goal in (("fd", "/proc/self/fd"), ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")):
        Path(root, "dev", link).symlink_to(goal)
    # The tree may be below a path on which the pod has a volume, such as /tmp, so it is mounted after that.
    targets = tuple(f"{mount['target'].rstrip('/')}/" for mount in spec["mounts"])
    covered = [source for source in spec["system"] if source.startswith(targets)]
    for source in spec["system"]:
        if source not in covered:
            _copy_link_or_bind(source, root)
    for mount in spec["mounts"]:
        target = f"{root}{mount['target']}"
        if mount["source"] is None:
            Path(target).mkdir(parents=True, exist_ok=True)
            _mount("tmpfs", target, "tmpfs", _NO_SUID, "mode=1777")
        else:
            _bind(mount["source"], target, read_only=mount["read_only"])
    for source in covered:
        _copy_link_or_bind(source, root)
    if spec["read_only_root"]:
        _mount("none", root, "", _REMOUNT | _BIND | _READ_ONLY)
    os.chroot(root)
    os.chdir("/")


def _copy_link_or_bind(source: str, root: str) -> None:
    """Bind a part of this machine's system, such as /usr, into the root. /lib is a link on most machines."""
    target = Path(f"{root}{source}")
    if Path(source).is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(Path(source).readlink())
    elif Path(source).exists():
        _bind(source, str(target), read_only=True)


def _bind(source: str, target: str, *, read_only: bool = False) -> None:
    place = Path(target)
    if Path(source).is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    _mount(source, target, "", _BIND | _RECURSIVE)
    if read_only:
        _mount("none", target, "", _REMOUNT | _BIND | _READ_ONLY)


def _become(spec: dict[str, Any]) -> NoReturn:
    """Execute the command with its user and only the granted rights."""
    _call("prctl", _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    kept = {_CAPABILITIES[name] for name in spec["capabilities"]}
    for number in range(_CAPABILITY_MAX + 1):
        if number not in kept:
            _LIBC.prctl(_DROP_BOUNDING, number, 0, 0, 0)
    if not spec["may_gain_privileges"]:
        _call("prctl", _LIBC.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    os.setgroups(spec["groups"])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])
    try:
        os.execvpe(spec["command"][0], spec["command"], spec["environment"])
    except OSError as error:
        sys.stderr.write(f"{spec['command'][0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_EXIT_NO_COMMAND)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind)]
    _call(f"mount {target}", _LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode() or None))


def _call(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()

"""The memory that a container leaves to this process: its cgroup's limit, which the host's figures do not know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_bytes(root: Path = Path("/")) -> int | None:
    """What all limits that hold for this process leave; None where there is none, as outside of Linux.

    Files of the page cache that nobody uses count as free: the kernel drops them first.
    """
    left = [limit - _used(folder, usage) for folder, limit, usage in _limits(root)]
    return max(0, min(left)) if left else None


def _limits(root: Path) -> Iterator[tuple[Path, int, str]]:
    """The folder of each limit, its bytes, and the name of the file that says what is used. cgroup v2 and v1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        # A limit of a group holds for those in it. In a container the path may be the host's, which is not there.
        for group in (inside, *inside.parents):
            value = _read(base / group / limit).strip()
            if value.isdigit():
                yield base / group, int(value), usage


def _used(folder: Path, usage: str) -> int:
    used = int(_read(folder / usage).strip() or 0)
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return used - int(value)
    return used


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

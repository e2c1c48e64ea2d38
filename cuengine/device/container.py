"""What this process may use of the machine: memory and CPUs, by its control groups' limits and its
own."""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes free by the kernel's own estimate, or what is left of a limit if less: a cgroup's, or
    the process's own (`ulimit -v`, `ulimit -d`).

    Page cache counts as free in the first two. Both cgroup versions are read, each from this
    process's group up to the top.
    """
    free = min([_meminfo(root / "proc/meminfo"), *_own_limits(root / "proc/self")])
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroups(root, "memory"):
            try:
                limit = (folder / limit_name).read_text().strip()
                usage = (folder / usage_name).read_text().strip()
                stat = (folder / "memory.stat").read_text().split()
            except OSError:
                continue
            if limit != "max":
                cache = int(stat[stat.index(cache_name) + 1]) if cache_name in stat else 0
                free = min(free, max(0, int(limit) - int(usage) + cache))
    return free


def cpu_quota(root: Path = Path("/")) -> int | None:
    """CPUs that a cgroup's limit lets this process use, rounded up; None: no limit.

    More threads than that would be stopped together, each time that the quota is used up.
    """
    quotas = []
    for folder in _cgroups(root, "cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            continue
        if quota not in ("max", "-1"):
            quotas.append(-(-int(quota) // int(period)))
    return min(quotas, default=None)


def _meminfo(path: Path) -> int:
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", _read(path), re.MULTILINE):
        return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _own_limits(folder: Path) -> list[int]:
    """Bytes left of each limit that is set."""
    limits, status = _read(folder / "limits"), _read(folder / "status")
    left = []
    for limit, used in (("Max address space", "VmSize"), ("Max data size", "VmData")):
        most = re.search(rf"^{limit}\s+(\d+)\s", limits, re.MULTILINE)
        taken = re.search(rf"^{used}:\s+(\d+) kB$", status, re.MULTILINE)
        if most and taken:
            left.append(max(0, int(most[1]) - int(taken[1]) * 1024))
    return left


def _read(path: Path) -> str:
    """A file of the system, or nothing where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of the cgroups, of either version, that limit this process, innermost first."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        relative = Path(path.lstrip("/"))
        folders += [base / folder for folder in (relative, *relative.parents)]
    return folders

"""What this process may use of the machine: memory and CPUs, by its control groups' limits."""

from __future__ import annotations

from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes free by the kernel's own estimate, or what is left of a cgroup's limit if less.

    Page cache counts as free in both. Both cgroup versions are read, each from this process's group
    up to the top.
    """
    free = _meminfo(root / "proc/meminfo")
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
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path}: no MemAvailable line; Linux 3.14 or later is needed")


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

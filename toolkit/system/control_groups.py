"""What Linux's control groups allow this process: those of a container, of a job of Slurm's or systemd's, or of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Of both versions: the folder in which the groups are, a group's limit, its use, and what of it is files that weren't read
# lately, which the kernel gives up before anything else.
_MEMORY = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_GROUPS, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_of_groups() -> list[tuple[int, int]]:
    """Limit and use, in bytes, of each group that this process is in and whose memory is limited."""
    found = []
    for controller, *names, files in _MEMORY:
        for limit, used, parts in _read(controller, *names, "memory.stat"):
            of_files = dict(line.split() for line in parts.splitlines()).get(files, "0")
            if limit.isdigit():
                found.append((int(limit), int(used) - int(of_files)))
    return found


def cores_of_groups() -> float | None:
    """The processor time a second that each group allows this process, in cores, the least of them. None: any number."""
    pairs = [text.split() for (text,) in _read("", "cpu.max")]
    pairs += _read("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min((int(quota) / int(period) for quota, period in pairs if quota.isdigit()), default=None)


def _read(controller: str, *names: str) -> Iterator[list[str]]:
    """The contents of these files, of this process's group and of those around it, where they are.

    A container sees its own group as the outermost, and may see another path to it from outside.
    """
    try:
        lines = [line.split(":", 2) for line in _OF_PROCESS.read_text().splitlines()]
    except OSError:
        lines = []
    own = next((PurePosixPath(path.strip("/")) for _, many, path in lines if controller in many.split(",")), PurePosixPath())
    for group in (own, *own.parents):
        try:
            yield [(_GROUPS / controller / group / name).read_text().strip() for name in names]
        except OSError:
            continue

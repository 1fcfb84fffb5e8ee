"""Memory and cores that are left to a process by Linux's control groups."""

import os
from pathlib import Path

import pytest
import torch

import toolkit as tk
from toolkit.system import control_groups, environment, free_memory

CPU = torch.device("cpu")
VERSIONS = {  # of control groups: the line of /proc/self/cgroup, the folder, and the names in it
    "v2": ("0::/slurm/job_7", "slurm/job_7", "memory.max", "memory.current", "inactive_file"),
    "v1": (
        "4:memory:/slurm/job_7", "memory/slurm/job_7", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    ),
}  # fmt: skip


def in_group(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in the group of that line of /proc/self/cgroup, and groups are in `groups`."""
    (folder / "cgroup").write_text(f"9:cpuset:/elsewhere\n{line}\n")
    monkeypatch.setattr(control_groups, "_OF_PROCESS", folder / "cgroup")
    monkeypatch.setattr(control_groups, "_GROUPS", folder / "groups")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_free_is_what_the_groups_and_the_ranks_of_the_machine_leave(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: the machine's memory counts in a job of 2 MB, or in a container of 1 MB around it; files that the kernel
    would give up count as memory in use; each of two ranks takes all of it."""
    line, group, most, used, of_files = VERSIONS[version]
    job, container = tmp_path / "groups" / group, (tmp_path / "groups" / group).parent.parent
    job.mkdir(parents=True)
    in_group(line, tmp_path, monkeypatch)

    def limit(folder: Path, to: str, use: int) -> None:
        (folder / most).write_text(f"{to}\n")
        (folder / used).write_text(f"{use}\n")
        (folder / "memory.stat").write_text(f"anon 10\n{of_files} 300\n")

    whole = free_memory.free_memory(CPU)
    assert whole is not None
    assert free_memory.container_limit() is None
    limit(job, "max", 400)
    assert free_memory.container_limit() is None
    limit(job, str(2 * 10**6), 400)
    assert free_memory.container_limit() == 2 * 10**6
    assert free_memory.free_memory(CPU) == 2 * 10**6 - 100
    limit(container, str(10**6), 500)
    assert free_memory.container_limit() == 10**6
    assert free_memory.free_memory(CPU) == 10**6 - 200
    (tmp_path / "cgroup").unlink()
    assert free_memory.container_limit() == 10**6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_memory.free_memory(CPU) == 5 * 10**5 - 100
    assert free_memory.free_memory(torch.device("mps")) is None


@pytest.mark.parametrize(
    ("line", "folder", "files", "cores"),
    [
        ("0::/pod", "pod", {"cpu.max": "250000 100000"}, 2),
        ("0::/pod", "pod", {"cpu.max": "50000 100000"}, 1),
        ("0::/pod", "pod", {"cpu.max": "max 100000"}, 7),
        ("0::/pod", ".", {"cpu.max": "300000 100000"}, 3),
        ("1:cpu,cpuacct:/pod", "cpu/pod", {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}, 2),
        ("1:cpu,cpuacct:/pod", "cpu/pod", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 7),
    ],
)
def test_usable_cores_are_those_that_the_groups_give_time_for(
    line: str, folder: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: a pod with the time of two cores and a half counts as all of its machine's, or as none."""
    (tmp_path / "groups" / folder).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "groups" / folder / name).write_text(f"{text}\n")
    in_group(line, tmp_path, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)), raising=False)
    assert environment.usable_cores() == cores


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("2", 2)])
def test_torch_takes_threads_for_the_usable_cores(
    given: str | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: two threads share the time of one core, or the environment's number is not kept."""
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "cpu.max").write_text("100000 100000\n")
    in_group("0::/", tmp_path, monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", given) if given else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tk.build_accelerator(tk.RunConfig(output_dir=str(tmp_path / "run"), use_cpu=True))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)

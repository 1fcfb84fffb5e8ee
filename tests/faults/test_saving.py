"""Faults in the middle of a save: SIGKILL, a full disk, a power loss, kills while old checkpoints are removed."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit import checkpoint as ckpt

FILES = ["kept.safetensors", "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "MANIFEST.json"]
BERT = ["--model", "tiny-bert", "--dropout", "0.1"]


def whole_checkpoints(folder: Path) -> list[Path]:
    return [path for path in ckpt.list_checkpoints(folder / "checkpoints") if not ckpt.verify_checkpoint(path)]


def operations(tiny, *flags: str, **more) -> list[str]:
    """The names of all operations on files that a run makes."""
    listed = tiny.folder / "operations.txt"
    listed.unlink(missing_ok=True)
    counted = tiny(*flags, output_dir="counted", plan={"count_operations": str(listed)}, **more)
    assert counted.code == 0, counted.out
    return listed.read_text().split("\n")[:-1]


@pytest.mark.fast(1)
@pytest.mark.parametrize("background", [False, True])
def test_a_kill_at_any_operation_on_a_file_costs_at_most_one_save_interval(tiny, tally, chance, count, resumed_from, background: bool) -> None:
    """Each operation of the run, in the long form most of them: before a write, after half of it, before each fsync and rename.

    Fails when: a checkpoint is written under its final name, or the manifest before the files, or a resume trusts names.
    """
    flags = [*BERT, "--save-steps", "4", *(["--async-save"] if background else [])]
    whole, total = tiny.reference(*flags), len(operations(tiny, *flags))
    line = tally("F4", f"SIGKILL at an operation on a file, resumed{', saved in the background' if background else ''}")
    number, lost = count(2, 50 if background else 100), 0
    offset = chance.random()
    for i in range(number):
        tiny.fresh()
        target = 1 + int((i + offset) * total / number)
        killed = tiny(*flags, plan={"kill_at_operation": target})
        with line.trial(f"operation {target} of {total}"):
            assert killed.code == -9, killed.out
            reached = max([step for step, *_ in killed.curve], default=0)
            resumed = tiny(*flags, "--resume")
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome, f"killed after step {reached}, resumed from {resumed_from(resumed)}"
            assert reached - resumed_from(resumed) <= (8 if background else 4)  # the one in the background may not be done
            lost = max(lost, reached - resumed_from(resumed))
            assert not [path.name for path in (resumed.folder / "checkpoints").iterdir() if path.name.startswith((".tmp", ".trash"))]
    line.measured = f"{total} operations in a run; at most {lost} steps lost, saved every 4"
    line.check()


@pytest.mark.slow
def test_a_kill_at_a_random_moment_of_a_run_that_saves_at_every_step(tiny, tally, chance, count, resumed_from) -> None:
    """Most of its time is spent in saves. Fails when: as above."""
    flags = [*BERT, "--save-steps", "1", "--save-total-limit", "1"]
    line, whole = tally("F4", "SIGKILL at a random moment, saved at every step, resumed"), tiny.reference(*flags)
    for _ in range(count(1, 100)):
        tiny.fresh()
        after = chance.uniform(0, tiny.seconds_in_run(whole))
        killed = tiny.killed(*flags, after=after)
        with line.trial(f"killed after {after:.3f} s"):
            reached = max([step for step, *_ in killed.curve], default=0)
            resumed = tiny(*flags, "--resume")
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome
            assert reached - resumed_from(resumed) <= 1
    line.check()


@pytest.mark.fast(1)
@pytest.mark.parametrize("file", FILES[1:])  # there is nothing in the first: half of nothing can be written
def test_a_file_that_cannot_be_written_costs_that_checkpoint_alone(tiny, tally, count, file: str) -> None:
    """RLIMIT_FSIZE in the second save, which has one checkpoint to keep. Fails when: the old one goes before the new one is
    there, or the error ends the run."""
    line = tally("F7", f"no room for {file} (RLIMIT_FSIZE), one checkpoint kept")
    flags = [*BERT, "--save-total-limit", "1"]
    whole = tiny.reference(*flags)
    for _ in range(count(1, 4)):
        with line.trial():
            check_failed_save(tiny, whole, flags, {"limit_file": {"number": 2, "file": file}})
    line.check()


def check_failed_save(tiny, whole, flags: list[str], plan: dict, output_dir: str = "out") -> None:
    """The run goes on to its end; killed after the save that failed, it resumes from the one before."""
    tiny.fresh(output_dir)
    gone_on = tiny(*flags, plan=plan, output_dir=output_dir)
    assert gone_on.code == 0, gone_on.out
    assert "no checkpoint at step 8" in gone_on.out
    assert gone_on.outcome == whole.outcome
    assert [path.name for path in whole_checkpoints(gone_on.folder)] == ["step-20"]
    tiny.fresh(output_dir)
    killed = tiny(*flags, plan={**plan, "kill_after_save": 2}, output_dir=output_dir)
    assert killed.code == -9, killed.out
    assert [path.name for path in whole_checkpoints(killed.folder)] == ["step-4"]
    resumed = tiny(*flags, "--resume", output_dir=output_dir)
    assert resumed.code == 0, resumed.out
    assert "Resumed from" in resumed.out
    assert resumed.outcome == whole.outcome


def mounted(arguments: list[str], folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(["mount", *arguments, str(folder)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tiny) -> Iterator[Path]:
    folder = tiny.folder / "disk"
    if shutil.which("mount") is None or not mounted(["-t", "tmpfs", "-o", "size=4m", "tmpfs"], folder):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_that_checkpoint_alone(tiny, tally, chance, count, small_disk: Path) -> None:
    """A file system of 4 MB with room for a part of the second checkpoint, from none to nearly all of it; what is asked
    before a save says there is plenty. Fails when: as above."""
    flags = [*BERT, "--save-total-limit", "1"]
    whole = tiny.reference(*flags)
    line, number = tally("F7", "full disk (tmpfs) with room for a part of the checkpoint, one kept"), count(1, 24)
    size = sum(file.stat().st_size for file in (whole.folder / "checkpoints/step-20").iterdir())
    line.measured = f"a checkpoint of {size / 1e3:.0f} kB"
    for i in range(number):
        free = int((i + chance.random()) / number * (size - 8192))
        plan = {"fill_disk": {"number": 2, "free": free, "mount": str(small_disk)}}
        with line.trial(f"{free} bytes free of {size}"):
            check_failed_save(tiny, whole, flags, plan, output_dir=str(small_disk / "out"))
    line.check()


def check_after_power_loss(tiny, whole, flags: list[str], root: Path, step: int) -> None:
    newest = ckpt.latest_checkpoint(root / "out/checkpoints")
    assert newest is not None, "no checkpoint"
    assert newest.name == f"step-{step}"
    resumed = tiny(*flags, "--resume", output_dir=root / "out")
    assert resumed.code == 0, resumed.out
    assert resumed.outcome == whole.outcome


@pytest.mark.slow
def test_a_power_loss_as_a_save_returns_keeps_what_was_saved(tiny, tally, count) -> None:
    """ext4 on an image file, which is copied as each save returns: what has not reached it is lost.

    Fails when: a file, the checkpoint's directory or the one above it is not synced.
    """
    image, disk, copies = tiny.folder / "disk.img", tiny.folder / "ext4", tiny.folder / "copies"
    flags = [*BERT, "--save-steps", "4"]
    whole = tiny.reference(*flags)
    line = tally("F8", "power loss as a save returns: copy of a loop-mounted ext4 image")
    for _ in range(count(1, 4)):
        image.write_bytes(b"")
        os.truncate(image, 24 << 20)
        made = shutil.which("mkfs.ext4") and subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=False).returncode == 0
        if not made or not mounted(["-o", "loop", str(image)], disk):
            pytest.skip("no image can be mounted here")
        copies.mkdir(exist_ok=True)
        try:
            run = tiny(*flags, output_dir=disk / "out", plan={"copy_image": {"image": str(image), "copies": str(copies)}})
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        assert run.code == 0, run.out
        for copy in sorted(copies.iterdir()):
            with line.trial(copy.stem):
                assert mounted(["-o", "loop", str(copy)], disk)
                try:
                    check_after_power_loss(tiny, whole, flags, disk, int(copy.stem))
                finally:
                    subprocess.run(["umount", str(disk)], check=True)
            copy.unlink()
    line.check()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the simulation asks Linux which file a descriptor is")
def test_a_power_loss_on_a_disk_that_keeps_only_what_was_synced(tiny, tally, count) -> None:
    """Simulated by the letter of POSIX: a file has the bytes of its last fsync, a directory the names of its own last one.

    Fails when: as above, or when a new folder's name in the one above it, or metrics.jsonl, is not synced with the checkpoint.
    """
    flags = [*BERT, "--save-steps", "4"]
    whole = tiny.reference(*flags)
    line = tally("F8", "power loss as a save returns: simulated, only what was synced is kept")
    for _ in range(count(1, 4)):
        root, copies = tiny.fresh("root"), tiny.fresh("copies")
        root.mkdir()
        copies.mkdir()
        run = tiny(*flags, output_dir=root / "out", plan={"keep_durable": {"root": str(root), "copies": str(copies)}})
        assert run.code == 0, run.out
        for copy in sorted(copies.iterdir()):
            with line.trial(copy.stem):
                check_after_power_loss(tiny, whole, flags, copy, int(copy.stem))
    line.check()


EVALUATED = [
    "--eval-strategy", "steps", "--eval-steps", "2", "--save-steps", "2", "--save-total-limit", "1", "--load-best-model-at-end",
]  # fmt: skip
CURVE = {"eval_losses": [9, 9, 5, 9, 6, 9, 4, 9, 7, 9, 6, 9, 3, 9, 5, 9, 8, 9, 7, 9, 6]}  # by step; the best one is step 12's


def test_a_whole_checkpoint_and_the_best_one_are_there_at_every_moment(tiny, tally, count) -> None:
    """Looked for before each operation on a file, after the first commit. Fails when: old ones go before the new one is whole,
    or before `best` names another."""
    line = tally("F19", "best, last and one kept: a whole checkpoint, and the best one, at each operation on a file")
    for number in range(count(1, 2)):
        folder, report = tiny.fresh(), tiny.folder / "report.jsonl"
        report.unlink(missing_ok=True)
        plan = {"watch_checkpoints": {"root": str(folder / "checkpoints"), "report": str(report)}}
        run = tiny(*EVALUATED, *(["--async-save"] if number else []), plan=plan, ill=CURVE)
        assert run.code == 0, run.out
        for record in map(json.loads, report.read_text().splitlines()):
            with line.trial(record):
                assert not record["breaches"]
    line.check()


@pytest.mark.slow
def test_kills_while_checkpoints_come_and_go_keep_the_best_and_the_newest(tiny, tally, chance, count) -> None:
    """Killed at an operation on a file, then resumed to the end, where the best weights are loaded.

    Fails when: a kill between a checkpoint's commit and its pointer makes a later run forget which one was the best.
    """
    whole, names = tiny.reference(*EVALUATED, ill=CURVE), operations(tiny, *EVALUATED, ill=CURVE)
    assert whole.result["best"] != whole.result["weights"]
    line = tally("F19", "best, last and one kept: SIGKILL at an operation on a file, resumed, best weights loaded")
    number, offset = count(2, 100), chance.random()
    committed = names.index("rename") + 3  # the first commit: a rename, the sync of its folder, and what follows
    for i in range(number):
        tiny.fresh()
        target = 1 + int((i + offset) * len(names) / number)
        killed = tiny(*EVALUATED, plan={"kill_at_operation": target}, ill=CURVE)
        with line.trial(f"operation {target} of {len(names)}: {names[target - 1]}"):
            assert killed.code == -9, killed.out
            assert target <= committed or whole_checkpoints(killed.folder)
            resumed = tiny(*EVALUATED, "--resume", ill=CURVE)
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome
            assert ckpt.read_pointer(resumed.folder / "checkpoints", "best").name == "step-12"
            assert {path.name for path in whole_checkpoints(resumed.folder)} == {"step-12", "step-20"}
    line.check()


@pytest.mark.slow
def test_a_kill_between_the_best_checkpoint_and_its_pointer(tiny, tally, long_form) -> None:
    """The moment between a commit and its pointers; in the short form that of the best one alone. Fails when: as above."""
    whole, names = tiny.reference(*EVALUATED, ill=CURVE), operations(tiny, *EVALUATED, ill=CURVE)
    line = tally("F19", "SIGKILL between the best checkpoint's commit and its pointer")
    commits = [i for i, name in enumerate(names) if name == "rename" and names[i + 1] == "fsync"]
    for commit in commits if long_form else commits[5:6]:  # saved every 2 steps, best at 12
        tiny.fresh()
        killed = tiny(*EVALUATED, plan={"kill_at_operation": commit + 3}, ill=CURVE)
        with line.trial(f"operation {commit + 3}: {names[commit : commit + 4]}"):
            assert killed.code == -9, killed.out
            resumed = tiny(*EVALUATED, "--resume", ill=CURVE)
            assert resumed.outcome == whole.outcome
    line.check()


@pytest.mark.slow
def test_saving_in_the_background_changes_no_bit(tiny, tally) -> None:
    """Fails when: training changes tensors that are being written."""
    line = tally("F21", "saved in the background: same bits in every checkpoint, same result")
    flags = [*BERT, "--save-steps", "2", "--save-total-limit", "20"]
    plain, background = tiny.reference(*flags), tiny.reference(*flags, "--async-save")
    for ours, theirs in zip(*(whole_checkpoints(run.folder) for run in (plain, background)), strict=True):
        with line.trial(ours.name):
            assert background.outcome == plain.outcome
            for file in ("model.safetensors", "optimizer.safetensors"):
                assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    line.check()


@pytest.mark.fast(2)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_save_that_fails_is_said_and_ends_the_run_where_asked(tiny, tally, background: bool, policy: str) -> None:
    """In the background its error comes to light at a later step. Fails when: an error stays in the thread."""
    line = tally("F7", f"a save fails, --save-error {policy}{', in the background' if background else ''}")
    tiny.fresh()
    flags = ["--save-error", policy, "--save-total-limit", "9", *(["--async-save"] if background else [])]
    run = tiny(*flags, plan={"fail_save": {"number": 2}}, ill={"step_seconds": 0.02})
    with line.trial():
        assert "no checkpoint at step 8: [Errno 5]" in run.out
        assert run.code == (1 if policy == "stop" else 0), run.out
        kept = [path.name for path in whole_checkpoints(run.folder)]
        assert kept == (["step-4"] if policy == "stop" else ["step-4", "step-12", "step-16", "step-20"])
        if policy == "stop":
            assert 8 <= run.metrics[-1]["step"] <= 10
    line.check()

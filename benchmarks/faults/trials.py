"""The faults: what is done to a run, and what counts as survived.

Wherever a run is started again, it is the same command, which resumes from the newest checkpoint when there is one. *Exact*
means that the weights at the end are, to the last bit, those of a run of the same peer that nobody touched.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .runs import Bench, Finished, Scenario

FILES = {  # of a peer's checkpoint: the toolkit's file of the same content
    "model.safetensors": "model.safetensors", "optimizer.pt": "optimizer.safetensors",
    "rng_state.pth": "random.safetensors", "trainer_state.json": "state.json",
}  # fmt: skip
DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut at 1 %": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 100]),
    "cut at 50 %": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut at 99 %": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size * 99 // 100]),
}


@dataclass
class Trial:
    """One trial of a fault: its number, and a source of random moments."""

    bench: Bench
    peer: str
    number: int
    of: int
    chance: random.Random

    def after(self, seconds: float, number: int, from_step: int = 0) -> Callable[[int], None]:
        """Send the process a signal some seconds after training has begun, or after a step."""

        def send(pid: int) -> None:
            steps, deadline = self.bench.folder / "steps", time.monotonic() + 60
            while not (steps.exists() and str(from_step) in steps.read_text().split()) and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(seconds)
            os.kill(pid, number)  # a process that has ended is not yet waited for: nothing happens then

        return send


Verdict = tuple[bool, str]  # survived, and what was seen


@dataclass
class Fault:
    """A line of the table. `row` is the toolkit's line in docs/reliability.md that does the same."""

    fault: str
    what: str
    row: str
    survived: str
    trials: int
    attempt: Callable[[Trial], Verdict]


def newest(bench: Bench) -> int:
    """The step of the newest checkpoint by name; 0 when there is none."""
    return max([int(path.name.split("-")[1]) for path in bench.out.glob("checkpoint-*")], default=0)


def compared(ended: Finished, whole: Finished) -> Verdict:
    if ended.code:
        return False, f"resume fails ({ended.error})"
    exact = ended.result["weights"] == whole.result["weights"]
    return exact, "exact" if exact else "other weights, nothing said"


def start_again(trial: Trial, scenario: Scenario, whole: Finished) -> Verdict:
    """The same command; where it fails, once more without the newest checkpoint, to see what a user can do by hand."""
    ended = trial.bench.run(trial.peer, scenario)
    if not ended.code:
        return compared(ended, whole)
    shutil.rmtree(trial.bench.out / f"checkpoint-{newest(trial.bench)}")
    if not newest(trial.bench):
        return False, "resume fails, no older checkpoint"
    _, by_hand = compared(trial.bench.run(trial.peer, scenario), whole)
    return False, f"resume fails; newest checkpoint deleted by hand: {by_hand}"


def kill_at_random(trial: Trial) -> Verdict:
    scenario: Scenario = {"accumulation": 3, "save_steps": 3}
    whole = trial.bench.whole(trial.peer, scenario)
    trial.bench.fresh()
    seconds = trial.chance.uniform(0, 1.1 * whole.result["seconds"])
    trial.bench.run(trial.peer, scenario, trial.after(seconds, signal.SIGKILL))
    return start_again(trial, scenario, whole)


def kill_a_stream(trial: Trial) -> Verdict:
    scenario: Scenario = {"stream": True, "max_steps": 40, "save_steps": 3}  # 15 steps an epoch
    whole = trial.bench.whole(trial.peer, scenario)
    trial.bench.fresh()
    killed = trial.bench.run(trial.peer, {**scenario, "kill_after_step": trial.chance.randrange(18, 40)})
    assert killed.code == -signal.SIGKILL, killed.out
    at_end = newest(trial.bench) % 15 == 0
    exact, seen = compared(trial.bench.run(trial.peer, scenario), whole)
    return exact, seen + (", from a checkpoint at the end of an epoch" if at_end else "")


def kill_at_operation(trial: Trial) -> Verdict:
    listed = trial.bench.folder / f"operations-{trial.peer}"
    whole = trial.bench.whole(trial.peer, {})
    if not listed.exists():
        trial.bench.fresh()
        counted = trial.bench.run(trial.peer, {"count_operations": str(listed)})
        assert compared(counted, whole)[0], counted.out
    total = len(listed.read_text().split("\n")) - 1
    trial.bench.fresh()
    target = 1 + int((trial.number + trial.chance.random()) * total / trial.of)
    killed = trial.bench.run(trial.peer, {"kill_at_operation": target})
    assert killed.code == -signal.SIGKILL, killed.out
    return start_again(trial, {}, whole)


def checkpointed(trial: Trial, scenario: Scenario) -> Path:
    """An output directory with checkpoints of steps 8 and 12, made once: its run was killed after step 14."""
    template = trial.bench.folder / f"killed-{trial.peer}"
    if not template.exists():
        trial.bench.fresh()
        killed = trial.bench.run(trial.peer, {**scenario, "kill_after_step": 14})
        assert killed.code == -signal.SIGKILL, killed.out
        trial.bench.out.rename(template)
    return template


def resumed_after_damage(trial: Trial, damage: Callable[[Path], object], file: str) -> Verdict:
    scenario: Scenario = {"save_total_limit": 2}
    whole = trial.bench.whole(trial.peer, scenario)
    trial.bench.fresh(checkpointed(trial, scenario))
    damage(trial.bench.out / "checkpoint-12" / file)
    ended = trial.bench.run(trial.peer, scenario)
    if ended.code:
        return True, f"ends with {ended.error}"
    exact = ended.result["weights"] == whole.result["weights"]
    return exact, "exact all the same" if exact else "used, nothing said, other weights"


def damage_file(file: str) -> Callable[[Trial], Verdict]:
    return lambda trial: resumed_after_damage(trial, list(DAMAGES.values())[trial.number % len(DAMAGES)], file)


def flip_bit(file: str) -> Callable[[Trial], Verdict]:
    def attempt(trial: Trial) -> Verdict:
        def flip(path: Path) -> None:
            content = bytearray(path.read_bytes())
            bit = trial.chance.randrange(len(content) * 8)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)

        return resumed_after_damage(trial, flip, file)

    return attempt


def leave_no_room_for(file: str) -> Callable[[Trial], Verdict]:
    def attempt(trial: Trial) -> Verdict:
        whole = trial.bench.whole(trial.peer, {})
        trial.bench.fresh()
        first = trial.bench.run(trial.peer, {"no_room_for": f"checkpoint-8/{file}"})
        if not first.code:
            survived, seen = compared(first, whole)
            return survived, f"goes on, {seen}"
        survived, seen = start_again(trial, {}, whole)
        return survived, f"ends at step {first.reached} with {first.error}; with room again: {seen}"

    return attempt


def terminate(jit: bool, dropout: float = 0.1) -> Callable[[Trial], Verdict]:
    def attempt(trial: Trial) -> Verdict:
        scenario: Scenario = {"jit": jit, "dropout": dropout, "save_strategy": "no"}  # only the signal can lead to a checkpoint
        whole = trial.bench.whole(trial.peer, scenario)
        trial.bench.fresh()
        slow: Scenario = {**scenario, "step_seconds": 0.3 if jit else 0.05}  # it waits 3 s before it saves
        seconds = trial.chance.uniform(0, 1.5 if jit else 0.9)
        stopped = trial.bench.run(trial.peer, slow, trial.after(seconds, signal.SIGTERM, from_step=1))
        assert stopped.reached < 20, "trained to its end"
        saved = newest(trial.bench)
        exact, seen = compared(trial.bench.run(trial.peer, scenario), whole)
        lost = stopped.reached - saved
        kept = f"saved, {lost} step{'s' * (lost != 1)} lost, then {seen}" if saved else "nothing saved"
        return exact and bool(saved) and lost <= 1, f"exit code {stopped.code}, {kept}"

    return attempt


def poison_row(trial: Trial) -> Verdict:
    trial.bench.fresh()
    ended = trial.bench.run(trial.peer, {"poisoned_row": trial.chance.randrange(30)})
    if ended.code:
        return False, f"ends with {ended.error}"
    zeros = sum(loss == 0.0 for loss in ended.result["losses"])
    shown = "the log shows loss 0.0" if zeros else "the log shows it"
    return ended.result["finite"], f"exit code 0, parameters {'' if ended.result['finite'] else 'not '}finite, {shown}"


EXACT, NOTICED = "exact", "noticed (an error), or exact"
AGAIN = "exact, whether it went on or was started again with room"
SIGTERM, SAVED = "SIGTERM at a random moment", "saved, at most one step lost, exact"
KILLED, STREAM = "SIGKILL at a random moment", "stream killed in epoch 2 or"
CUT = "missing, empty, or cut at 1, 50, 99 %"
MODES = "dropout, accumulation, middle of an epoch"


def faults_of_file(file: str, ours: str) -> list[Fault]:
    """What is done to one file; `ours` is the toolkit's file of the same content."""
    return [
        Fault("F5", f"newest checkpoint's {file} {CUT}; an older one is there",
              f"newest checkpoint's {ours} {CUT}: resumed from the older one", NOTICED, 5, damage_file(file)),
        Fault("F6", f"a bit flipped in {file}", f"a bit flipped in {ours}: found", NOTICED, 5, flip_bit(file)),
        Fault("F7", f"no room for {file} in the second save (RLIMIT_FSIZE)",
              f"no room for {ours} (RLIMIT_FSIZE), one checkpoint kept", AGAIN, 2, leave_no_room_for(file)),
    ]  # fmt: skip


FAULTS = [
    Fault("F1", f"{KILLED}, started again: {MODES}", f"{KILLED}, resumed: {MODES}", EXACT, 20, kill_at_random),
    Fault("F3", f"{STREAM} 3, started again", f"{STREAM} later, resumed", EXACT, 12, kill_a_stream),
    Fault("F4", "SIGKILL at an operation on a file, started again", "SIGKILL at an operation on a file, resumed", EXACT, 20,
          kill_at_operation),
    Fault("F9", f"{SIGTERM}, started again", f"{SIGTERM}, resumed", SAVED, 6, terminate(jit=False)),
    Fault("F9", f"{SIGTERM}, started again: with enable_jit_checkpoint", f"{SIGTERM}, resumed", SAVED, 6, terminate(jit=True)),
    Fault("F9", f"{SIGTERM}, started again: with enable_jit_checkpoint, without dropout", f"{SIGTERM}, resumed", SAVED, 6,
          terminate(jit=True, dropout=0.0)),
    Fault("F16", "infinite loss from one row", "inf from one row", "parameters finite at the end", 10, poison_row),
    *(fault for file, ours in FILES.items() for fault in faults_of_file(file, ours)),
]  # fmt: skip
FAULTS.sort(key=lambda fault: int(fault.fault[1:]))

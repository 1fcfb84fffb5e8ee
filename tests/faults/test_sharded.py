"""Checkpoints of runs that are sharded over ranks: killed and resumed, in the middle of a save, and as another layout."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

# DeepSpeed would leave parameters of less than 100,000 numbers whole, which here are all of them.
ALL_SHARDED = ["--deepspeed", str(Path(__file__).resolve().parents[1] / "all_sharded.json")]
ENGINES = {
    "DDP": [],
    "ZeRO-2": ["--zero-stage", "2"],
    "ZeRO-3": ALL_SHARDED,
    "ZeRO-3 with offload": [*ALL_SHARDED, "--offload", "parameters"],
    "FSDP2": ["--fsdp"],
}
# Three micro-batches a rank, the last one short; dropout on.
FLAGS = ["--dropout", "0.1", "--global-batch-size", "10", "--max-steps", "12", "--save-steps", "4"]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return {}


def reference(tiny: Any, uninterrupted: dict[str, Any], engine: str, optim: str) -> Any:
    key = f"{engine} {optim}"
    if key not in uninterrupted:
        folder = tiny.folder / "reference" / key.replace(" ", "-")
        ranks = tiny.ranks(2, *FLAGS, "--optim", optim, *ENGINES[engine], output_dir=folder)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].out
        uninterrupted[key] = (ranks[0].outcome, ranks[0].seconds)
    return uninterrupted[key]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "optim"), [("ZeRO-2", "adamw_torch"), ("ZeRO-3", "muon"), ("FSDP2", "muon")])
def test_a_killed_sharded_run_resumes_to_the_same_bits(
    tiny: Any, tally: Any, chance: Any, count: Any, uninterrupted: dict[str, Any], engine: str, optim: str
) -> None:
    """All ranks die at a random moment. Fails when: `_put_optimizer` leaves the count of steps, or a moment, as it was made."""
    line = tally("F12", f"SIGKILL of 2 ranks under {engine} with {optim}, resumed on the same layout: weights, curve and order")
    flags = [*FLAGS, "--optim", optim, *ENGINES[engine]]
    outcome, _ = reference(tiny, uninterrupted, engine, optim)
    for _ in range(count(2, 10)):
        stop = chance.randrange(1, 10)
        with line.trial(f"after step {stop}"):
            tiny.fresh()

            def kill(pids: list[int], stop: int = stop) -> None:
                tiny.wait_for_lines(stop)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

            killed = tiny.ranks(2, *flags, while_running=kill, ill={"step_seconds": 0.02})
            assert [rank.code for rank in killed] == [-signal.SIGKILL] * 2, killed[0].out
            resumed = tiny.ranks(2, *flags, "--resume")
            assert [rank.code for rank in resumed] == [0, 0], resumed[0].out
            assert resumed[0].outcome == outcome
    line.check()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ZeRO-3", "FSDP2"])
def test_a_kill_in_the_middle_of_a_sharded_save_costs_at_most_one_interval(
    tiny: Any, tally: Any, chance: Any, count: Any, resumed_from: Any, uninterrupted: dict[str, Any], engine: str
) -> None:
    """Fails when: a checkpoint gets its final name before its files are whole."""
    line = tally("F4", f"SIGKILL at an operation on a file, 2 ranks under {engine}, resumed")
    flags = [*FLAGS, "--optim", "adamw_torch", *ENGINES[engine]]
    outcome, _ = reference(tiny, uninterrupted, engine, "adamw_torch")
    for _ in range(count(1, 15)):
        target = chance.randrange(30, 150)
        with line.trial(target):
            tiny.fresh()
            killed = tiny.ranks(2, *flags, plan={"kill_at_operation": target})
            done = len([event for event in killed[0].metrics if "loss" in event])
            resumed = tiny.ranks(2, *flags, "--resume")
            assert [rank.code for rank in resumed] == [0, 0], resumed[0].out
            assert resumed_from(resumed[0]) >= min(done, 12) - 4 - 1
            assert resumed[0].outcome == outcome
    line.check()


# One process or two or three ranks, before and after: the number of ranks and the engine.
MOVES = [
    (2, "DDP", 1, "DDP"), (1, "DDP", 2, "DDP"), (2, "ZeRO-2", 1, "DDP"), (1, "DDP", 2, "ZeRO-2"), (2, "ZeRO-3", 1, "DDP"),
    (1, "DDP", 2, "ZeRO-3"), (2, "ZeRO-3", 3, "ZeRO-2"), (2, "FSDP2", 2, "ZeRO-3 with offload"), (2, "ZeRO-2", 3, "FSDP2"),
    (2, "ZeRO-3 with offload", 1, "ZeRO-2"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_another_layout_goes_on_from_a_checkpoint_as_one_process_would(tiny: Any, tally: Any, optim: str, long_form: bool) -> None:
    """The order is the same, losses and gradient norms to 1e-5. Fails when: `Piece.start` is taken for 0, on the way in or out."""
    line = tally("F12", f"another world size and engine resumes from step 4 of 12, {optim}: order, loss and norm of each step")
    flags = ["--dropout", "0", "--learning-rate", "1e-3", "--global-batch-size", "7", "--max-steps", "12", "--optim", optim]
    whole = tiny.reference(*flags)
    begun: dict[tuple[int, str], Any] = {}
    moves = MOVES if long_form or optim == "adamw_torch" else MOVES[4:8]
    for before, engine, after, other in moves:
        with line.trial(f"{before} {engine} -> {after} {other}"):
            if (before, engine) not in begun:
                folder = f"{before} {engine}"
                ranks = start(tiny, before, [*flags, *ENGINES[engine], "--save-steps", "4", "--save-total-limit", "none"], folder)
                assert ranks[0].code == 0, ranks[0].out
                begun[before, engine] = ranks[0].folder / "checkpoints" / "step-4"
            ranks = start(
                tiny, after, [*flags, *ENGINES[other], "--resume-from", str(begun[before, engine])], f"{before} {engine} {after} {other}"
            )
            assert ranks[0].code == 0, ranks[0].out
            assert ranks[0].result["order"] == whole.result["order"]
            expected = whole.curve[4:]
            assert [step for step, _, _ in ranks[0].curve] == [step for step, _, _ in expected]
            for (_, loss, norm), (_, its_loss, its_norm) in zip(ranks[0].curve, expected, strict=True):
                assert loss == pytest.approx(its_loss, rel=1e-5)
                assert norm == pytest.approx(its_norm, rel=1e-5)
    line.check()


def start(tiny: Any, ranks: int, flags: list[str], output_dir: str) -> list[Any]:
    """So many ranks; one of the plain engine is a process like any."""
    return tiny.ranks(ranks, *flags, output_dir=output_dir) if ranks > 1 else [tiny(*flags, output_dir=output_dir)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ZeRO-3", "FSDP2"])
def test_a_signal_to_one_rank_stops_a_sharded_run_after_a_checkpoint(
    tiny: Any, tally: Any, uninterrupted: dict[str, Any], engine: str
) -> None:
    """All ranks end with 75 at one step, and go on to the same bits. Fails when: a save gathers on the main process alone."""
    line = tally("F10", f"SIGTERM to rank 1 of 2 under {engine}, resumed")
    flags = [*FLAGS, "--optim", "muon", *ENGINES[engine]]
    outcome, _ = reference(tiny, uninterrupted, engine, "muon")
    with line.trial():
        tiny.fresh()

        def stop(pids: list[int]) -> None:
            tiny.wait_for_lines(5)
            os.kill(pids[1], signal.SIGTERM)

        stopped = tiny.ranks(2, *flags, while_running=stop, ill={"step_seconds": 0.05})
        assert [rank.code for rank in stopped] == [75, 75], stopped[0].out
        resumed = tiny.ranks(2, *flags, "--resume")
        assert [rank.code for rank in resumed] == [0, 0], resumed[0].out
        assert resumed[0].outcome == outcome
    line.check()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ZeRO-2", "FSDP2"])
def test_a_sharded_save_that_fails_costs_that_checkpoint_alone(
    tiny: Any, tally: Any, uninterrupted: dict[str, Any], engine: str
) -> None:
    """Training goes on to the same bits. Fails when: the main process raises where the other ranks continue."""
    line = tally("F7", f"a file of a checkpoint can't be written, 2 ranks under {engine}")
    flags = [*FLAGS, "--optim", "muon", *ENGINES[engine]]
    outcome, _ = reference(tiny, uninterrupted, engine, "muon")
    with line.trial():
        folder = tiny.fresh()
        ranks = tiny.ranks(2, *flags, plan={"fail_save": {"number": 2}})
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].out
        assert "no checkpoint at step 8" in ranks[0].out
        assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-4", "step-12"}
        assert ranks[0].outcome == outcome
    line.check()


@pytest.mark.slow
def test_a_deadline_within_an_evaluation_ends_a_sharded_run_that_goes_on_from_its_last_checkpoint(
    tiny: Any, tally: Any, uninterrupted: dict[str, Any]
) -> None:
    """It can't be gathered then, which is said. Fails when: a rank waits for the others in `leave_in_time`."""
    line = tally("F9", "SIGTERM with a deadline of 4 s in an evaluation of 100 s, 2 ranks under ZeRO-3, resumed")
    flags = [*FLAGS, "--optim", "muon", *ENGINES["ZeRO-3"]]
    outcome, _ = reference(tiny, uninterrupted, "ZeRO-3", "muon")
    with line.trial():
        tiny.fresh()

        def stop(pids: list[int]) -> None:
            tiny.wait_for_lines(6)
            time.sleep(0.5)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)

        more = ["--eval-strategy", "steps", "--eval-steps", "6", "--stop-deadline", "4"]
        stopped = tiny.ranks(2, *flags, *more, while_running=stop, ill={"eval_seconds": 100})
        assert [rank.code for rank in stopped] == [75, 75], stopped[0].out
        assert stopped[0].seconds < 100
        assert "no time to gather step 6" in stopped[0].out
        resumed = tiny.ranks(2, *flags, "--resume")
        assert [rank.code for rank in resumed] == [0, 0], resumed[0].out
        assert resumed[0].outcome == outcome
    line.check()

"""Two ranks and more: the same training as one, signals agreed upon, a rank that dies or hangs, a resume as another world."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

FLAGS = ["--global-batch-size", "4", "--per-device-train-batch-size", "1", "--max-steps", "16"]


def logged(folder: Any, steps: int) -> Callable[[], bool]:
    """Whether N steps are in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count('"loss"') >= steps


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["causal LM", "packed causal LM", "classification"])
def test_any_world_size_trains_alike(tiny: Any, tally: Any, kind: str) -> None:
    """Loss and gradient norm of each step, and the order, for 1 rank, 2 and 3. Fails when: `num_processes` is left out of train_step."""
    line = tally("F14", f"loss and gradient norm of 1, 2 and 3 ranks, {kind}")
    flags = [*FLAGS, *{"packed causal LM": ["--packing"], "classification": ["--model", "tiny-bert", "--dropout", "0"]}.get(kind, [])]
    whole = tiny(*flags, output_dir="one")
    assert whole.code == 0, whole.out
    for world_size in (2, 3):
        with line.trial(world_size):
            ranks = tiny.ranks(world_size, *flags, output_dir=f"{world_size} ranks")
            assert [rank.code for rank in ranks] == [0] * world_size, ranks[0].out
            assert ranks[0].result["order"] == whole.result["order"]
            for (step, loss, norm), (other_step, other_loss, other_norm) in zip(whole.curve, ranks[0].curve, strict=True):
                assert step == other_step
                assert other_loss == pytest.approx(loss, rel=1e-5)
                assert other_norm == pytest.approx(norm, rel=1e-4)
            results = [json.loads((ranks[0].folder / f"result-{rank}.json").read_text()) for rank in range(1, world_size)]
            assert all(result["weights"] == ranks[0].result["weights"] for result in results)
    line.check()


@pytest.mark.fast(1)
@pytest.mark.parametrize("who", ["both", "both, one later", "rank 0", "rank 1"])
def test_a_signal_to_any_rank_stops_all_at_the_same_step(tiny: Any, tally: Any, chance: Any, count: Any, who: str) -> None:
    """And the resumed run ends with the same bits. Fails when: `StopSignal.agreed` asks this rank alone."""
    line = tally("F10", f"SIGTERM to {who} of 2 ranks, resumed")
    reference = tiny.ranks(2, *FLAGS, output_dir="reference")
    assert reference[0].code == 0, reference[0].out
    for _ in range(count(1, 10)):
        with line.trial():
            folder = tiny.fresh()

            def stop(pids: list[int], folder: Any = folder) -> None:
                wait_until(logged(folder, chance.randrange(2, 9)))
                for pid in {"rank 0": pids[:1], "rank 1": pids[1:]}.get(who, pids):
                    with contextlib.suppress(ProcessLookupError):  # the first signal may have ended both by now
                        os.kill(pid, signal.SIGTERM)
                    time.sleep(chance.uniform(0, 1) if "later" in who else 0)

            ranks = tiny.ranks(2, *FLAGS, while_running=stop, ill={"step_seconds": 0.05})
            assert [rank.code for rank in ranks] == [75, 75], ranks[0].out + ranks[1].out
            stopped = json.loads((folder / "summary.json").read_text())
            assert stopped["status"] == "interrupted"
            assert stopped["steps"] < 16
            resumed = tiny.ranks(2, *FLAGS, "--resume")
            assert [rank.code for rank in resumed] == [0, 0], resumed[0].out
            assert f"step-{stopped['steps']} at step {stopped['steps']} of" in resumed[0].out
            assert resumed[0].result["weights"] == reference[0].result["weights"]
            assert resumed[0].curve == reference[0].curve
    line.check()


@pytest.mark.fast(1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_gone_ends_the_run_and_is_named(tiny: Any, tally: Any, count: Any, how: str, victim: int) -> None:
    """With the step and the newest checkpoint, in time. Fails when: open_run starts no heartbeat, or `explained` knows no collective."""
    line = tally("F17", f"rank {victim} of 2 {how}, --hang-timeout 6")
    for _ in range(count(1, 3)):
        with line.trial():
            folder, began = tiny.fresh(), []

            def strike(pids: list[int], folder: Any = folder, began: list[float] = began) -> None:
                wait_until(logged(folder, 6))
                os.kill(pids[victim], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                began.append(time.monotonic())
                wait_until(lambda: not _running(pids[1 - victim]), 40)
                began.append(time.monotonic())

            # Until the exit code of the one that has ended is known; a stopped one is waited for in vain.
            timeout = 20 if how == "killed" else 4
            ranks = tiny.ranks(
                2, *FLAGS, "--hang-timeout", "6", "--max-steps", "400", while_running=strike, timeout=timeout, ill={"step_seconds": 0.05}
            )
            survivor, seconds = ranks[1 - victim], began[1] - began[0]
            assert survivor.code == 1, survivor.out
            assert re.search(rf"rank {victim} .*(no sign|silent .*step \d+)", survivor.out), survivor.out
            assert re.search(r"checkpoints/step-\d+", survivor.out)
            assert "--resume" in survivor.out
            assert seconds < 18
            line.measured = f"the other one ended after {seconds:.1f} s"
    line.check()


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_a_rank_that_lives_but_hangs_is_named_by_those_that_wait_for_it(tiny: Any, where: str) -> None:
    """In user code of its own, in a step and in front of an evaluation: rank 0 waits in a collective of the same step. Fails when: only
    steps are compared, or collectives that were entered are not published."""
    tiny.fresh()
    ill = {"nonfinite": "hang", "at": [3], "ranks": [1]} if where == "step" else {"evaluation_hangs_on": 1}
    flags = [*FLAGS, "--hang-timeout", "3", "--eval-strategy", "steps", "--eval-steps", "4", "--save-steps", "2"]

    def strike(pids: list[int]) -> None:
        wait_until(lambda: not _running(pids[0]), 60)
        os.kill(pids[1], signal.SIGKILL)  # it would sleep on

    waiting = tiny.ranks(2, *flags, while_running=strike, timeout=20, ill=ill)[0]
    assert waiting.code == 1, waiting.out
    step = 3 if where == "step" else 4
    assert re.search(rf"rank 1 .*silent .*step {step} \([67] s\)", waiting.out), waiting.out
    assert "--resume" in waiting.out


@pytest.mark.parametrize(
    ("how", "victim", "named"), [("stopped", 1, 2), pytest.param("stopped", 0, 2, marks=pytest.mark.slow), (6, 1, 4), (6, 0, None)]
)
def test_a_rank_that_is_lost_before_its_run_is_named_and_ends_nobody(tiny: Any, how: Any, victim: int, named: int | None) -> None:
    """Stopped, or at work alone for 6 s with --hang-timeout 2, which the main process may, for whom the others wait. Fails when: the
    heartbeat begins in open_run, it ends who waits (`_report`), or rank 0 is held to the collectives of the others."""
    tiny.fresh()

    def go_on(pids: list[int]) -> None:
        wait_until(lambda: _state(pids[victim]) == "T" or how != "stopped", 60)
        time.sleep(4 if how == "stopped" else 0)
        os.kill(pids[victim], signal.SIGCONT)

    ranks = tiny.ranks(2, *FLAGS, "--hang-timeout", "2", while_running=go_on, timeout=60, ill={"prepares": how, "ranks": [victim]})
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].out + ranks[1].out
    said = [line for rank in ranks for line in rank.out.splitlines() if "silent" in line]
    assert len(said) == (named is not None), said
    assert all(re.match(rf"rank {victim} .* before .* \({named} s\)", line) for line in said)


@pytest.mark.parametrize(("who", "step"), [pytest.param([0], 3, marks=pytest.mark.slow), ([1], 3), ([0, 1], 3), ([1], 0)])
def test_what_one_rank_refuses_is_shown_once_and_the_other_says_which_rank_it_was(tiny: Any, who: list[int], step: int) -> None:
    """In the loss of a step, on one rank or both, or before the run. Fails when: run_recipe prints refusals of the first rank alone, or
    of every one, or doesn't explain a collective's error; open_run closes the heartbeat of a run that failed as one that ended in order."""
    tiny.fresh()
    ill = {"nonfinite": "refusal", "at": [step]} if step else {"prepares": "refusal"}
    ranks = tiny.ranks(2, *FLAGS, timeout=60, ill={**ill, "ranks": who})
    assert [rank.code for rank in ranks] == [2 if rank in who else 1 for rank in (0, 1)], ranks[0].out + ranks[1].out
    assert ["rows.jsonl:7" in rank.out for rank in ranks] == [0 in who, who == [1]]
    for rank in {0, 1} - set(who):
        assert f"rank {who[0]} has ended" in ranks[rank].out
        assert not step or f"step {step}" in ranks[rank].out
        assert "Traceback" not in ranks[rank].out
    assert not any("frame #" in rank.out for rank in ranks), "torch wrote about a store that has gone"


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as status:
            return "\nState:\tZ" not in status.read()
    except OSError:
        return False


def test_another_world_goes_on_at_the_next_example(tiny: Any, tally: Any, count: Any) -> None:
    """1 to 2 to 3 ranks and back, global batch kept or changed. Fails when: the position counts steps, or ranks shuffle apart."""
    line = tally("F11", "stopped and continued as another world: examples missed or seen twice")
    worlds = [(1, 4), (2, 4), (3, 4), (1, 4), (2, 6), (1, 3), (2, 4)]
    for _ in range(count(1, 3)):
        with line.trial():
            tiny.fresh()
            flags, steps, seen = ["--save-steps", "1", "--max-steps", "1000", "--dropout", "0"], 0, []
            flags = flags[:-2]
            for number, (world_size, global_batch) in enumerate(worlds):
                steps += 3
                sizes = ["--global-batch-size", str(global_batch), "--per-device-train-batch-size", "1"]

                def stop(pids: list[int], steps: int = steps) -> None:
                    wait_until(logged(tiny.folder / "out", steps))
                    os.kill(pids[-1], signal.SIGTERM)

                more = ["--resume"] if number else []
                more += ["--allow-change", "max_steps"] if number else []
                ranks = tiny.ranks(world_size, *flags, *sizes, *more, while_running=stop, ill={"step_seconds": 0.03})
                assert [rank.code for rank in ranks] == [75] * world_size, ranks[0].out
                seen.append(ranks[0])
            record = json.loads(sorted((tiny.folder / "out/checkpoints").glob("step-*/state.json"), key=_step_of)[-1].read_text())
            order = [example for examples in record["run"]["memory"]["order"] for example in examples]
            from toolkit.data.loading.order import epoch_order

            assert len(order) == record["run"]["position"]
            for epoch in range(-(-len(order) // 30)):
                expected = epoch_order(30, 42, epoch).tolist()
                got = order[30 * epoch : 30 * (epoch + 1)]
                assert got == expected[: len(got)]
            line.measured = f"0 missed, 0 twice in {len(order)} examples over {len(worlds)} worlds"
    line.check()


def _step_of(path: Any) -> int:
    return int(path.parent.name[5:])


@pytest.mark.slow
def test_a_row_that_is_not_finite_is_skipped_by_all_ranks_alike(tiny: Any, tally: Any) -> None:
    """Only one rank sees it. Fails when: `finite` is decided before the gradients and the loss are those of all ranks."""
    line = tally("F16", "a row with an infinite loss, 2 ranks")
    with line.trial():
        ranks = tiny.ranks(2, *FLAGS, ill={"nonfinite": "row", "at": [3]})
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].out
        results = [ranks[0].result, json.loads((ranks[0].folder / "result-1.json").read_text())]
        assert all(result["finite"] for result in results)
        assert results[0]["weights"] == results[1]["weights"]
        with_it = [step for step, examples in enumerate(results[0]["order"], 1) if 3 in examples]
        assert results[0]["applied"] == 16 - len(with_it)
        incidents = [json.loads(text) for text in (ranks[0].folder / "incidents/nonfinite.jsonl").read_text().splitlines()]
        assert [incident["step"] for incident in incidents] == with_it
        assert all("rows.jsonl:4" in json.dumps(incident["rows"]) for incident in incidents)
    line.check()


@pytest.mark.slow
def test_a_directory_in_use_is_refused_by_all_ranks(tiny: Any) -> None:
    """With one message, and none of them left behind. Fails when: the main process alone raises."""
    from filelock import FileLock

    folder = tiny.fresh()
    folder.mkdir()
    with FileLock(folder / ".lock"):
        ranks = tiny.ranks(2, *FLAGS, timeout=60)
    assert [rank.code for rank in ranks] == [2, 2]
    assert "is writing there now" in ranks[0].out


@pytest.mark.slow
def test_a_deadline_in_the_middle_of_an_evaluation_is_kept_though_one_rank_alone_was_signaled(tiny: Any, tally: Any) -> None:
    """Fails when: leave_in_time waits for the other rank, or that one takes the end for an error."""
    line = tally("F9", "--stop-deadline 2 during an evaluation of 4 s, 2 ranks, one signaled")
    with line.trial():
        folder, began = tiny.fresh(), []
        flags = [*FLAGS, "--eval-strategy", "steps", "--eval-steps", "4", "--stop-deadline", "2"]

        def stop(pids: list[int]) -> None:
            wait_until(logged(folder, 4))
            time.sleep(0.5)  # the evaluation has begun
            os.kill(pids[0], signal.SIGTERM)
            began.append(time.monotonic())
            wait_until(lambda: not _running(pids[0]), 20)
            began.append(time.monotonic())

        ranks = tiny.ranks(2, *flags, while_running=stop, ill={"eval_seconds": 4}, timeout=40)
        assert [rank.code for rank in ranks] == [75, 75], ranks[0].out + ranks[1].out
        assert began[1] - began[0] < 4
        assert "--resume" in ranks[0].out
        resumed = tiny.ranks(2, *flags, "--resume", "--eval-on-start")
        assert [rank.code for rank in resumed] == [0, 0], resumed[0].out
        steps = [event["step"] for event in resumed[0].metrics if "eval_loss" in event]
        assert steps == [4, 8, 12, 16]
    line.check()


@pytest.mark.slow
def test_the_ranks_resume_from_the_checkpoint_that_the_main_one_sees(tiny: Any) -> None:
    """Or all refuse: here rank 1 cannot read it. Fails when: each rank looks for itself."""
    folder = tiny.fresh()
    begun = tiny.ranks(2, *FLAGS, ill={"step_seconds": 0.02})
    assert [rank.code for rank in begun] == [0, 0]
    (folder / "checkpoints").rename(folder / "elsewhere")
    resumed = tiny.ranks(2, *FLAGS, "--resume", "--allow-change", "max_steps", "--max-steps", "18")
    assert [rank.code for rank in resumed] == [0, 0], resumed[0].out
    assert "starting fresh" in resumed[0].out
    damaged = next((folder / "checkpoints").glob("step-18/state.json"))
    damaged.write_text("{}")
    refused = tiny.ranks(2, *FLAGS, "--resume-from", str(damaged.parent), "--max-steps", "18", timeout=60)
    assert [rank.code for rank in refused] == [2, 2]
    assert "damaged checkpoint" in refused[0].out

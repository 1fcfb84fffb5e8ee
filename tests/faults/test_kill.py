"""SIGKILL while training: a resumed run ends as one that was never killed, whatever was random in it."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

BERT = ["--model", "tiny-bert", "--dropout", "0.1"]
KINDS = {
    "dropout, accumulation, middle of an epoch": [*BERT, "--gradient-accumulation-steps", "3", "--save-steps", "3"],
    "dropout, 2 workers": [*BERT, "--dataloader-num-workers", "2"],
    "packing": ["--packing"],
    "packing, accumulation, 2 workers": ["--packing", "--gradient-accumulation-steps", "2", "--dataloader-num-workers", "2"],
    "steps across epochs, groups of like length": ["--per-device-train-batch-size", "4", "--group-by-length"],
    "saved at each epoch's end": ["--save-strategy", "epoch", "--per-device-train-batch-size", "5"],
    "logged every third step": ["--logging-steps", "3"],
    "saved in the background": [*BERT, "--async-save", "--save-steps", "2"],
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_to_the_same_weights_curve_and_order(tiny, tally, chance, count, resumed_from, kind: str) -> None:
    """Fails when: a micro-batch's seed depends on what ran before; the optimizer, the position or the metrics of a logging
    window are not in the checkpoint; workers that outlive a killed process keep its output directory locked."""
    line, whole = tally("F1", f"SIGKILL at a random moment, resumed: {kind}"), tiny.reference(*KINDS[kind])
    for _ in range(count(1, 25)):
        tiny.fresh()
        after = chance.uniform(0, 1.1 * tiny.seconds_in_run(whole))
        killed = tiny.killed(*KINDS[kind], after=after)
        with line.trial(f"killed after {after:.3f} s"):
            resumed = tiny(*KINDS[kind], "--resume")
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome, (len(killed.metrics), resumed_from(resumed))
    line.check()


def test_workers_that_outlive_a_killed_process_keep_nobody_out(tiny, tally, count) -> None:
    """The process alone is killed, as the kernel does when memory is full, and started again at once.

    Fails when: the lock on the output directory is held by whoever inherited it, and nobody waits for their end.
    """
    flags = [*BERT, "--dataloader-num-workers", "2"]
    line, whole = tally("F1", "SIGKILL of the process alone, its 2 workers alive, started again at once"), tiny.reference(*flags)
    for _ in range(count(1, 10)):
        metrics = tiny.fresh() / "metrics.jsonl"

        def kill(pid: int, metrics: Path = metrics) -> None:
            while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)

        tiny(*flags, while_running=kill, ill={"step_seconds": 0.05})
        with line.trial():
            resumed = tiny(*flags, "--resume")
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome
    line.check()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_random_augmentation_is_the_same_after_a_kill(tiny, tally, chance, count, workers: str) -> None:
    """Fails when: the generator of an augmentation is not a function of (seed, epoch, example) alone."""
    flags = ["--augmented", "--dataloader-num-workers", workers]
    line, whole = tally("F2", f"random augmentation, SIGKILL, resumed: {workers} workers"), tiny.reference(*flags)
    assert whole.result["seen"] != tiny.reference().result["seen"]
    for _ in range(count(1, 30)):
        tiny.fresh()
        after = chance.uniform(0, tiny.seconds_in_run(whole))
        tiny.killed(*flags, after=after)
        with line.trial(f"killed after {after:.3f} s"):
            resumed = tiny(*flags, "--resume")
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome
    line.check()


STREAM = ["--streaming", "--max-steps", "40", "--save-steps", "3"]  # 80 examples: into the third epoch
WINDOWS = {"small_windows": 16}


@pytest.mark.fast(1)
@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_killed_in_a_later_epoch_goes_on_exactly(tiny, tally, chance, count, packing: bool) -> None:
    """Fails when: a stream is read from its beginning after a resume, or the window's mixing counts from there."""
    flags = [*STREAM, *(["--packing"] if packing else [])]
    line = tally("F3", f"stream killed in epoch 2 or later, resumed{', packing' if packing else ''}")
    whole = tiny.reference(*flags, plan=WINDOWS)
    assert all(0 < event["data_wait"] < 1 for event in whole.metrics if "loss" in event)
    for _ in range(count(1, 15)):
        tiny.fresh()
        step = chance.randrange(16, 40)
        metrics = tiny.folder / "out/metrics.jsonl"

        def kill(pid: int, metrics: Path = metrics, step: int = step) -> None:
            while not (metrics.exists() and metrics.read_text().count("\n") >= step):
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)

        tiny(*flags, plan=WINDOWS, while_running=kill)
        with line.trial(f"killed after step {step}"):
            resumed = tiny(*flags, "--resume", plan=WINDOWS)
            assert resumed.code == 0, resumed.out
            assert resumed.outcome == whole.outcome
    line.check()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["changed", "other_order"])
def test_a_stream_that_gives_other_examples_is_refused(tiny, tally, chance, count, source: str) -> None:
    """Fails when: the digest of what was consumed is not compared at a resume."""
    flags = [*STREAM, "--allow-change", "source"]
    line = tally("F3", f"stream resumed when its source is {source.replace('_', ' ')}: refused by name")
    for _ in range(count(1, 15)):
        tiny.fresh()
        # within an epoch's first window, which holds the changed row, or anywhere when the order is another one
        stop = chance.randrange(3, 7) if source == "changed" else chance.randrange(3, 40)
        begun = tiny(*flags, plan={**WINDOWS, "kill_after_save": -(-stop // 3)})
        with line.trial(f"stopped near step {stop}"):
            assert begun.code == -9, begun.out
            resumed = tiny(*flags, "--source", source, "--resume", plan=WINDOWS)
            assert resumed.code == 2, resumed.out
            assert "the stream gave other examples" in resumed.out
    line.check()


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_of_its_lives_ends_as_if_it_had_never_been(tiny, tally, chance, count, long_form) -> None:
    """A launcher that starts it again and again. Fails when: a life that ends before the next save loses what was saved."""
    flags = [*BERT, "--save-steps", "1", "--gradient-accumulation-steps", "2"]
    line, whole = tally("F18", "restarted until done, SIGKILL 1 to 3 s after the first step of each life"), tiny.reference(*flags)
    lives, scale = [], 1.0 if long_form else 0.2
    for _ in range(count(1, 20)):
        folder = tiny.fresh()
        metrics = folder / "metrics.jsonl"
        ended, number = None, 0
        while ended is None or (ended.code == -9 and number < 100):
            number += 1
            before = metrics.read_text().count("\n") if metrics.exists() else 0
            after = scale * chance.uniform(1, 3)

            def kill(pid: int, metrics: Path = metrics, before: int = before, after: float = after) -> None:
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
                    if metrics.exists() and metrics.read_text().count("\n") > before:
                        break
                    time.sleep(0.005)
                deadline = time.monotonic() + after
                while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
                    time.sleep(0.005)
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)

            ended = tiny(*flags, "--resume", while_running=kill, ill={"step_seconds": 0.25 * scale})
        lives.append(number)
        with line.trial(f"{number} lives"):
            assert ended.code == 0, ended.out
            assert ended.outcome == whole.outcome
    line.measured = f"{min(lives)} to {max(lives)} lives"
    line.check()


@pytest.mark.slow
def test_the_recipe_for_fine_tuning_survives_a_kill(tiny, tally, chance, count, root) -> None:
    """recipes/sft.py as users run it, packed. Fails when: any part of it (its samples, its evaluation) draws random numbers
    that training then lacks."""
    flags = [
        "--hidden-size", "32", "--num-hidden-layers", "1", "--max-train-examples", "60", "--max-eval-examples", "6", "--max-length", "128",
        "--num-samples", "0", "--max-steps", "10", "--eval-steps", "5", "--save-steps", "3", "--logging-steps", "1", "--use-cpu",
    ]  # fmt: skip
    line, script = tally("F1", "SIGKILL after a random step, resumed: recipes/sft.py"), str(root / "recipes/sft.py")

    def outcome(run) -> tuple:
        weights = (run.folder / "model/model.safetensors").read_bytes()
        evaluations = [(event["step"], event["eval_loss"]) for event in run.metrics if "eval_loss" in event]
        return weights, run.curve, evaluations

    whole = tiny(*flags, script=script, output_dir="whole")
    assert whole.code == 0, whole.out
    for _ in range(count(1, 3)):
        folder, step = tiny.fresh(), chance.randrange(1, 10)

        def kill(pid: int, folder: Path = folder, step: int = step) -> None:
            metrics = folder / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count('"loss"') >= step):
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)

        tiny(*flags, script=script, while_running=kill)
        with line.trial(f"killed after step {step}"):
            resumed = tiny(*flags, "--resume", script=script)
            assert resumed.code == 0, resumed.out
            assert outcome(resumed) == outcome(whole)
            assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    line.check()

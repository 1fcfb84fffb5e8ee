"""toolkit profile: planted delays are found where they are, and named."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from typer.testing import CliRunner

from toolkit.cli.main import app
from toolkit.cli.profile import differs, of_rank
from toolkit.config import Refusal
from toolkit.data.loading.batch import Batch
from toolkit.diagnostics.advice import first_change
from toolkit.diagnostics.communication import RankTimes, Spent, not_hidden, share_of_waiting
from toolkit.diagnostics.profile import PHASES, WARM_UP, Profile, _Enough, _padding, _Timer, profile_of
from toolkit.diagnostics.saving import Saving, saving_of
from toolkit.distributed.engines import engine_of

pytestmark = pytest.mark.warm
ROOT = Path(__file__).parents[2]
SMALL = ["--hidden-size", "16", "--num-hidden-layers", "1", "--intermediate-size", "16", "--max-eval-examples", "16", "--use-cpu"]


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "toolkit", "profile", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


DELAYS = {
    "data": ("    collate = partial(", "    collate = late(tk.collate_padded,"),
    "forward": ("loss_fn, rates", "late(loss_fn), rates"),
    "other": ("            rates = schedule", "            time.sleep(0.3)\n            rates = schedule"),
}
LATE = '''
import time

def late(function, *_, **settings):
    def delayed(*values):
        time.sleep(0.3)
        return function(*values, **settings)
    return delayed

@dataclass'''


@pytest.mark.slow
@pytest.mark.parametrize("phase", DELAYS)
def test_a_planted_delay_is_in_its_phase(phase: str, tmp_path: Path) -> None:
    """0.3 seconds in the collate function, in the loss or in the loop, of a recipe whose steps are much shorter.

    Fails when: the time between two batches goes to the data, or the parts do not add up to the step.
    """
    text = (ROOT / "recipes" / "accelerated.py").read_text()
    before, after = DELAYS[phase]
    assert before in text
    after = after if phase != "data" else "    collate = late(tk.collate_padded, "
    text = text.replace(before, after).replace("collate_padded, tk.collate_padded, ", "collate_padded, ").replace("\n@dataclass", LATE, 1)
    (tmp_path / "mine.py").write_text(text)
    found = run("mine.py", *SMALL, "--steps", "3", "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    profile = json.loads(found.stdout)
    assert "USDT" not in found.stderr  # lines of torch's profiler, where its level is not raised
    assert profile["seconds"][phase] > 0.29
    assert max(profile["seconds"], key=profile["seconds"].get) == phase
    assert sum(profile["seconds"].values()) == pytest.approx(profile["step"])
    assert profile["operations"]
    if phase == "data":
        assert "--dataloader-num-workers 2" in profile["first"]
    assert not (tmp_path / "runs").exists()


def test_sampling_and_rewards_are_not_the_loops(tmp_path: Path) -> None:
    """Answers of 24 tokens, and rewards that take 0.1 seconds a group. Fails when: their time is in `other`."""
    (tmp_path / "slow.py").write_text("import time\ndef slow(completions, **_):\n    time.sleep(0.1)\n    return [0.0] * len(completions)\n")
    few = ["--global-batch-size", "4", "--num-generations", "2", "--max-completion-length", "24", "--reward-funcs", "slow.py:slow"]
    found = run("grpo", *SMALL, *few, "--steps", "3", "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    profile = json.loads(found.stdout)
    assert sum(line.endswith(" ...") for line in found.stderr.splitlines()) == 2  # what is being done
    seconds = profile["seconds"]
    assert seconds["scoring"] > 0.1
    assert seconds["sampling"] > seconds["other"]
    assert sum(seconds.values()) == pytest.approx(profile["step"])


@pytest.mark.parametrize("recipe", ["basic", "embedding", "kto"])
def test_forward_passes_outside_of_train_step_are_no_time_of_the_loop(recipe: str, tmp_path: Path) -> None:
    """Of a loop of its own, of a pass without a graph before the step, and of an estimate; of the last two in the trace as well.
    Fails when: `enter` takes what comes before `backward` for the loop's own, or `_CALLED` lacks cache_gradients or estimate_kl."""
    found = run(recipe, *SMALL, "--steps", "9", "--json", "--trace", "trace.json", cwd=tmp_path)  # a median that busy cores leave alone
    assert found.returncode == 0, found.stderr
    profile = json.loads(found.stdout)
    assert profile["seconds"]["forward"] > 0.2 * profile["step"]
    assert profile["seconds"]["other"] < 0.2 * profile["step"]  # .05, at most .11 on busy cores; an estimate that is left out, .3
    assert profile["seconds"]["clipping"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    marked = {phase: sum(e["dur"] for e in events if re.fullmatch(rf"step \d+: {phase}", e["name"])) for phase in ("forward", "other")}
    assert recipe == "basic" or marked["other"] < 0.3 * marked["forward"]
    assert sum(profile["seconds"].values()) == pytest.approx(profile["step"])


@pytest.mark.parametrize(("seconds", "traced"), [(1.0, 3), (5.0, 1)])
def test_one_step_is_traced_where_it_takes_seconds(seconds: float, traced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each is counted until all are timed. Fails when: the trace of a long step is of three, which take a minute to read."""
    clock, done = [0.0], list[int]()
    monkeypatch.setattr("toolkit.diagnostics.profile.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    timer = _Timer(4, None, None, {}, done.append)
    with contextlib.suppress(_Enough):
        for number in range(20):
            timer.begin_step(number)
            clock[0] += seconds
    assert (timer.begun, done) == (WARM_UP + 4 + traced, [1, 2, 3, 4, 5, 6, 7])


def test_padding_is_what_is_computed_of_it() -> None:
    """Rows of 2, 3 and 10 tokens, padded to 10 or read in two groups. Fails when: rows that are read by their lengths count as long as
    the longest, or a row without padding counts its mask."""
    mask = (torch.arange(10)[None] < torch.tensor([2, 3, 10])[:, None]).long()
    padded = {"input_ids": mask, "attention_mask": mask}
    ends = torch.tensor([0, 2, 5, 15])
    for rows, share in ((padded, 0.5), (padded | {"groups": [(2, 3), (1, 10)]}, 1 / 16), (padded | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}, 0.0)):
        assert _padding(Batch([rows], {"examples": 3.0}, [])) == pytest.approx(share)


def made(padding: float = 0.0, device: str = "mps", busy: float | None = None, **shares: float) -> Profile:
    seconds = {phase: shares.get(phase, 0.0) for phase in PHASES}
    seconds["forward"] += 1 - sum(seconds.values())
    return Profile(device, seconds, 1.0, [], padding, busy=busy)


@pytest.mark.parametrize(
    ("profile", "settings", "said"),
    [
        (made(data=0.2), {"dataloader_num_workers": 0}, "--dataloader-num-workers 2"),
        (made(data=0.2), {"dataloader_num_workers": 4}, "--dataloader-num-workers 8"),
        (made(padding=0.4), {"packing": False}, "--packing"),
        (made(padding=0.4), {"packing": True}, "--group-by-length"),
        (made(padding=0.4), {"packing": False, "group_by_length": True}, "padding: take a smaller --max-length"),
        (made(padding=0.4), {"packing": False, "row_layout": "padded"}, "padding: take --row-layout packed"),
        (made(optimizer=0.4), {}, "--global-batch-size"),
        (made(), {"gradient_checkpointing": True}, "--gradient-checkpointing"),
        (made(other=0.5), {}, "your loop"),
        (made(sampling=0.5, other=0.2), {}, r"50% .*sampling: .*--max-completion-length\.$"),
        (made(sampling=0.5, device="cuda"), {"bf16": True, "torch_compile": False}, "--rollout-server"),
        (made(sampling=0.5, device="cuda"), {"bf16": True, "rollout_server": "http://x"}, "give the server"),
        (made(sampling=0.5), {"on_policy_share": 0.5}, "--max-new-tokens, or a smaller --on-policy-share"),
        (made(scoring=0.4, sampling=0.5), {"reward_processes": 2}, "40% .*--reward-processes 4"),
        (made(device="cuda"), {"bf16": True, "torch_compile": False}, "try --torch-compile"),
        (made(device="cuda", busy=0.7), {"bf16": True, "torch_compile": False}, "for 30% of a step"),
        (made(device="cuda", busy=0.7), {"bf16": True, "torch_compile": True}, "larger and fewer micro-batches"),
        (made(device="cuda", busy=0.9), {"bf16": True, "torch_compile": True}, "no single bottleneck"),
        (made(), {}, "no single bottleneck"),
    ],
)
def test_the_first_change_is_that_of_the_largest_loss(profile: Profile, settings: dict[str, object], said: str) -> None:
    """Fails when: a rule asks for a flag that is set, or is passed over."""
    assert re.search(said, first_change(profile, settings))


def saved(share: float, saves: int = 10, **shares: float) -> Profile:
    """Of 100 steps of a second."""
    seconds = share * 100 / (saves * (1 - share))
    return dataclasses.replace(made(**shares), saving=saving_of(seconds, seconds, 10**6, saves, 100, 1.0))


@pytest.mark.parametrize(
    ("profile", "settings", "said"),
    [
        (saved(0.5, saves=50), {"async_save": False}, r"50% .*--save-steps 38, .*\b5%.*--async-save\."),
        (saved(0.3), {"async_save": True}, r"30% .*--save-steps 82, .*\b5%\.$"),
        (saved(0.5), {}, r"--save-steps 100, .*\b9%\.$"),
        (saved(0.3, data=0.4), {}, "waits for data"),
        (saved(0.3, data=0.2), {}, "30% of the run"),
        (saved(0.05), {}, "no single bottleneck"),
        (saved(0.3, saves=1), {}, "no single bottleneck"),
    ],
)
def test_saving_comes_first_where_it_is_the_largest_loss(profile: Profile, settings: dict[str, object], said: str) -> None:
    """Fails when: it is asked before or after all else, or the one save of a short run is to be made less often."""
    assert re.search(said, first_change(profile, settings))


def test_a_save_waits_for_one_that_is_still_being_written() -> None:
    """20 checkpoints in 100 steps of a second. Fails when: of --async-save the copy alone counts."""
    assert saving_of(0.1, 3.0, 1, 20, 100, 1.0).share == pytest.approx(2 / 102)
    assert saving_of(0.1, 9.0, 1, 20, 100, 1.0).share == pytest.approx(80 / 180)
    assert saving_of(2.0, 2.0, 1, 0, 100, 1.0) == Saving(2.0, 2.0, 1, 0, 100, 0.0)


NO_ROOM = """
import safetensors.torch


def full(*arguments, **more):
    raise safetensors.SafetensorError("I/O error: Disk quota exceeded (os error 122)")


safetensors.torch.save_file = full

"""


@pytest.mark.parametrize("has_room", [True, False])
def test_a_checkpoint_is_written_after_the_steps(has_room: bool, tmp_path: Path) -> None:
    """Fails when: `timer.run` is not found, the configured --save-steps are not those that count, or a full
    disk is known by its errno, which the errors of safetensors lack."""
    text = (ROOT / "recipes" / "accelerated.py").read_text()
    (tmp_path / "mine.py").write_text(text if has_room else text.replace("\n@dataclass", NO_ROOM + "@dataclass", 1))
    steps = ["--steps", "3", "--max-steps", "20", "--save-steps", "6", "--no-bf16"]
    found = run("mine.py", *SMALL, *steps, "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    profile = json.loads(found.stdout)
    if not has_room:
        assert profile["saving"] is None
        assert all(word in profile["not_saved"] for word in ("quota", "TMPDIR"))
        return
    saving = profile["saving"]
    assert (saving["saves"], saving["steps"], profile["not_saved"]) == (4, 20, "")
    assert 0 < saving["seconds"] <= saving["written"] < 60
    assert saving["size"] > 10**4
    cost = 4 * saving["seconds"]
    assert saving["share"] == pytest.approx(cost / (cost + 20 * profile["step"]), rel=1e-3)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


def measured(exchanging: float = 0.0, mfu: float | None = None, padding: float = 0.0, **seconds: float) -> RankTimes:
    """A rank with a backward of 4 s, of which `exchanging` in communication, traced in two steps of half the speed."""
    spent = [{"backward": Spent(8.0, 2 * exchanging), "data": Spent(2.0, 0.0)} for _ in range(2)]
    parts = dict.fromkeys(PHASES, 0.0) | {"backward": 4.0, "data": 1.0} | seconds
    return RankTimes(parts, spent, [], padding, 100.0, mfu)


def test_the_table_of_several_ranks_adds_up() -> None:
    """Three ranks, the first of which is waited for. Fails when: communication stays in its phase too (`parts[phase] -=` is left
    out), the first rank's MFU is the job's, the mean is taken for the worst padding, or waiting is measured by the mean of ranks
    (`min(spent)` is their mean)."""
    job = profile_of([measured(1.0, 0.5, data=3.0), measured(3.0, 0.3, 0.4), measured(2.0, 0.1, 0.1)], "cuda", "DDP")
    assert job.seconds["communication"] == pytest.approx((1 + 3 + 2) / 3)
    assert job.seconds["backward"] == pytest.approx((3 + 1 + 2) / 3)
    assert job.seconds["data"] == pytest.approx(5 / 3)
    assert job.step == pytest.approx(sum(job.seconds.values())) == pytest.approx((7 + 5 + 5) / 3)
    assert job.waiting == pytest.approx((0 + 2 + 1) / (1 + 3 + 2))
    assert (job.mfu, job.tokens_per_second, job.padding) == (pytest.approx(0.3), 100.0, 0.4)
    assert [job.slowest("data"), job.late()[:2]] == [(0, 3.0), (0, "data")]
    assert [differs(job, phase) for phase in ("data", "communication", "clipping")] == [True, True, False]
    alone = profile_of([measured(1.0)], "cpu", "DDP")
    assert (alone.ranks, alone.engine, alone.seconds["backward"], "communication" in alone.seconds) == ([], "", 4.0, False)
    assert of_rank(Path("a/trace.json"), {"RANK": "1", "WORLD_SIZE": "2"}) == Path("a/trace-rank1.json")
    assert of_rank(Path("a/trace.json"), {}) == Path("a/trace.json")


def test_what_is_waited_for_now_here_now_there_is_counted_step_by_step() -> None:
    """Fails when: sums over the steps are compared, of which each rank has the same."""
    now, then = {"forward": Spent(4.0, 1.0)}, {"forward": Spent(4.0, 3.0)}
    first, second = RankTimes({"forward": 4.0}, [now, then]), RankTimes({"forward": 4.0}, [then, now])
    assert share_of_waiting([first, second]) == pytest.approx(0.5)
    assert share_of_waiting([first, first]) == 0.0


def test_hidden_communication_costs_nothing() -> None:
    """Fails when: two exchanges at a time count twice, or a computation hides only what begins after it."""
    assert not_hidden([(1, 5), (2, 9)], [(0, 2), (4, 6), (5, 7)]) == [(2, 4), (7, 9)]
    assert not_hidden([(1, 2)], [(0, 3)]) == []
    assert not_hidden([], [(0, 3)]) == []


def job(exchanged: Any = "nothing", late: str = "", exchanging: float = 0.0, waiting: float = 0.0) -> Profile:
    """Two ranks, of which the second is late in a phase by as much as the first waits."""
    ranks = [{**dict.fromkeys(PHASES, 0.1), "communication": exchanging + waiting * scale} for scale in (1, -1)]
    if late:
        ranks[1][late] += 2 * waiting
    seconds = {phase: (ranks[0][phase] + ranks[1][phase]) / 2 for phase in ranks[0]}
    share = waiting / exchanging if exchanging else 0.0
    return Profile("mps", seconds, sum(seconds.values()), [], exchanged=exchanged, waiting=share, ranks=ranks)


@pytest.mark.parametrize(
    ("profile", "settings", "said"),
    [
        (job(late="data", exchanging=0.3, waiting=0.2), {"dataloader_num_workers": 3}, "rank 1, .* data: take --dataloader-num-workers 6"),
        (job(late="other", exchanging=0.3, waiting=0.2), {}, "rank 1, .* other: .*your loop"),
        (job(late="forward", exchanging=0.3, waiting=0.2), {"packing": False}, "rank 1, .* forward: .*device"),
        (job(exchanging=0.3, waiting=0.2), {"packing": False}, "differ in length .*take --packing"),
        (job(exchanging=0.3, waiting=0.2), {"group_by_length": False}, "--group-by-length"),
        (job("nothing", exchanging=0.3), {}, "--gradient-accumulation-steps"),
        (job("gradients", exchanging=0.3), {}, "--per-device-train-batch-size"),
        (job("weights", exchanging=0.3), {}, "--zero-stage 2"),
        (job("nothing", exchanging=0.05), {}, "waits for data"),
    ],
)  # fmt: skip
def test_ranks_that_wait_come_before_everything_else(profile: Profile, settings: dict[str, object], said: str) -> None:
    """Fails when: the late rank is the one that waits most, or transfer counts as waiting."""
    assert re.search(said, first_change(profile, settings))


@pytest.mark.parametrize(("stage", "exchanged"), [(1, "nothing"), (2, "gradients"), (3, "weights")])
def test_what_ranks_exchange_in_each_micro_batch_follows_from_the_stage_of_zero(stage: int, exchanged: str) -> None:
    """Fails when: stage 1 counts as stage 2, which has the advice for engines that exchange gradients in each."""
    accelerator: Any = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    )
    assert engine_of(accelerator).exchanged(accelerator) == exchanged


LATE_RANK = "            import os, time\n            time.sleep(int(os.environ['RANK']))\n"


@pytest.mark.slow
@pytest.mark.parametrize("engine", [["--deepspeed", str(ROOT / "tests/all_sharded.json")], ["--fsdp"]])
def test_a_late_rank_is_named_once_for_the_job(engine: list[str], tmp_path: Path) -> None:
    """Two gloo ranks, the second of which sleeps a second in each step of its loop, and a trace of each.

    Fails when: the wait is left in the phase in which it happens (`apart` gives `self.seconds`), every rank prints, or both
    write one trace.
    """
    text = (ROOT / "recipes" / "accelerated.py").read_text()
    before = "            rates = schedule"
    assert before in text
    (tmp_path / "late.py").write_text(text.replace(before, LATE_RANK + before))
    words = [*SMALL, "--optim", "adamw_torch", "--processes", "2", "--steps", "3", "--trace", "t.json", "--json", *engine]
    found = run("late.py", *words, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    profile = json.loads(found.stdout)  # of one rank alone
    assert len(profile["ranks"]) == 2
    assert profile["exchanged"] == "weights"
    punctual, late = profile["ranks"]
    assert late["other"] > 0.5 + punctual["other"]
    assert punctual["communication"] > 0.5 + late["communication"]
    assert sum(profile["seconds"].values()) == pytest.approx(profile["step"])
    assert re.search(r"\brank 1, .* in other\b", profile["first"])
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["t-rank0.json", "t-rank1.json"]
    assert "step 7: backward" in (tmp_path / "t-rank1.json").read_text()


@pytest.mark.slow
def test_ranks_refuse_once() -> None:
    """Fails when: each rank shows the refusal (`LOCAL_RANK` is not asked for)."""
    found = run("accelerated", *SMALL, "--max-steps", "4", "--max-train-examples", "40", "--processes", "2")
    assert (found.returncode, found.stderr.count("refused:"), "16 steps" in found.stderr) == (2, 1, True), found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["accelerated", "--memory", "x.pickle"], "--memory"),
        (["accelerated", "--trace", "recipes"], "--trace recipes: is a folder"),
        (["accelerated", "--trace", "/proc/x.json"], "--trace /proc/x.json"),
        (["accelerated", "--steps", "1"], "--steps"),
        (["nowhere"], "nowhere"),
        (["distill"], "--teacher"),
        (["accelerated", *SMALL, "--max-steps", "4", "--max-train-examples", "40"], "16 steps"),
        (["accelerated", *SMALL, "--max-steps", "9", "--max-train-examples", "40"], "Take --steps 3,"),
        (["accelerated", *SMALL, "--max-steps", "8", "--max-train-examples", "40"], "more data"),
    ],
)
def test_what_cannot_be_profiled_is_one_message(words: list[str], said: str) -> None:
    """Fails when: one of them shows a traceback."""
    found = run(*words)
    assert (found.returncode, said in found.stderr, "Traceback" in found.stderr) == (2, True, False), found.stderr


def test_a_trace_for_which_there_is_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the part that torch wrote stays, and fills the disk."""

    def profiled(main: Any, config: Any, steps: int, trace: Path, memory: None) -> Profile:
        trace.with_name(f"{trace.name}.tmp").write_text("the first part")
        return made()

    monkeypatch.setattr("toolkit.diagnostics.profile.profile", profiled)
    done = CliRunner().invoke(app, ["profile", "sft", "--trace", str(tmp_path / "trace.json")], prog_name="toolkit")
    assert isinstance(done.exception, Refusal)
    assert list(tmp_path.iterdir()) == []

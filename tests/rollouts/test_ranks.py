"""Several ranks share the prompts and all have all rewards: those of one rank, bit for bit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk

RUN = str(Path(__file__).with_name("ranks_run.py"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes of rewards are killed in Linux's way")]


@pytest.fixture
def rewards(tiny: Any) -> str:
    """A function that notes its calls, and a reward model."""
    (tiny.folder / "noted.py").write_text(
        "import os\n"
        "def noted(prompts, completions, **columns):\n"
        "    open(os.environ['CALLS'], 'a').write(prompts[0] + '\\n')\n"
        "    return [len(c) / 3 for c in completions]\n"
        "def fails(prompts, completions, **columns):\n"
        "    return [1 / (prompts[0] != 'p5') for c in completions]\n"
    )
    tokenizer = tk.pad_apart_from_end(tk.train_tokenizer(["some text"], 300))
    tokenizer.save_pretrained(tiny.folder / "judge")
    model = tk.load_model("AutoModelForSequenceClassification", tk.ModelConfig(hidden_size=32, num_hidden_layers=1), tokenizer, num_labels=1)
    model.save_pretrained(tiny.folder / "judge")
    return f"{tiny.folder}/noted.py:noted,{tiny.folder}/judge"


def scored(tiny: Any, rank: int) -> list[dict[str, Any]]:
    return json.loads((tiny.folder / "out" / f"scored-{rank}.json").read_text())


def test_each_of_two_ranks_has_what_one_finds_and_each_prompt_is_scored_once(tiny: Any, rewards: str) -> None:
    """Fails when: `by_rank[number % ranks]` is put together rank by rank, or each rank scores all prompts."""
    flags = ["--reward-funcs", rewards, "--tokenizer", f"{tiny.folder}/judge"]
    alone = tiny(*flags, script=RUN)
    assert alone.code == 0, alone.out[-3000:]
    one = scored(tiny, 0)
    for path in (tiny.folder / "out").glob("calls-*"):
        path.unlink()
    ranks = tiny.ranks(2, *flags, script=RUN)
    assert [each.code for each in ranks] == [0, 0], ranks[0].out[-3000:]
    assert scored(tiny, 0) == scored(tiny, 1) == one
    assert len({each["rewards"]["judge"] for each in one}) > 5
    calls = [(tiny.folder / "out" / f"calls-{rank}.txt").read_text().split() for rank in range(2)]
    assert calls == [["p0", "p2", "p4", "p6"], ["p1", "p3", "p5"]]


def test_what_fails_on_one_rank_ends_both_with_code_2(tiny: Any, rewards: str) -> None:
    """Fails when: `_collect` looks at `problems` on the main process alone."""
    ranks = tiny.ranks(2, "--reward-funcs", rewards.replace(":noted", ":fails"), "--tokenizer", f"{tiny.folder}/judge", script=RUN)
    assert [each.code for each in ranks] == [2, 2], ranks[0].out[-3000:]
    assert "made.jsonl:6" in ranks[0].out
    assert "ZeroDivisionError" in ranks[0].out

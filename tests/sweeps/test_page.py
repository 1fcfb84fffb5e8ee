"""The page of a sweep, parsed as a browser would; its plots against plain loops."""

import dataclasses
import html
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.config import Refusal
from toolkit.sweeps.journal import JournalFile, Plan, read_journal
from toolkit.sweeps.page import sweep_page
from toolkit.sweeps.results import best_trials, importances, trials_of
from toolkit.sweeps.space import read_space
from toolkit.sweeps.trials import shown_command

SPACE = {"rate": "log:1e-4..1e-1", "optim": ["adamw", "sgd"], "momentum": "float:0.8..0.99 when optim=sgd", "layers": "int:1..8"}
HOSTILE = "<script>alert('x')</script>"


class Page(HTMLParser):
    """Tags and texts; refuses tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def valley(settings: dict[str, Any]) -> dict[str, float]:
    if settings["rate"] > 5e-2:
        raise RuntimeError(f"diverged {HOSTILE}")
    return {"loss": (math.log10(settings["rate"]) + 2.5) ** 2 + 0.01 * settings["layers"], "size": 1e6 * settings["layers"]}


def swept(folder: Path, trials: int = 24, **more: Any) -> tuple[Plan, list[Any], Page, str]:
    tk.sweep(valley, SPACE, trials=trials, folder=folder, **{"maximize": {"loss": False}, **more})
    plan, jobs = read_journal(JournalFile(folder))
    assert plan
    text = sweep_page(folder, plan, jobs, folder / "report.html")
    return plan, jobs, Page(text), text


def test_the_page_has_every_trial_and_what_came_of_it(tmp_path: Path) -> None:
    """Failed trials and conditional settings among them; the best so far is that of a plain loop.

    Fails when: _plots in page.py takes the last value in place of the best so far, or a reason is not escaped.
    """
    _, jobs, page, text = swept(tmp_path)
    found = "".join(page.texts)
    values = [job.outcome.values.get("loss") for job in jobs]
    assert all(f"{job.trial:04d}" in page.texts for job in jobs)
    assert found.count(f"failed: RuntimeError: diverged {HOSTILE}") == values.count(None) > 0
    assert "script" not in {tag for tag, _ in page.tags}
    best, lines = math.inf, []
    for value in values:
        best = best if value is None else min(best, value)
        lines.append(best)
    path = next(attributes["d"] for tag, attributes in page.tags if attributes.get("class") == "so-far")
    assert path
    heights = [float(each) for each in re.findall(r"(?:V|,)([\d.]+)", path)]
    assert len(heights) == len(values) - values.count(None)
    assert len(set(heights)) == len({line for line in lines if line < math.inf})
    assert heights == sorted(heights)  # downwards, as the loss falls
    assert "http" not in text


def test_where_there_is_little_the_page_says_so(tmp_path: Path) -> None:
    """No trial, one trial, all failed, a running one. Fails when: sweep_page in page.py draws plots without a value."""
    _, _, page, _ = swept(tmp_path / "one", trials=1)
    assert any("needs 10 trials" in text for text in page.texts)
    plan, jobs, _, _ = swept(tmp_path / "some", trials=3)
    empty = Page(sweep_page(tmp_path, plan, [], tmp_path / "x.html"))
    assert "No trial has a value yet." in empty.texts
    jobs[0].outcome = jobs[1].outcome = None
    (tmp_path / "trials" / "0001").mkdir(parents=True)
    (tmp_path / "trials" / "0001" / "metrics.jsonl").write_text('{"step": 4, "loss": 0.25}\n')
    running = Page(sweep_page(tmp_path, plan, jobs, tmp_path / "x.html")).texts
    assert "not ended" in running
    assert "not ended, at step 4, loss 0.2500" in running


def test_the_bests_command_is_copied_as_it_is_typed(tmp_path: Path) -> None:
    """With words that a shell quotes, and HTML. Fails when: _command in page.py quotes or escapes no word."""
    plan, jobs, _, _ = swept(tmp_path, trials=3)
    plan = dataclasses.replace(plan, recipe="my recipe.py", recipe_digest="d", words=["--run-name", HOSTILE])
    text = sweep_page(tmp_path, plan, jobs, tmp_path / "x.html")
    shown = re.findall(r'<pre class="command">(.*?)</pre>', text, re.S)
    assert HOSTILE not in text
    best = best_trials(list(trials_of(jobs).values()), plan)[0]
    assert shlex.split(html.unescape(re.sub("<[^>]*>", "", shown[0]))) == list(shown_command(plan, best.settings))


def test_a_choice_that_is_not_searched_is_refused(tmp_path: Path) -> None:
    """In a journal that was edited. Fails when: sweep_page in page.py does not call _check_choices."""
    plan, jobs, _, _ = swept(tmp_path, trials=3)
    jobs[1].settings = {**jobs[1].settings, "optim": "other"}
    with pytest.raises(Refusal, match="trial 1 has optim other"):
        sweep_page(tmp_path, plan, jobs, tmp_path / "x.html")


def test_two_objectives_show_their_front(tmp_path: Path) -> None:
    """Fails when: _best in page.py shows the first trial of a front alone."""
    _, _, page, _ = swept(tmp_path, maximize={"loss": False, "size": False})
    title = next(text for text in page.texts if text.startswith("The Pareto front"))
    count = int(title.split(": ")[1].split()[0])
    assert count > 1
    assert sum(attributes.get("class") == "dot best" for _, attributes in page.tags) == 2 * count
    assert sum(tag == "pre" for tag, _ in page.tags) == count


@pytest.mark.parametrize("maximize", [False, True])
def test_the_setting_that_makes_the_best_is_the_most_important(maximize: bool, tmp_path: Path) -> None:
    """a alone tells which trials are the best tenth, b which ones are the worst; the shares sum to 1. Nine trials are too few.

    Fails when: importances in importance.py looks at the worst trials, or forgets which direction is better.
    """
    pytest.importorskip("optuna")

    def function(settings: dict[str, Any]) -> float:
        loss = settings["a"] if settings["a"] < 0.1 else 1 + settings["b"]
        return -loss if maximize else loss

    tk.sweep(function, {"a": "float:0..1", "b": "float:0..1"}, trials=100, maximize=maximize, folder=tmp_path)
    plan, jobs = read_journal(JournalFile(tmp_path))
    assert plan
    shares = importances(list(trials_of(jobs).values()), plan)
    assert shares["a"] > 0.8
    assert sum(shares.values()) == pytest.approx(1)
    with pytest.raises(Refusal):
        importances(list(trials_of(jobs[:9]).values()), plan)


@pytest.mark.parametrize("written", ["a=x,y,z", "a=float:2..5", "a=log:1e-5..1e-1", "a=int:3..9", "a=logint:2..64"])
def test_a_value_is_drawn_where_the_range_has_it(written: str) -> None:
    """`share_of` undoes `at`. Fails when: share_of in space.py forgets the half step around integers."""
    space = read_space([written])[0]
    for step in range(40):
        value = space.at((step + 0.5) / 40)
        assert 0 <= space.share_of(value) <= 1
        again = space.at(space.share_of(value))
        assert again == (pytest.approx(value) if isinstance(value, float) else value)


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    """Fails when: _of_directory in cli/sweep.py does not know report."""
    from typer.testing import CliRunner

    from toolkit.cli.main import app

    swept(tmp_path / "s", trials=3)
    done = CliRunner().invoke(app, ["sweep", "report", str(tmp_path / "s")])
    assert done.exit_code == 0, done.output
    assert "<title>s · sweep</title>" in (tmp_path / "s" / "report.html").read_text(encoding="utf-8")

"""The report as a browser would read it: parsed, never searched for a happy phrase alone."""

import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from toolkit.config import Refusal
from toolkit.report import write_report
from toolkit.report.numbers import log_ticks, round_ticks, show_count, show_seconds
from toolkit.report.plots import Plot, draw_plot, smooth, thin
from toolkit.report.run_list import list_runs
from toolkit.system.interruptions import time_limit
from toolkit.system.numbers import show_bytes, show_digits

pytestmark = pytest.mark.warm

HOSTILE = "<script>alert('x')</script> & \"quotes\" </pre></div>"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A page as a tree walked once: texts, tags, attributes; refuses tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.figures: list[dict] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "figure":
            self.figures.append({"data": attributes, "lines": [], "title": "", "note": ""})
        elif tag == "polyline":
            self.figures[-1]["lines"].append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open[-1:] == ["h4"] and "figure" in self.open:
            self.figures[-1]["title"] += data
        if self.open[-1:] == ["p"] and "figure" in self.open:
            self.figures[-1]["note"] += data

    def figure(self, title: str) -> dict:
        return next(figure for figure in self.figures if figure["title"] == title)

    def values(self, title: str, kind: str) -> list[tuple[float, float]]:
        """The drawn points of a curve, turned back into steps and values."""
        figure = self.figure(title)
        (s0, s1), (v0, v1) = (tuple(map(float, figure["data"][f"data-{what}"].split())) for what in ("steps", "values"))
        found = []
        for line in figure["lines"]:
            if line["class"] == kind:
                for point in line["points"].split():
                    x, y = map(float, point.split(","))
                    share = 1 - y / 1000
                    value = v0 * (v1 / v0) ** share if "data-log" in figure["data"] else v0 + (v1 - v0) * share
                    found.append((s0 + (s1 - s0) * x / 1000, value))
        return found


def write_run(directory: Path, events=(), samples=(), summary=None, card=None, config=None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, records in (("metrics.jsonl", events), ("samples.jsonl", samples)):
        if records:
            (directory / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, record in (("summary.json", summary), ("run.json", card)):
        if record is not None:
            (directory / name).write_text(json.dumps(record))
    if config is not None:
        (directory / "config.yaml").write_text(config)
    return directory


def report(*run_dirs: Path) -> Page:
    path = write_report(run_dirs, run_dirs[0].parent / "report.html")
    return Page(path.read_text(encoding="utf-8"))


def training_events(steps: int) -> list[dict]:
    return [
        {"step": k, "epoch": k / 10, "examples": 8 * k, "time": 1.0 * k, "loss": 2 + 3 / k + 0.1 * math.sin(7 * k),
         "learning_rate": 1e-3 * k / steps, "grad_norm": 1 + 0.3 * math.cos(k), "tokens_per_second": 5000.0 + k}
        for k in range(1, steps + 1)
    ]  # fmt: skip


def evaluations(steps: int, every: int) -> list[dict]:
    return [
        {"step": k, "eval_loss": 2.2 + 3 / (k + 1), "eval_perplexity": math.exp(2.2 + 3 / (k + 1)), "eval_accuracy": k / 100}
        for k in range(0, steps + 1, every)
    ]


@pytest.mark.parametrize("steps", [5, 60])
def test_every_logged_number_is_a_point_of_its_curve(steps, tmp_path):
    """Fails when: a series is drawn from its smoothed values only, or `eval_` is not joined to its training curve."""
    training, evaluated = training_events(steps), evaluations(steps, 5)
    page = report(write_run(tmp_path / "run", training + evaluated))
    raw = "train raw" if steps >= 30 else "train"
    for title, name, kind in (
        ("Loss", "loss", raw), ("Gradient norm", "grad_norm", raw), ("Supervised tokens per second", "tokens_per_second", raw),
        ("Learning rate", "learning_rate", "train"),
    ):
        drawn = page.values(title, kind)
        size = max(abs(event[name]) for event in training)
        assert [step for step, _ in drawn] == pytest.approx([event["step"] for event in training], abs=0.01)
        assert [value for _, value in drawn] == pytest.approx([event[name] for event in training], abs=2e-4 * size)
    for title, name in (("Loss", "eval_loss"), ("Perplexity", "eval_perplexity"), ("Accuracy", "eval_accuracy")):
        drawn = page.values(title, "held")
        assert [value for _, value in drawn] == pytest.approx([event[name] for event in evaluated], rel=1e-3, abs=1e-4)


def test_page_loads_nothing_from_anywhere(tmp_path):
    """Fails when: a stylesheet, a font or a script is linked."""
    events = training_events(40) + evaluations(40, 10)
    run = write_run(tmp_path / "run", events, summary={"status": "finished"}, config="seed: 1\n")
    page = report(run)
    text = (tmp_path / "report.html").read_text()
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name == "href":
                assert value.startswith("#") or (tmp_path / value.rstrip("/")).exists(), value


def test_text_of_a_run_is_shown_and_never_becomes_markup(tmp_path):
    """Fails when: any of the texts below is put into the page without being escaped."""
    directory = tmp_path / "a <b>name & 'more'"
    directory.mkdir()
    events = [{"step": k, "loss": 2.0 - k / 10, f"<i>{HOSTILE}": 1.0 + k, "eval_loss": 2.0} for k in range(3)]
    samples = [{"step": k, "prompt": HOSTILE, "text": HOSTILE + str(k), "reference": HOSTILE} for k in range(3)]
    summary = {"status": HOSTILE, "baselines": {HOSTILE: 1.9}, "steps": 3}
    card = {"versions": {HOSTILE: HOSTILE}, "model": {"name": HOSTILE}, HOSTILE: HOSTILE, "hardware": {"device": HOSTILE}}
    config = f"# {HOSTILE}\nrun_name: {HOSTILE}  # default: {HOSTILE}\ndataset: {HOSTILE}\n"
    page = report(write_run(directory, events, samples, summary, card, config))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not {"i", "b"} & {tag for tag, attributes in page.tags if "style" not in attributes}
    assert sum(text.count(HOSTILE) for text in page.texts) >= 15
    assert {attributes.get("href") for tag, attributes in page.tags if tag == "a"} >= {
        "a%20%3Cb%3Ename%20%26%20%27more%27/metrics.jsonl"
    }


def test_headline_sets_the_last_held_out_figure_against_the_first_and_the_baselines(tmp_path):
    """Fails when: the summary's own final metric is passed over, or the bars are not in order."""
    events = [{"step": k, "eval_bits_per_byte": 3.0 - k, "eval_loss": 8.0 - k, "eval_accuracy": 0.1 + k / 10} for k in (0, 1)]
    summary = {"status": "finished", "steps": 1, "eval_bits_per_byte": 1.75, "baselines": {"gzip": 1.89, "trigram": 1.71}}
    page = report(write_run(tmp_path / "run", events, summary=summary))
    text = "\n".join(part.strip() for part in page.texts if part.strip())
    assert "Held-out bits per byte\n1.750\n↓ from 3\n" in text
    assert "Held-out accuracy\n0.2000\n↑ from 0.1000\n" in text
    assert "trigram\n1.710\nthis model\n1.750\ngzip\n1.890\n" in text
    better = [attributes for tag, attributes in page.tags if tag == "p" and attributes.get("class") == "better"]
    assert len(better) == 3
    marks = [attributes for tag, attributes in page.tags if tag == "path" and attributes.get("class") == "mark"]
    assert len(marks) == 2


@pytest.mark.parametrize(
    ("name", "value", "config", "verdict", "kind"),
    [
        ("accuracy", 0.9, "", r"0\.9000 beats every .* words \(0\.8000\)", "better"),
        ("accuracy", 0.6, "", r"0\.6000 does NOT beat words \(0\.8000\), but beats most frequent \(0\.5000\)", "worse"),
        ("mse", 0.6, "", r"0\.6000 does NOT beat most frequent \(0\.5000\), but beats words \(0\.8000\)", "worse"),
        ("answer_rate", 0.9, "", r"0\.9000 beats every .* words \(0\.8000\)", "better"),
        ("delay", 0.4, "metric_for_best_model: eval_delay\ngreater_is_better: false\n", r"0\.4000 beats every .* most frequent \(0\.5000\)", "better"),
    ],
)  # fmt: skip
def test_the_board_says_whether_the_baselines_were_beaten_in_the_metric_they_are_of(tmp_path, name, value, config, verdict, kind):
    """Fails when: another metric of the run is set against its baselines, more of an error is taken for better, or what was beaten is left out."""
    events = [{"step": k, "eval_loss": 0.1, "eval_bits_per_byte": 0.1, f"eval_{name}": value} for k in (0, 1)]
    baselines = {"figure": f"eval_{name}", "words": 0.8, "most frequent": 0.5}
    summary = {"status": "finished", "baselines": baselines, "warnings": ["the gradient was exactly 0"]}
    page = report(write_run(tmp_path / "run", events, summary=summary, config=config))
    assert any(re.search(verdict, text) for text in page.texts)
    assert kind in [attributes.get("class") for tag, attributes in page.tags if tag == "p"]
    assert "the gradient was exactly 0" in page.texts


def test_settings_that_the_run_never_read_are_marked(tmp_path):
    """Fails when: the mark becomes a part of the value or of the default, or settings that were not read are left out."""
    config = "# Optim\noptim: sgd  # default: muon; not read by this run\nmomentum: 0.9  # not read by this run\nseed: 3  # default: 42\n"
    card = {"settings": {"seed": 3}, "not_read": {"optim": "sgd", "momentum": 0.9}}
    page = report(write_run(tmp_path / "run", config=config, card=card))
    shown = [part.strip() for part in page.texts if part.strip()]
    start = shown.index("optim")
    assert shown[start : start + 7] == ["optim", "sgd", "not read", "muon", "seed", "3", "42"]
    start = shown.index("momentum")
    assert shown[start : start + 3] == ["momentum", "0.9", "not read"]


def test_samples_show_the_first_and_the_last_step_beside_the_data(tmp_path):
    """Fails when: the second step is shown as the last."""
    samples = [{"step": k, "prompt": p, "text": f"{p} at {k}", "reference": f"ref {p}"} for k in (0, 10, 20) for p in "ab"]
    page = report(write_run(tmp_path / "run", samples=samples))
    shown = [part for part in page.texts if part.strip()]
    start = shown.index("a")
    assert shown[start - 1 : start + 10] == [
        "Prompt", "a", "Step 0", "a at 0", "Step 20", "a at 20", "In the data", "ref a", "1 more step", "Step 10", "a at 10",
    ]  # fmt: skip


def test_a_run_on_rewards_shows_the_reward_of_each_sample_and_begins_with_its_rewards(tmp_path):
    """Fails when: the reward is shown as the answer in the data, or only of the last; the loss comes first; more that is truncated
    or another length counts as better."""
    samples = [{"step": 4, "prompt": "2+2=", "text": text, "score": f"reward {reward}"} for text, reward in (("4", 1), ("5", 0))]
    held_out = [{"eval_reward": 0.2 * k, "eval_completion_length": 3.0 + k, "eval_truncated": 0.1 * k} for k in (1, 2)]
    events = [{"step": k, "loss": 0.1, "reward": 0.2, **each} for k, each in enumerate(held_out)]
    page = report(write_run(tmp_path / "run", events, samples=samples))
    shown = [part for part in page.texts if part.strip()]
    start = shown.index("2+2=")
    assert shown[start : start + 5] == ["2+2=", "Step 4, reward 1", "4", "Step 4, reward 0", "5"]
    assert "Training loss" not in shown
    assert shown.index("Reward") < shown.index("Loss")
    assert [attributes["class"] for tag, attributes in page.tags if tag == "p" and attributes.get("class") in ("better", "worse", "faint")] == [
        "better", "faint", "worse"
    ]  # fmt: skip


def test_changed_settings_come_first_with_their_defaults(tmp_path):
    """Fails when: config.yaml is read as YAML alone, which drops the comments."""
    config = "# Model\nmodel: 'tiny-llama'\nvocab_size: 300  # default: none\n\n# Data\nlr_patterns: [a=1, b]  # default: []\n"
    page = report(write_run(tmp_path / "run", config=config))
    shown = [part for part in page.texts if part.strip()]
    start = shown.index("Changed")
    assert shown[start : start + 3] == ["Changed", "Value", "Default"]
    assert shown[start + 3 : start + 9] == ["vocab_size", "300", "none", "lr_patterns", "[a=1, b]", "[]"]
    assert shown[start + 9] == "All 3 settings"
    assert shown[shown.index("Model") + 1 : shown.index("Model") + 3] == ["model", "tiny-llama"]


def test_config_file_as_the_run_writes_it_is_understood(tmp_path):
    """Fails when: the default in a line's comment is not read."""
    from toolkit.config import OptimConfig, write_config_file

    run = write_run(tmp_path / "run")
    write_config_file(OptimConfig(learning_rate=0.125, lr_patterns=["head=0.5"]), run / "config.yaml")
    shown = [part for part in report(run).texts if part.strip()]
    start = shown.index("Changed")
    assert shown[start + 3 : start + 9] == ["learning_rate", "0.125", "5e-05", "lr_patterns", "[head=0.5]", "[]"]
    assert not any("--config" in part for part in shown)


ODD = {
    "nothing yet": {"config": "seed: 0\n"},
    "one event": {"events": [{"step": 1, "loss": 2.0}]},
    "constant": {"events": [{"step": k, "loss": 1.0, "eval_loss": 0.0} for k in range(50)]},
    "gaps": {"events": [{"step": k, "loss": None if k % 3 == 0 else 1.0 + k, "grad_norm": None} for k in range(60)]},
    "negative": {"events": [{"step": k, "grad_norm": -k, "eval_perplexity": k - 2.0} for k in range(5)]},
    "huge": {"events": [{"step": 10**9 + k, "loss": 10.0**k} for k in range(40)]},
    "not numbers": {"events": [{"step": "x"}, {"step": 1, "loss": "nan", "flag": True, "list": [1]}, {"loss": 1}]},
    "odd summary": {"summary": {"steps": "many", "seconds": None, "baselines": [1], "status": 3, "eval_loss": "low"}},
    "odd card": {"card": {"model": "name", "hardware": [], "versions": None, "settings": 3, "n": 1.5}},
    "odd samples": {"samples": [{"step": 1}, {"text": None, "prompt": 3}, {"prompt": "", "text": "", "reference": 1}]},
    "odd config": {"config": "- a\n- b\n:::\nkey:\n  - 1\n  - 2\n"},
}


@pytest.mark.parametrize("name", ODD)
def test_whatever_is_missing_or_odd_the_page_is_whole(name, tmp_path):
    """Fails when: `_number` takes what is no number."""
    page = report(write_run(tmp_path / "run", **ODD[name]))
    assert "run" in page.texts
    assert "nan" not in "".join(str(attributes) for tag, attributes in page.tags if tag in ("polyline", "path", "span"))


def test_unreadable_files_are_said_and_the_rest_is_shown(tmp_path):
    """Fails when: a bad line ends the reading, or is passed over in silence."""
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 2.0}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('[1]\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    (run / "summary.json").write_text("{")
    (run / "samples.jsonl").write_bytes(b'\xff\xfe{"step": 1}\n')
    page = report(run)
    assert [value for _, value in page.values("Loss", "train")] == pytest.approx([2.0, 1.5])
    complaints = [text.split()[:2] for text in page.texts if "could not be read" in text or "is not a JSON" in text]
    assert complaints == [["metrics.jsonl:", "2"], ["samples.jsonl:", "1"], ["summary.json", "is"]]


def test_what_is_no_file_is_said_and_nobody_waits_for_it(tmp_path):
    """Fails when: a file of a run is opened without `regular`, which a named pipe without a writer blocks for ever."""
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 2.0}])
    for name in ("run.json", "samples.jsonl", "metrics.jsonl", ".lock", ".owner.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    began = time.monotonic()
    with time_limit(4.0), socket.socket(socket.AF_UNIX) as listening:
        (run / "summary.json").unlink(missing_ok=True)
        listening.bind(os.path.relpath(run / "summary.json"))  # a socket's name is short
        complaints = [text for text in report(run).texts if "cannot be read" in text]
        assert {text.split()[0] for text in complaints} == {"run.json", "samples.jsonl", "metrics.jsonl", "summary.json"}
        assert [line.status for line in list_runs(tmp_path)] == ["died"]
    assert time.monotonic() - began < 4  # TimeoutError is an OSError, which the reading passes over


def test_value_that_was_not_finite_breaks_the_curve_and_is_named(tmp_path):
    """Fails when: the neighbors of the gap are joined."""
    events = [{"step": k, "loss": None if k == 4 else 3.0 - k / 10} for k in range(1, 9)]
    figure = report(write_run(tmp_path / "run", events)).figure("Loss")
    assert [len(line["points"].split()) for line in figure["lines"]] == [3, 4]
    assert figure["note"] == "Not finite at step 4."


def test_spike_leaves_the_frame_to_the_rest_and_is_named(tmp_path):
    """Fails when: the frame is the range of all values."""
    events = [{"step": k, "grad_norm": 500.0 if k == 31 else 1.0 + k % 3} for k in range(60)]
    page = report(write_run(tmp_path / "run", events))
    figure = page.figure("Gradient norm")
    assert float(figure["data"]["data-values"].split()[1]) < 10
    assert re.match(r"1 of 60 .*: 500 at step 31\.", figure["note"])
    assert max(value for _, value in page.values("Gradient norm", "train raw")) == pytest.approx(500, rel=1e-3)


def test_smoothed_curve_lags_behind_nothing_and_one_spike_does_not_bend_it():
    """Fails when: the mean is of the whole window (`quarter = 0`), which a spike bends."""
    line = [(float(k), 3.0 * k) for k in range(400)]
    expected = [value for _, value in line]
    assert [value for _, value in smooth(line)][:380] == pytest.approx(expected[:380])
    spiked = [(step, 1e6 if step == 200 else value) for step, value in line]
    assert [value for _, value in smooth(spiked)][:380] == pytest.approx(expected[:380], abs=3.1)


@pytest.mark.parametrize("count", [6000, 50_000])
def test_a_long_smoothed_curve_is_that_of_each_window_by_itself_and_of_no_more_points_than_are_seen(count):
    """Half of the values are ties, some are missing. Reference: a sorted window around each point.

    Fails when: the window does not move with the point; or every point of a long curve is drawn.
    """
    draw = random.Random(0).choice
    points = [(float(k), draw([1.0, 2.0, None, math.sin(k), math.cos(k)])) for k in range(count)]
    finite = [(step, value) for step, value in points if value is not None]
    reach, smoothed = len(finite) // 40, smooth(points)
    place = {step: index for index, (step, _) in enumerate(finite)}
    assert 400 < len(smoothed) <= 501
    assert smoothed[-1][0] == finite[-1][0]
    for step, value in smoothed[:: count // 5000]:
        side = min(reach, place[step])
        window = sorted(each for _, each in finite[place[step] - side : place[step] + side + 1])
        middle = window[len(window) // 4 : len(window) - len(window) // 4]
        assert value == pytest.approx(sum(middle) / len(middle), rel=1e-13)


def test_a_curve_without_a_finite_value_has_no_smoothed_one():
    """Fails when: its last point is looked up."""
    assert smooth([(float(k), None) for k in range(50)]) == []


def test_long_curve_is_thinned_without_losing_a_peak(tmp_path):
    """Fails when: every n-th value is kept."""
    points = [(float(k), math.sin(k)) for k in range(50_000)]
    points[31_417] = (31_417.0, 9.0)
    points[77] = (77.0, None)
    kept = thin(points)
    assert len(kept) <= 2100
    assert (31_417.0, 9.0) in kept
    assert any(value is None for _, value in kept)
    assert kept == sorted(kept, key=lambda point: point[0])
    events = [{"step": k, "loss": v} for k, v in points[:5000]]
    assert "5,000 values" in report(write_run(tmp_path / "run", events)).figure("Loss")["note"]


def test_several_runs_stand_in_one_table_and_link_to_their_sections(tmp_path):
    """Fails when: the sections are numbered from 1, or one touches what is above it: no rule sets them apart."""
    first = write_run(tmp_path / "first", evaluations(10, 5), summary={"steps": 10, "seconds": 75, "status": "finished"})
    second = write_run(tmp_path / "second", training_events(3))
    page = report(first, second)
    targets = {attributes["id"] for tag, attributes in page.tags if tag == "article"}
    assert {f"#{target}" for target in targets} <= {attributes.get("href") for _, attributes in page.tags}
    html = (tmp_path / "report.html").read_text()
    assert (above := re.findall(r"</(\w+)>\s*<article", html)) == ["section", "article"]
    assert all(f"{each} + article" in html for each in above)
    assert "1 min 15 s" in page.texts
    assert page.texts.count("first") == 3  # the table, the legend of the curves of both, and its own section


def test_command_writes_the_page_beside_the_first_run_and_refuses_what_is_no_directory(tmp_path):
    """Fails when: a directory that holds none of a run's files is let through."""
    run = write_run(tmp_path / "my run", training_events(3))
    command = [sys.executable, "-m", "toolkit", "report", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run / "report.html")
    Page((run / "report.html").read_text())
    missing = subprocess.run([*command, str(tmp_path / "absent")], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stderr.count("refused: ")) == (2, 1)
    assert "absent" in missing.stderr
    with pytest.raises(Refusal, match="--output-dir of a run"):
        write_report([tmp_path / "absent"], tmp_path / "x.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match=r"empty: .*metrics\.jsonl, .*--output-dir"):
        write_report([run, tmp_path / "empty"], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_every_line_to_beat_has_its_name_also_beside_others():
    """Fails when: of two lines that are close one is named only, or both names are based on one another."""
    held_out = [(float(step), 1.8 - 0.04 * step) for step in range(6)]
    drawn = draw_plot(Plot("Bits per byte", held_out=held_out, marks={"xz": 1.611, "trigram": 1.623, "bigram": 1.75}))
    labels = re.findall(r'<span class="mark" style="top:([^;"]+)%(?:;margin-left:(\d+)%)?">(\w+) ', drawn)
    assert {name: aside for _, aside, name in labels} == {"xz": "", "trigram": "30", "bigram": ""}


@pytest.mark.parametrize(("trained", "side"), [(0.7, "below"), (0.3, "above")])
def test_the_final_value_stands_on_the_side_without_the_training_curve(trained, side):
    """Fails when: it is above wherever there is room."""
    train, held_out = ([(0.0, 0.0), (1.0, end)] for end in (trained, 0.5))
    assert f'class="end {side}"' in draw_plot(Plot("Accuracy", train=[*train, (2.0, 1.0), (3.0, trained)], held_out=[*held_out, (3.0, 0.5)]))


def test_numbers_are_written_for_people():
    """Fails when: a number loses a digit, or a short range the ticks between powers of ten."""
    assert [show_digits(v) for v in (1234567, 86.44, 1.65234, 0.01234, 0.00025, 12345.6, 0, -3.5, 99999.5)] == [
        "1,234,567", "86.44", "1.652", "0.0123", "2.5e-4", "12,346", "0", "-3.500", "100,000",
    ]  # fmt: skip
    assert [show_seconds(v) for v in (0.0421, 4.21, 59.7, 123, 18720)] == ["42.1 ms", "4.2 s", "1 min 0 s", "2 min 3 s", "5 h 12 min"]
    assert [show_count(v) for v in (12345, 1312896, 596049920, 8.03e9)] == ["12,345", "1.31 M", "596 M", "8.03 B"]
    assert [show_bytes(v) for v in (12, 5230, 5.2e6, 3e12)] == ["12 B", "5.23 kB", "5.2 MB", "3 TB"]
    assert round_ticks(0, 10) == [0, 5, 10]
    assert round_ticks(1.58, 2.7) == [2.0, 2.5]
    assert log_ticks(3, 300) == [5, 10, 20, 50, 100, 200]

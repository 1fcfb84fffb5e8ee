"""Inputs that were once met with a traceback, a hang, a wrong message or silence; one row each.

Fails when, for instance: MOST_LEVELS is not asked for, `wrong_part` or `wrong_field` finds nothing, `is_special` returns nothing,
`most` is left out of a setting, or `_check_written` returns at once.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

malformed = sys.modules["malformed"]  # loaded by conftest.py
Case, BASE, GOOD, sft, lines, file, with_good = (
    malformed.Case, malformed.BASE, malformed.GOOD, malformed._sft, malformed._lines, malformed._file, malformed._with_good,
)  # fmt: skip
CHAT = malformed.GOOD_CHATS[0]["messages"]
FINE: Callable[[Path], None] = lambda folder: None  # noqa: E731


def flags(*words: str) -> Any:
    return ("sft", sft(*words), FINE)


def config(text: str) -> Any:
    return ("sft", sft("--config", "c.yaml"), file("c.yaml", text))


def rows(line: str) -> Any:
    return ("sft", sft("--dataset", "rows.jsonl"), file("rows.jsonl", lines(malformed.GOOD_CHATS) + line + "\n"))


def called(arguments: str) -> str:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return json.dumps({"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call]}]})


def template(text: str) -> Any:
    return ("sft", sft(*GOOD, "--chat-template", "t.jinja"), with_good(file("t.jinja", text)))


def output(path: str, prepare: Any = FINE) -> Any:
    return ("sft", (*sft(*GOOD), "--output-dir", path), with_good(prepare))


def data(name: str, content: bytes) -> Any:
    return ("sft", sft("--dataset", name), file(name, content))


def labels(*names: str) -> Any:
    text = lines([{"text": f"Row {i} is here", "label": names[i % len(names)]} for i in range(12)])
    return ("basic", ("--model", "tiny-bert", *malformed._tiny_basic(), "--dataset", "labels.jsonl"), file("labels.jsonl", text))


def manifest(change: Callable[[dict[str, Any]], Any], record: Callable[[dict[str, Any]], Any] = lambda _: None) -> Any:
    """A run continued from a checkpoint whose manifest, or record, was changed and given its right digest again."""

    def rewrite(folder: Path) -> None:
        path = folder / BASE / "checkpoints/step-2/MANIFEST.json"
        content = json.loads(path.read_text())
        content.pop("sha256")
        state = json.loads((path.parent / "state.json").read_text())
        record(state)
        text = json.dumps(state)
        (path.parent / "state.json").write_text(text)
        content["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        change(content)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**content, "sha256": digest}))

    words = ("--config", f"{BASE}/config.yaml", "--output-dir", BASE, "--resume-from", f"{BASE}/checkpoints/step-2", "--max-steps", "3")
    return ("sft", (*words, "--allow-change", "max_steps,dataset"), with_good(rewrite))


def command(*words: str, **files: str) -> Any:
    def put(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return ("toolkit", words, put)


def resumed(name: str, more: str) -> Any:
    """A run that continues after a file of its was damaged: the lines that are none are left out."""
    words = ("--config", f"{BASE}/config.yaml", "--output-dir", BASE, "--resume", "--max-steps", "3", "--allow-change", "max_steps,dataset")
    return ("sft", words, with_good(lambda folder: (folder / BASE / name).open("a").write(more) and None))


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "rows.jsonl")


def dangling(folder: Path) -> None:
    (folder / "there").symlink_to("nowhere")


KNOWN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a seed of 2**32": (flags("--seed", str(2**32)), ("--seed 4294967296", "4,294,967,295")),
    "a number of 400 digits": (flags("--max-steps", "9" * 400), ("--max-steps",)),
    "a learning rate of 400 digits": (flags("--learning-rate", "9" * 400), ("--learning-rate",)),
    "a time limit of 1e300": (flags("--hang-timeout", "1e300"), ("--hang-timeout",)),
    "a batch of 1e12": (flags("--per-device-train-batch-size", "1e12"), ("--per-device-train-batch-size", "65,536")),
    "100,000 workers": (flags("--dataloader-num-workers", "100000"), ("--dataloader-num-workers", "1,024")),
    "settings of nobody's home": (flags("--config", "~nobody-here/c.yaml"), ("~nobody-here/c.yaml",)),
    "a model of nobody's home": (flags(*GOOD, "--model", "~nobody-here/x"), ("--model ~nobody-here/x",)),
    "a tokenizer of nobody's home": (flags(*GOOD, "--tokenizer", "~nobody-here/x"), ("--tokenizer ~nobody-here/x",)),
    "a mixture of nobody's home": (flags("--dataset", "~nobody-here/x:0.5,y:0.5"), ("~nobody-here/x",)),
    "a template of nobody's home": (flags(*GOOD, "--chat-template", "~nobody-here/x.jinja"), ("~nobody-here/x.jinja",)),
    "no config file's name": (flags("--config", ""), ("--config ''",)),
    "an unknown user": (output("~nobody-of-that-name/x"), ("--output-dir ~nobody-of-that-name/x", "no user")),
    "a password": (flags("--dataset", "https://me:hunter2@host/x"), ("--dataset", "password")),
    "a token in place of a user": (flags("--model", "https://hunter2@host/x"), ("--model", "token")),
    "a token in a query": (flags("--dataset", "https://host/x?token=hunter2"), ("--dataset", "password or token")),
    "a password in a path to push": (command("push", "https://me:hunter2@host/x"), ("me:***@host",)),
    "a password in a path to report": (command("report", "https://me:hunter2@host/x"), ("me:***@host",)),
    "a password in a path to merge": (command("merge", "https://me:hunter2@host/x", "--into", "m"), ("me:***@host",)),
    "a token in a path to report": (command("report", "https://host/x?token=hunter2"), ("token=***",)),
    "a YAML tag that is no number": (config("seed: !!int x\n"), ("c.yaml:1",)),
    "a YAML date": (config("max_steps: 2026-01-31\n"), ("--max-steps 2026-01-31",)),
    "YAML nested 3,000 levels deep": (config("model: " + "[" * 3000 + "]" * 3000), ("c.yaml", "64 levels")),
    "YAML that refers to itself": (config("model: &a [*a]\n"), ("c.yaml:1", "alias")),
    "a number of sixties": (config("hang_timeout: 12:30\n"), ("--hang-timeout 12:30",)),
    "a list for a name": (config("model: [a, b]\n"), ("--model a,b", "must be text")),
    "a list for a name in a job": (("sft", sft(), FINE, {"SM_HPS": '{"config": ["a"]}'}), ("--config a",)),
    "a nested job": (("sft", sft(), FINE, {"SM_HPS": "[" * 100_000}), ("SM_HPS", "64 levels")),
    "a job with a key twice": (("sft", sft(), FINE, {"SM_HPS": '{"seed": 1, "seed": 2}'}), ("SM_HPS", "seed")),
    "a nested row": (rows('{"messages": ' + "[" * 9000 + "]" * 9000 + "}"), ("rows.jsonl:13", "64 levels")),
    "a key twice in a row": (rows('{"messages": 1, "messages": 2}'), ("rows.jsonl:13", "messages is twice")),
    "half a surrogate pair": (rows('{"messages": "\\ud800"}'), ("rows.jsonl:13", "\\ud800")),
    "arguments of a call nested 100,000 levels deep": (rows(called("[" * 100_000)), ("rows.jsonl:13", "arguments of look", "64 levels")),
    "half a surrogate pair in arguments": (rows(called('{"a": "\\ud800"}')), ("rows.jsonl:13", "arguments of look", "\\ud800")),
    "a key twice in arguments": (rows(called('{"a": 1, "a": 2}')), ("rows.jsonl:13", "a is twice")),
    "a NaN in arguments": (rows(called('{"a": NaN}')), ("rows.jsonl:13", "NaN")),
    "a template's variable that cuts the chat": (
        rows(json.dumps({"messages": [CHAT[0], CHAT[1]], "chat_template_kwargs": {"truncation": True, "max_length": 3}})),
        ("rows.jsonl:13", "max_length, truncation"),
    ),
    "a template's variable that is an argument": (
        rows(json.dumps({"messages": [CHAT[0], CHAT[1]], "chat_template_kwargs": {"continue_final_message": True}})),
        ("rows.jsonl:13", "continue_final_message"),
    ),
    "a role that is a list": (rows('{"messages": [{"role": ["user"], "content": "x"}]}'), ("rows.jsonl",)),
    "a token id beyond the vocabulary": (data("ids.jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": [1, 70000]}\n'), ("ids.jsonl:2", "70000")),
    "a token id of 2**40": (data("ids.jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": [1, 1099511627776]}\n'), ("ids.jsonl:2",)),
    "an escape sequence in a column": (data("d.csv", b"te\x1b[31mxt,b\n1,2\n"), ("te\\x1b[31mxt",)),
    "an escape sequence in broken JSON": (rows('{"\x1b[2J'), ("rows.jsonl:13", "\\x1b[2J")),
    "gzip named .jsonl": (data("d.jsonl", b"\x1f\x8b\x08\x00abc"), ("d.jsonl", "gzip", "d.jsonl.gz")),
    "a truncated .arrow": (data("d.arrow", b"ARROW1\0\0" + b"\xff" * 90), ("d.arrow",)),
    "a named pipe": (("sft", sft("--dataset", "rows.jsonl"), pipe), ("rows.jsonl", "named pipe")),
    "a link to nothing": (("sft", sft("--dataset", "there"), dangling), ("--dataset there", "nowhere")),
    "labels that look alike": (labels("a", "b", "a", "b", "a", "a "), ("labels.jsonl:6", "'a '", "white space")),
    "letters that look alike": (labels("\u00e9", "b", "\u00e9", "b", "\u00e9", "e\u0301"), ("labels.jsonl:6",)),
    "a template without the answer": (
        template("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}<eos>{% endfor %}"), ("template", "assistant"),
    ),
    "a template without this answer": (
        template("{% for m in messages %}{{ m.role }}{% if '4' not in m.content %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"),
        ("good.jsonl:3", "template"),
    ),
    "a template that never ends": (
        template("{% for m in messages %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"),
        ("template", "20 s"),
    ),
    "a template that writes 100 megabytes": (template("{{ messages | length * 'x' * 10**8 }}"), ("template",)),
    "an output path too long": (output("x" * 300), ("--output-dir",)),
    "an output path of 5,000 letters": (output("/".join(["x" * 99] * 50)), ("--output-dir",)),
    "an output path in /proc": (output("/proc/x"), ("--output-dir /proc/x",)),
    "an output path that is a link to nothing": (output("there", dangling), ("--output-dir there", "nowhere")),
    "an output path under a link to nothing": (output("there/x", dangling), ("--output-dir there/x", "nowhere")),
    **{
        f"{said} of {' '.join(words[:2])}": (("toolkit", (*words, place), prepare), (f"{name} {place[:60]}", reason))
        for words, name in (
            (("report", BASE, "--output"), "--output"), (("merge", BASE, "--into"), "--into"), (("replay", BASE, "--into"), "--into"),
            (("copy", "sft"), "FILE"), (("sagemaker", "fetch", "a-job"), "FOLDER"), (("sagemaker", "simulate", "sft", "--folder"), "--folder"),
        )
        for said, place, prepare, reason in (
            ("a place in /proc", "/proc/x.py", FINE, "can't be written"), ("a place too long", "x" * 300, FINE, "too long"),
            ("a place too long in a new folder", "new/" + "x" * 300, FINE, "too long"),
            ("a place that is a link to nothing", "there", dangling, "nowhere"), ("a place under a link to nothing", "there/x", dangling, "nowhere"),
            ("a place of an unknown user", "~nobody-of-that-name/x", FINE, "no user"), ("a place under a file", "good.jsonl/x", with_good(FINE), "is a file"),
        )
    },
    "a folder for the page": (command("report", BASE, "--output", "."), ("--output .", "is a folder")),
    "a file for a merged model": (("toolkit", ("merge", BASE, "--into", "good.jsonl"), with_good(FINE)), ("--into good.jsonl", "is a file")),
    "a manifest without files": (manifest(lambda content: content.update(files={})), ("step-2", "MANIFEST.json")),
    "a manifest with a wrong field": (manifest(lambda content: content["files"]["state.json"].update(size="x")), ("MANIFEST.json", "state.json")),
    "a manifest with a list": (manifest(lambda content: content.update(files=["state.json"])), ("MANIFEST.json",)),
    "a manifest of another step": (manifest(lambda content: content.update(step=7)), ("MANIFEST.json", "step 7")),
    **{
        f"a record with {said}": (manifest(lambda _: None, change), ("step-2", "holds no state of a run", word))
        for said, change, word in (
            ("a number for the run", lambda state: state.update(run=1), "run"), ("a list of settings", lambda state: state["run"].update(settings=[7]), "settings"),
            ("no position", lambda state: state["run"].pop("position"), "position"), ("a step below 0", lambda state: state["run"].update(step=-1), "step"),
            ("a loss that is text", lambda state: state["run"].update(objective=["x"]), "objective"),
            ("an optimizer without state", lambda state: state.update(optimizer={"$dict": []}), "optimizer"),
            ("no random numbers", lambda state: state.update(random={"$dict": []}), "random"), ("a list for the base", lambda state: state.update(base=[7]), "base"),
        )
    },
    "a cut job of the Hub's queue": (command("push", BASE, **{f"{BASE}__hub_queue__000001-x__job_DOT_json": '{"repo_id": "a'}), ("job.json",)),
    "a metrics.jsonl of other things to resume": (resumed("metrics.jsonl", '7\n{"step": "x"}\n[]\n{"step": ' + "9" * 400 + "}\n" + "[" * 99_999 + "\n"), ()),
    "a nested record to resume": (resumed("samples.jsonl", '{"a":' * 900 + "1" + "}" * 900 + "\n"), ()),
    "a broken config.yaml to replay": (command("replay", BASE, **{f"{BASE}__config_DOT_yaml": "model: &a [*a]\n"}), ("config.yaml:1",)),
    "a model of 2**70 layers": (
        command("generate", BASE, **{f"{BASE}__model__config_DOT_json": json.dumps({"model_type": "qwen3", "num_hidden_layers": 2**70})}),
        ("config.json", "num_hidden_layers", "1,024"),
    ),
    "a broken run.json to replay": (command("replay", BASE, **{f"{BASE}__run_DOT_json": '{"end": 3}'}), ("run.json",)),
}  # fmt: skip


@pytest.mark.fast(24)
@pytest.mark.parametrize("name", KNOWN)
def test_what_cannot_be_meant_is_refused_by_name(check: Callable[[Any], None], name: str) -> None:
    """Fails when: a refusal does not name what its case asks for, such as the white space of labels that look alike."""
    (script, arguments, prepare, *environment), words = KNOWN[name]
    codes = (2, 1) if arguments[0] == "push" else (0,) if name.endswith("to resume") else (2,)
    check(Case("known", name, script, arguments, words, codes=codes, prepare=prepare, environment=environment[0] if environment else {}))


DAMAGED = {"metrics.jsonl": '7\n{"step": "x"}\n{"step": ' + "9" * 400 + "}\n" + '{"a":' * 900 + "1" + "}" * 900 + "\n" + "[" * 99_999 + "\n",
           "summary.json": "[" * 99_999, "run.json": '{"a":' * 900 + "1" + "}" * 900}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_left_out_of_the_report(
    finished_run: Path, run_script: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """Fails when: RecursionError is not caught in `parse_object`, or its nesting is not counted."""
    shutil.copytree(finished_run, tmp_path / BASE)
    with open(tmp_path / BASE / name, "a" if name == "metrics.jsonl" else "w") as file:
        file.write(DAMAGED[name])
    code, out = run_script("toolkit", ("report", BASE), tmp_path, {})
    assert code == 0, out
    assert "Traceback" not in out
    assert name in (tmp_path / BASE / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "made"), [(("report", BASE, "--output=~/r.html"), "r.html"), (("copy", "sft", "~/f.py"), "f.py"), (("copy", "sft", "~/"), "sft.py")]
)
def test_a_tilde_of_a_command_is_the_home_directory(
    finished_run: Path, run_script: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], made: str
) -> None:
    """Fails when: `place_to_write` expands nothing, or a command does not ask it."""
    (tmp_path / "home").mkdir()
    arguments = tuple(str(finished_run) if word == BASE else word for word in words)
    code, out = run_script("toolkit", arguments, tmp_path, {"HOME": str(tmp_path / "home")})
    assert code == 0, out
    assert (tmp_path / "home" / made).exists()
    assert not (tmp_path / "~").exists()


def test_a_tilde_is_the_home_directory(finished_run: Path, run_script: Callable[..., Any], tmp_path: Path) -> None:
    """Also behind an equals sign, where no shell expands it. Fails when: `is_path` is left out of `output_dir`."""
    with_good(FINE)(tmp_path)
    arguments = [str(finished_run / "model") if word == f"{BASE}/model" else word for word in (*sft(*GOOD), "--output-dir=~/mine")]
    code, out = run_script("sft", tuple(arguments), tmp_path, {"HOME": str(tmp_path / "home")})
    assert code == 0, out
    assert (tmp_path / "home/mine/summary.json").exists()
    assert not (tmp_path / "~").exists()

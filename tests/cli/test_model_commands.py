"""toolkit generate, chat and evaluate: what they print is what transformers and a plain loop make of the same model.

Each test names the one-line change under which it was seen to fail.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score
from typer.testing import CliRunner

import toolkit as tk
from toolkit.cli.main import app
from toolkit.config import Refusal
from toolkit.generation.answers import Sampling, StreamedText, answer
from toolkit.generation.continued_texts import stop_ids

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "seed": 5}
QUESTIONS = ["one two", "three four five", "six"]


@dataclass(frozen=True)
class Config(tk.ModelConfig, tk.AdapterConfig, tk.DataConfig, tk.OptimConfig, tk.OutputConfig):
    """Of the models made here."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model in run/model, an adapter on it in lora/model, a classifier in classes/model, a reward model in rewards/model."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = tk.train_tokenizer(["one two three four five six seven"] * 9, 300)
    config = Config(output_dir=str(folder / "run"), **SHAPE)
    model = tk.load_model("AutoModelForCausalLM", config, tokenizer)
    for parameter in model.parameters():
        parameter.data *= 4  # so that answers differ
    tk.save_model(None, model, tokenizer, config.output_dir)
    config = Config(model=str(folder / "run/model"), use_peft=True, lora_r=4, output_dir=str(folder / "lora"))
    adapted = tk.add_adapter(tk.load_model("AutoModelForCausalLM", config), config)
    torch.manual_seed(0)
    for parameter in adapted.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    tk.save_model(None, adapted, tokenizer, config.output_dir)
    names = {0: "bad", 1: "fair", 2: "good"}
    for kind, head in (("classes", {"id2label": names, "label2id": {v: k for k, v in names.items()}, "num_labels": 3}), ("rewards", {"num_labels": 1})):
        config = Config(model="tiny-llama", output_dir=str(folder / kind), **SHAPE)
        model = tk.load_model("AutoModelForSequenceClassification", config, tk.pad_apart_from_end(tokenizer), **head)
        tk.save_model(None, model, tokenizer, config.output_dir)
    return folder


def toolkit(*words: object, typed: str | None = None) -> Any:
    """In this process; its result. A refusal is raised."""
    done = CliRunner().invoke(app, [str(word) for word in words], input=typed)
    if isinstance(done.exception, Refusal):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def likeliest(folder: Path, text: str, tokens: int, adapter: Path | None = None) -> str:
    """The reference: one forward pass for each token, without a cache."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    ids = tokenizer(text)["input_ids"]
    start = len(ids)
    stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    with torch.no_grad():
        while len(ids) < start + tokens and (len(ids) == start or ids[-1] not in stops):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def lasts(folder: Path, text: str, tokens: int) -> bool:
    """Whether N tokens are made before the model ends."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=stops, pad_token_id=0)
    return made.shape[1] - ids.shape[1] == tokens and int(made[0, -1]) not in stops


def as_turn(text: str, folder: Path) -> str:
    messages = [{"role": "user", "content": text}]
    return transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("kind", ["run", "lora"])
def test_answers_are_those_of_the_model_through_its_template(made: Path, kind: str) -> None:
    """The directory of the run is as good as that of its model; an adapter is put on its base.

    Fails when: the template is left out, the base answers alone, or a prompt's answer hangs on the one before.
    """
    words = [word for question in QUESTIONS for word in ("--prompt", question)]
    rows = [json.loads(line) for line in toolkit("generate", made / kind, *words, "--max-new-tokens", 6, "--json").stdout.splitlines()]
    adapter = made / "lora/model" if kind == "lora" else None
    texts = [likeliest(made / "run/model", as_turn(text, made / "run/model"), 6, adapter) for text in QUESTIONS]
    assert rows == [{"prompt": question, "text": text} for question, text in zip(QUESTIONS, texts, strict=True)]
    assert len(set(texts)) > 1
    assert toolkit("generate", made / kind / "model", "--prompt", "six", "--max-new-tokens", 6).stdout.strip() == texts[2].strip()


def test_prompts_come_from_a_file_or_from_standard_input(made: Path, tmp_path: Path) -> None:
    """Fails when: blank lines are prompts, or the messages of a row are not rendered."""
    (tmp_path / "lines.txt").write_text("one two\n\nsix\n")
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "one two"}\n{"messages": [{"role": "user", "content": "six"}, {"role": "assistant", "content": "never"}]}\n'
    )
    same = ["--max-new-tokens", 4, "--json"]
    texts = [json.loads(line)["text"] for line in toolkit("generate", made / "run", "--prompt", "one two", "--prompt", "six", *same).stdout.splitlines()]
    for words, typed in ((["--file", tmp_path / "lines.txt"], None), (["--file", tmp_path / "rows.jsonl"], None), (["--file", "-"], "one two\nsix\n")):
        rows = toolkit("generate", made / "run", *words, *same, typed=typed).stdout.splitlines()
        assert [json.loads(row)["text"] for row in rows] == texts, words


def test_prompts_that_are_answered_together_are_shown_in_their_order(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, the longer ones read first. Fails when: a piece is shown as it comes, or `start` is left out of a prompt's number."""
    monkeypatch.setattr("toolkit.generation.answers.TOGETHER", 2)
    prompts = ["one " * count + "six" for count in (3, 9, 1, 5, 2)]
    (tmp_path / "lines.txt").write_text("\n".join(prompts))
    shown = toolkit("generate", made / "run", "--file", tmp_path / "lines.txt", "--raw", "--max-new-tokens", 6).stdout
    assert shown == "\n".join(f"{prompt}\n{likeliest(made / 'run/model', prompt, 6)}\n" for prompt in prompts)


def test_what_a_generation_config_wants_beyond_the_sampler_is_done(made: Path, tmp_path: Path) -> None:
    """transformers' own `generate` is the reference. Fails when: `no_repeat_ngram_size` is not in _BEYOND_SAMPLER."""
    folder = shutil.copytree(made / "run/model", tmp_path / "model")
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.save_pretrained(folder)
    ids = tokenizer("one two", return_tensors="pt")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=stop_ids(model, tokenizer), pad_token_id=0)
    found = toolkit("generate", folder, "--prompt", "one two", "--raw", "--max-new-tokens", 12, "--json").stdout
    assert json.loads(found)["text"] == tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(set(wanted[0].tolist())) == wanted.shape[1]


def test_an_answer_of_transformers_generate_leaves_the_process_its_random_numbers(made: Path) -> None:
    """The draw depends on its seed alone. Fails when: the generators are seeded outside of fork_rng, or not at all."""
    model, tokenizer = (kind.from_pretrained(made / "run/model") for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    model.generation_config.no_repeat_ngram_size = 1  # what the sampler has not
    before = torch.get_rng_state()
    draws = [answer(model, tokenizer, "six", Sampling(temperature=2.0, seed=seed, max_new_tokens=12), lambda _: None) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert draws[0] == draws[1] != draws[2]


def test_raw_continues_the_text_and_a_seed_repeats_a_draw(made: Path) -> None:
    """Fails when: --raw is ignored, or the generator is not seeded."""
    raw = toolkit("generate", made / "run", "--prompt", "one two", "--raw", "--max-new-tokens", 5, "--json").stdout
    assert json.loads(raw)["text"] == likeliest(made / "run/model", "one two", 5)
    draws = [
        toolkit("generate", made / "run", "--prompt", "six", "--temperature", 2, "--seed", seed, "--max-new-tokens", 12).stdout
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


@dataclass(frozen=True)
class DiffusionSettings(tk.ModelConfig, tk.DataConfig, tk.DiffusionConfig, tk.OutputConfig):
    """Of the masked-diffusion model made here."""


def test_a_text_with_a_gap_is_filled_in_as_it_is_and_the_prompt_next_to_it_stays_a_turn(made: Path, tmp_path: Path) -> None:
    """Fails when: a gap in one prompt leaves the chat template out of all, <|mask|>*0 vanishes, or what has no effect is passed over."""
    config = DiffusionSettings(model="tiny-llama", tokenizer=str(made / "run/model"), output_dir=str(tmp_path), **(SHAPE | {"vocab_size": None}))
    tokenizer = tk.load_diffusion_tokenizer(config)
    model = tk.load_diffusion_model(config, tokenizer)
    for parameter in model.parameters():
        parameter.data *= 4
    tk.save_model(None, model, tokenizer, tmp_path)
    words = ("generate", tmp_path, "--device", "cpu", "--max-new-tokens", 6, "--json", "--prompt", "one two")

    def texts(*more: object) -> list[str]:
        return [json.loads(line)["text"] for line in toolkit(*words, *more).stdout.splitlines()]

    (turn,), (text,) = texts(), texts("--raw")
    assert turn != text
    beside, filled = texts("--prompt", "one <|mask|>*3 two")
    assert beside == turn
    assert filled.startswith("one")  # not the name of a turn
    assert filled.endswith("two")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two"}\n{"prompt": "one <|mask|> two"}\n')
    from_file = toolkit(*words[:-2], "--file", tmp_path / "prompts.jsonl").stdout.splitlines()
    assert json.loads(from_file[0])["text"] == turn
    for more, said in (
        (("--prompt", "one <|mask|>*0 two"), r"<\|mask\|>\*0: means no token"),
        (("--prompt", "one <|mask|> two", "--system", "Be brief."), r"without --system"),
    ):
        with pytest.raises(Refusal, match=said):
            toolkit(*words, *more)
    with pytest.raises(Refusal, match="--file FILE --json"):
        toolkit(*words[:4], "--dataset", tmp_path / "prompts.jsonl", "--output", tmp_path / "rows.jsonl")


def test_a_systems_message_that_nothing_reads_is_refused(made: Path, tmp_path: Path) -> None:
    """Fails when: --raw, a tokenizer without a template or a row of messages passes it over."""
    words = ("generate", made / "run", "--device", "cpu", "--max-new-tokens", 2, "--system", "Be brief.")
    assert CliRunner().invoke(app, [*map(str, words), "--prompt", "one", "--raw"]).exit_code == 2
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "one"}]}\n')
    with pytest.raises(Refusal, match=r"chats\.jsonl:1: .*--system"):
        toolkit(*words, "--file", tmp_path / "chats.jsonl")
    shutil.copytree(made / "run/model", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink()
    with pytest.raises(Refusal, match=r"--system: .* has no chat template"):
        toolkit("generate", tmp_path / "model", *words[2:], "--prompt", "one")


def test_pieces_that_are_shown_add_up_to_the_answer(made: Path) -> None:
    """Byte by byte: a character of several bytes is shown when it is whole. Fails when: half a character is shown."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "run/model")
    reported = "Größe 漢字 😀 end"
    ids = tokenizer(reported)["input_ids"]

    pieces: list[str] = []
    text = StreamedText(tokenizer, pieces.append)
    for token in ids:
        text.add(token)
    assert text.end() == reported
    assert "".join(pieces) == reported
    assert len(pieces) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_chat_remembers_until_it_is_reset(made: Path) -> None:
    """Fails when: the answer is not part of what the next turn reads, or /reset keeps it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "run/model")
    messages: list[dict[str, str]] = []
    said = []
    for question in ("one two", "six"):
        messages.append({"role": "user", "content": question})
        text = likeliest(made / "run/model", tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), 5)
        messages.append({"role": "assistant", "content": text})
        said.append(text)
    alone = likeliest(made / "run/model", as_turn("six", made / "run/model"), 5)
    assert alone != said[1]
    done = toolkit("chat", made / "run", "--max-new-tokens", 5, "--temperature", 0, typed="one two\nsix\n/reset\nsix\n/nothing\n/quit\nnever\n")
    assert done.stdout.split("\n\n")[:2] == said
    assert f"Forgotten.\n{alone}\n\n" in done.stdout
    assert "/nothing: no such command" in done.stdout


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_the_end_of_input_the_chat(made: Path) -> None:
    """On a terminal, in a process of its own. Fails when: the signal ends the chat, or nothing of the answer is kept."""
    import pty

    # an answer that goes round in circles, up to the model's last position
    words = ("one", "two", "three", "four", "five", "six", "seven", *QUESTIONS)
    folder = made / "run/model"
    endless = next(word for word in words if lasts(folder, as_turn(word, folder), 90))
    main, other = pty.openpty()
    command = [sys.executable, "-m", "toolkit", "chat", str(made / "run"), "--max-new-tokens", "4000", "--temperature", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True, env=environment)
    os.close(other)
    os.set_blocking(main, False)
    heard = ""

    def wait_for(words: str, more: int = 0, seconds: float = 120) -> None:
        """Until the words are heard, and N characters after them."""
        nonlocal heard
        end = time.monotonic() + seconds
        while words not in heard or len(heard.partition(words)[2]) < more:
            assert time.monotonic() < end, heard
            time.sleep(0.005)
            try:
                heard += os.read(main, 65536).decode(errors="replace")
            except BlockingIOError:
                continue
            except OSError:
                break

    try:
        wait_for("> ")
        for _ in range(20):  # until the signal comes before the answer's own end
            heard = ""
            os.write(main, f"{endless}\n".encode())
            wait_for(f"{endless}\r\n", more=3)
            process.send_signal(signal.SIGINT)
            wait_for("\n> ")
            if "(ended)" in heard:
                break
            time.sleep(0.5)  # the signal came at the prompt, which is shown once more
            os.write(main, b"/reset\n")
            wait_for("Forgotten.\r\n> ")
        assert "(ended)" in heard
        os.write(main, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(main)


def evaluated(*words: object) -> dict[str, Any]:
    return json.loads(toolkit("evaluate", *words, "--json").stdout)


def test_a_language_models_metrics_are_those_of_a_loop_over_tokens(made: Path, tmp_path: Path) -> None:
    """Answers only where rows have prompts; bits per byte where every token counts. Fails when: a mean of batch means is
    taken, or the prompt is counted."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "run/model")
    model = transformers.AutoModelForCausalLM.from_pretrained(made / "run/model").eval()
    rows = [{"prompt": "one two" + " two" * i, "completion": " three four" * (7 - i)} for i in range(7)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": row["prompt"] + row["completion"]}) for row in rows))
    sums = {"answers": [0.0, 0.0, 0], "texts": [0.0, 0.0, 0]}
    for row in rows:
        ids = torch.tensor([[*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]])
        prompt = len(tokenizer(row["prompt"])["input_ids"])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].double().log_softmax(-1)
        nll, right = -scores.gather(1, ids[0, 1:, None])[:, 0], scores.argmax(-1) == ids[0, 1:]
        for name, start in (("answers", prompt - 1), ("texts", 0)):
            sums[name] = [sums[name][0] + float(nll[start:].sum()), sums[name][1] + float(right[start:].sum()), sums[name][2] + len(nll[start:])]
    for name, (nll, right, tokens) in sums.items():
        found = evaluated(made / "run", "--dataset", tmp_path / f"{name}.jsonl", "--per-device-eval-batch-size", 3)
        metrics = found["metrics"]
        assert metrics["loss"] == pytest.approx(nll / tokens, rel=1e-5)
        assert metrics["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)
        assert metrics["token_accuracy"] == pytest.approx(right / tokens)
        assert (found["rows"], found["task"]) == (7, {"answers": "sft", "texts": "lm"}[name])
        assert ("bits_per_byte" in metrics) == (name == "texts")
    size = sum(len((row["prompt"] + row["completion"]).encode()) for row in rows)
    nll, _, tokens = sums["texts"]
    assert metrics["bits_per_byte"] == pytest.approx((nll / math.log(2) + 7 * math.log2(len(tokenizer))) / size, rel=1e-5)
    assert set(evaluated(made / "run", "--dataset", tmp_path / "texts.jsonl", "--metrics", "perplexity")["metrics"]) == {"perplexity"}
    with pytest.raises(Refusal, match=r"--metrics bits_per_byte: .*loss, perplexity, token_accuracy"):
        evaluated(made / "run", "--dataset", tmp_path / "answers.jsonl", "--metrics", "bits_per_byte")


@pytest.mark.parametrize(
    ("of", "rows", "metric", "said"),
    [
        ("run", {"prompt": "a b", "completion": "c"}, "perplexty", "bits_per_byte. Did you mean perplexity?"),
        ("classes", {"text": "a b", "label": 1}, "acuracy", "Did you mean accuracy?"),
    ],
)
def test_a_mistyped_metric_is_refused_before_the_model_is_loaded(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, rows: dict[str, Any], metric: str, said: str
) -> None:
    """Fails when: the names are looked at once the model and the rows are there."""
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(rows)}\n" * 3)
    monkeypatch.setattr("toolkit.models.trained.load_trained", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(Refusal) as refused:
        evaluated(made / of, "--dataset", tmp_path / "rows.jsonl", "--metrics", metric)
    assert said in str(refused.value)


TEXT_METRIC = """import datasets
import evaluate


class Overlap(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        same = [p == r for p, r in zip(predictions, references, strict=True)]
        return {"exact": sum(same) / len(same), "letters": [len("".join(predictions)), len("".join(references))]}
"""


@pytest.mark.parametrize("layout", ["prompt", "messages"])
def test_a_module_of_evaluate_compares_a_language_models_answers_with_the_datas(made: Path, tmp_path: Path, layout: str) -> None:
    """Against transformers' own greedy decoding, one prompt at a time. Fails when: answers are cut for display, the prompt is part of
    the answer, an answer is padded by its neighbors, or the usual metrics are left out next to it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "run/model")
    model = transformers.AutoModelForCausalLM.from_pretrained(made / "run/model").eval()
    (tmp_path / "overlap.py").write_text(TEXT_METRIC)
    rows, exact, letters = [], 0, [0, 0]
    for i in range(6):
        asked = "one two" + " two" * i
        chat = [{"role": "user", "content": asked}]
        prompt = asked if layout == "prompt" else tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made_here = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=stop_ids(model, tokenizer), pad_token_id=0)
        text = tokenizer.decode(made_here[0, ids.shape[1] :], skip_special_tokens=True).strip()
        reference = text if i % 3 == 0 and text else "six seven"
        exact, letters = exact + (text == reference), [letters[0] + len(text), letters[1] + len(reference)]
        if layout == "prompt":
            rows.append({"prompt": asked, "completion": f" {reference}\n"})
        else:
            rows.append({"messages": [*chat, {"role": "assistant", "content": reference}]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = evaluated(made / "run", "--dataset", tmp_path / "rows.jsonl", "--metrics", f"loss,{tmp_path / 'overlap.py'}", "--max-new-tokens", 9)
    loss = evaluated(made / "run", "--dataset", tmp_path / "rows.jsonl", "--metrics", "loss")["metrics"]["loss"]
    assert found["metrics"] == {"loss": loss, "exact": exact / 6, "letters_0": letters[0], "letters_1": letters[1]}
    assert 0 < exact < 6


def test_a_module_that_compares_texts_needs_answers(made: Path, tmp_path: Path) -> None:
    """Fails when: the half of a text is taken for the answer to the other half."""
    (tmp_path / "overlap.py").write_text(TEXT_METRIC)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'text': 'one two three'})}\n" * 3)
    for task, said in (("lm", "where rows have no answers"), ("sft", "no prompt with an answer")):
        with pytest.raises(Refusal) as refused:
            evaluated(made / "run", "--dataset", tmp_path / "rows.jsonl", "--task", task, "--metrics", tmp_path / "overlap.py")
        assert said in str(refused.value)


def test_the_rows_that_training_holds_out_can_be_asked_for(made: Path, tmp_path: Path) -> None:
    """Fails when: --split validation is refused where the data have none, or takes other rows than load_splits."""
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"one two {i}"}) for i in range(80)))
    held_out = len(tk.load_splits(str(path))["validation"])
    assert evaluated(made / "run", "--dataset", path)["rows"] == 80
    assert evaluated(made / "run", "--dataset", path, "--split", "validation")["rows"] == held_out < 80
    (tmp_path / "config.yaml").write_text(f"dataset: {path}\nmodel: tiny-llama\nhidden_size: 32\nlearning_rate: 1\n")
    assert evaluated(made / "run", "--config", tmp_path / "config.yaml")["rows"] == held_out
    with pytest.raises(Refusal, match=r"--split tset: .*texts\.jsonl .*: train\."):
        evaluated(made / "run", "--dataset", path, "--split", "tset")


def test_a_run_is_evaluated_on_what_it_held_out_and_told_what_it_was_trained_on(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: a model's own run is not looked for, its path not found from elsewhere, or other rows are not compared."""
    texts = [f"one two {i}" for i in range(80)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"words": text}) for text in texts))
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))
    (run / "run.json").write_text(json.dumps({"started": {"directory": str(tmp_path)}}))
    config = "dataset: texts.jsonl\nmodel: tiny-llama\nhidden_size: 32\nrename_columns: [words=text]\n"
    (run / "config.yaml").write_text(config)
    splits = tk.load_splits(Config(dataset=str(tmp_path / "texts.jsonl"), rename_columns=["words=text"]))
    held_out, trained = len(splits["validation"]), splits["train"]["text"][:]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in ((run,), (run / "model",), (run, "--dataset", tmp_path / "texts.jsonl"), (run, "--dataset", "../texts.jsonl")):
        found = evaluated(*words)
        assert (found["split"], found["rows"], found["trained_on"]) == ("validation", held_out, 0)
    everything = ("--dataset", tmp_path / "texts.jsonl", "--split", "train", "--rename-columns", "words=text")
    found = evaluated(run, *everything)
    assert (found["rows"], found["trained_on"]) == (80, 80 - held_out)
    (tmp_path / "others.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*trained[:3], "one one", "two two"]))
    assert evaluated(run, "--dataset", tmp_path / "others.jsonl")["trained_on"] == 3
    said = toolkit("evaluate", run, "--dataset", tmp_path / "others.jsonl").stdout
    assert re.search(r"\b3 of these rows .*trained on", said)
    (run / "config.yaml").write_text(config + "eval_fraction: 0\n")
    found = evaluated(run)
    assert (found["rows"], found["trained_on"]) == (80, 80)
    assert "trained_on" not in evaluated(made / "run", "--dataset", tmp_path / "others.jsonl")


def test_a_classifiers_metrics_are_those_of_scikit_learn_with_the_models_own_classes(made: Path, tmp_path: Path) -> None:
    """The data lack a class, and name the others in another order. Fails when: classes are numbered as they come in the data."""
    texts, labels = [f"one {'two ' * i}three" for i in range(11)], ["good", "fair"] * 5 + ["good"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "classes/model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(made / "classes/model").eval()
    with torch.no_grad():
        predicted = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]
    numbers = [{"bad": 0, "fair": 1, "good": 2}[label] for label in labels]
    for name, written in (("names", labels), ("numbers", numbers)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in zip(texts, written, strict=True)))
        metrics = evaluated(made / "classes", "--dataset", path, "--per-device-eval-batch-size", 4, "--metrics", "accuracy,f1_micro")["metrics"]
        assert metrics["accuracy"] == pytest.approx(accuracy_score(numbers, predicted))
        assert metrics["f1_micro"] == pytest.approx(f1_score(numbers, predicted, average="micro"))
    with pytest.raises(Refusal, match="AutoModelForSequenceClassification"):
        toolkit("generate", made / "classes", "--prompt", "x")


@pytest.mark.parametrize(
    ("setting", "row", "needed"),
    [
        ("ranking_loss: bce", {"query": "one", "positive": "two"}, "query (or anchor), positive and negative"),
        ("ranking_loss: bce", {"text": "one", "label": 1}, "query (or anchor), positive and negative"),
        ("center_rewards_coefficient: 0", {"prompt": "one", "completion": "two"}, "chosen"),
    ],
)
def test_rows_of_another_task_are_refused_with_the_columns_of_the_runs_own(
    made: Path, tmp_path: Path, setting: str, row: dict[str, Any], needed: str
) -> None:
    """A model of one number per text could be a classifier's. Fails when: what the run was trained for is not looked up."""
    run = Path(shutil.copytree(made / "rewards", tmp_path / "run"))
    (run / "run.json").write_text("{}")
    (run / "config.yaml").write_text(f"dataset: nowhere.jsonl\nmodel: tiny-llama\n{setting}\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(Refusal) as refused:
        evaluated(run, "--dataset", tmp_path / "rows.jsonl")
    assert needed in str(refused.value)


def test_a_reward_models_accuracy_is_the_share_of_pairs_it_ranks_as_the_data_do(made: Path, tmp_path: Path) -> None:
    """Fails when: the padding's score is read."""
    pairs = [(f"one {'two ' * i}", "three four", "five " * (i % 3 + 1)) for i in range(9)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "chosen": c, "rejected": r}) for p, c, r in pairs))
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "rewards/model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(made / "rewards/model").eval()

    @torch.no_grad()
    def reward(text: str) -> float:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        return float(model(input_ids=ids).logits)

    metrics = evaluated(made / "rewards", "--dataset", path, "--per-device-eval-batch-size", 4)["metrics"]
    rewards = np.array([[reward(p + c), reward(p + r)] for p, c, r in pairs])
    assert metrics["reward_accuracy"] == pytest.approx(np.mean(rewards[:, 0] > rewards[:, 1]))
    assert metrics["rewards_chosen"] == pytest.approx(rewards[:, 0].mean(), abs=1e-6)


def test_marked_answers_given_to_a_language_model_are_compared_by_its_log_probabilities(made: Path, tmp_path: Path) -> None:
    """Fails when: such rows are read as answers to learn from, an average per token is compared, or the mark is left out."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "run/model")
    model = transformers.AutoModelForCausalLM.from_pretrained(made / "run/model").eval()
    pairs = [(f"one{' two' * (i % 4)}", " three four" + " six" * (i % 3), " five" * (i % 5 + 1)) for i in range(11)]

    @torch.no_grad()
    def logp(prompt: str, answer: str) -> float:
        ids = torch.tensor([[*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]])
        scores = model(ids).logits[0, :-1].double().log_softmax(-1)
        return float(scores.gather(1, ids[0, 1:, None])[len(tokenizer(prompt)["input_ids"]) - 1 :].sum())

    found = np.array([[logp(p, c), logp(p, r)] for p, c, r in pairs])
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps({"prompt": p, "chosen": c, "rejected": r}) for p, c, r in pairs))
    reported = evaluated(made / "run", "--dataset", tmp_path / "pairs.jsonl", "--per-device-eval-batch-size", 4)
    metrics, shares = reported["metrics"], (found[:, 0] > found[:, 1]).mean()
    assert reported["task"] == "preference"
    assert "no reference model enters" in reported["remark"]
    assert 0 < shares < 1
    assert metrics["logps_accuracy"] == pytest.approx(shares)
    assert metrics["logps_margin"] == pytest.approx((found[:, 0] - found[:, 1]).mean(), rel=1e-5)
    assert (metrics["logps_chosen"], metrics["logps_rejected"]) == pytest.approx(tuple(found.mean(0)), rel=1e-5)
    marked = [{"prompt": p, "completion": a, "label": a is c} for p, c, r in pairs for a in ((c, r) if len(p) > 4 else (c,))]
    (tmp_path / "marked.jsonl").write_text("\n".join(map(json.dumps, marked)))
    reported = evaluated(made / "run", "--dataset", tmp_path / "marked.jsonl", "--per-device-eval-batch-size", 4)
    good, bad = ([logp(row["prompt"], row["completion"]) for row in marked if row["label"] is kind] for kind in (True, False))
    auc = np.mean([(a > b) + (a == b) / 2 for a in good for b in bad])
    assert (reported["task"], reported["rows"]) == ("unpaired", len(marked))
    assert reported["metrics"]["logps_auc"] == pytest.approx(auc)
    assert reported["metrics"]["logps_margin"] == pytest.approx(np.mean(good) - np.mean(bad), rel=1e-5)
    (tmp_path / "bad.jsonl").write_text("\n".join(json.dumps({**row, "label": False}) for row in marked))
    alone = evaluated(made / "run", "--dataset", tmp_path / "bad.jsonl")["metrics"]
    assert alone["logps_auc"] is None
    assert alone["logps_desirable"] is None
    assert alone["logps_undesirable"] < 0
    with pytest.raises(Refusal, match=r"--metrics perplexity: .*logps_accuracy, "):
        evaluated(made / "run", "--dataset", tmp_path / "pairs.jsonl", "--metrics", "perplexity")
    assert list(evaluated(made / "run", "--dataset", tmp_path / "pairs.jsonl", "--metrics", "logps_accuracy")["metrics"]) == ["logps_accuracy"]

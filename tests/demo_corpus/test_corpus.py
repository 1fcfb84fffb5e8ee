"""The embedded corpus: real text, honest splits, and nothing imported or left half made."""

import ast
import importlib
import inspect
import math
import random
import sys
import textwrap
from pathlib import Path

import pytest

from toolkit.cache import arrow
from toolkit.config import DataConfig, Refusal
from toolkit.data.sources.load import describe_source, load_splits
from toolkit.demo_corpus import stdlib as corpus, tasks as corpus_tasks
from toolkit.demo_corpus.annotations import TOKEN_ROLES, first_sentence, token_roles
from toolkit.demo_corpus.near_duplicates import without_leaks

TASKS = ("embed", "pretrain", "sft", "dpo", "classify", "tag", "qa", "seq2seq", "rank", "choose")
FEWEST = {
    "embed": (2000, 60, 150), "pretrain": (200, 10, 15), "sft": (2000, 60, 150), "dpo": (2000, 60, 150), "seq2seq": (2000, 60, 150),
    "rank": (2000, 60, 150), "choose": (2000, 60, 150),
}  # fmt: skip
TEXTS = {  # the columns that must not be known from training; a question or an answer may
    "embed": ["query", "positive"],
    "pretrain": ["text"], "sft": ["messages"], "dpo": ["prompt", "chosen"], "classify": ["text"],
    "tag": ["tokens"], "qa": ["context"], "seq2seq": ["source", "target"], "rank": ["query"],
    "choose": ["question"],
}  # fmt: skip


def place_of(origin: str) -> tuple[str, str]:
    """Module and qualified name of stdlib:task/module:qualname."""
    module, _, qualname = origin.split("/")[1].partition(":")
    return module, qualname.split("#")[0]


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_text_is_verbatim_in_the_training_rows(task: str) -> None:
    """White space and case apart. Fails when: write_task leaves out without_leaks."""

    def texts(value: str | list) -> list[str]:
        """A string, tokens put together, or each message of a chat."""
        chat = not isinstance(value, str) and isinstance(value[0], dict)
        parts = [message["content"] for message in value] if chat else ["".join(value)]
        return ["".join(part.split()).lower() for part in parts]

    splits = load_splits(f"stdlib:{task}")
    assert list(splits) == ["train", "validation", "test"]
    assert all(len(rows) >= least for rows, least in zip(splits.values(), FEWEST.get(task, (5000, 150, 400)), strict=True))
    for column in TEXTS[task]:
        known = {text for value in splits["train"][column] for text in texts(value)}
        for split in ("validation", "test"):
            assert not [text for value in splits[split][column] for text in texts(value) if text in known]


def test_a_module_is_on_one_side_in_every_task() -> None:
    """So a model trained on stdlib:pretrain has not read what stdlib:sft tests. Fails when: a task splits by function."""
    side: dict[str, str] = {}
    for task in set(TASKS) - {"classify"}:
        for split, rows in load_splits(f"stdlib:{task}").items():
            for origin in rows["origin"]:
                assert side.setdefault(place_of(origin)[0], split) == split
    assert {"train", "validation", "test"} == set(side.values())


def test_documents_are_the_modules_as_they_stand_in_the_library() -> None:
    """Fails when: a document is cut, or another file than its origin says."""
    rows = load_splits("stdlib:pretrain")["train"]
    for row in rows.select(range(0, len(rows), 10)):
        module = place_of(row["origin"])[0]
        path = corpus.stdlib_root() / module.replace(".", "/")
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        assert row["text"].splitlines() == file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ["json.decoder:JSONDecoder.decode", "random:Random.shuffle", "shutil:copytree"])
def test_code_and_sentence_are_the_function_s_own(name: str) -> None:
    """Against inspect. Fails when: rows take the next function's docstring, or the code keeps it."""
    module, qualname = name.split(":")
    function = importlib.import_module(module)
    for part in qualname.split("."):
        function = getattr(function, part)
    (found,) = [each for each in corpus.read_functions() if (each.module, each.qualname) == (module, qualname)]
    assert found.source.rstrip() == textwrap.dedent(inspect.getsource(function)).rstrip()
    sentence = first_sentence(found.docstring).rstrip(".")
    assert sentence in " ".join((inspect.getdoc(function) or "").split())
    assert sentence not in " ".join(found.code.split())


def test_code_is_the_source_without_its_docstring_and_nothing_else() -> None:
    """Over the library, by syntax tree. Fails when: strip takes one line more or less, or forgets the `pass`."""
    checked = 0
    for function in corpus.read_functions()[::10]:
        if function.docstring and function.code:
            tree = ast.parse(function.source)
            body = tree.body[0].body  # type: ignore[attr-defined]
            body[:] = body[1:] or [ast.Pass()]
            assert ast.dump(ast.parse(function.code)) == ast.dump(tree)
            checked += 1
    assert checked > 200


def test_a_prompt_does_not_hold_its_answer() -> None:
    """Fails when: sft prompts are made of `source`."""
    rows = load_splits("stdlib:sft")["train"]
    texts = [(row["origin"], *(message["content"] for message in row["messages"])) for row in rows]
    given_away = [origin for origin, question, answer in texts if answer.rstrip(".") in " ".join(question.split())]
    assert len(given_away) <= len(rows) / 200  # a comment may say it again


def test_a_rejected_sentence_is_another_s_and_tells_nothing_by_its_length() -> None:
    """Fails when: the nearest in length is taken without `_plain(s) != _plain(sentence)`, or without sorting by length."""
    for split, rows in load_splits("stdlib:dpo").items():
        pairs = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows]
        assert all(chosen.lower() != rejected.lower() for chosen, rejected in pairs)
        gap = [len(chosen) - len(rejected) for chosen, rejected in pairs]
        assert abs(sum(gap) / len(gap)) < 2
        assert sum(map(abs, gap)) / len(gap) < (2 if split == "train" else 12)


def test_the_nearest_are_those_that_sorting_all_pairs_finds() -> None:
    """Own module first, then length, then the tie; 30 modules of 1 to 12 functions. Fails when: `is own` is left out, or a ratio is not absolute."""
    numbers = random.Random(0)
    names = [f"m{numbers.randrange(30)}" for _ in range(150)]
    described = [(corpus.Function(name, "f", f"f{place}", "", "", ""), "") for place, name in enumerate(names)]
    lengths = [numbers.randrange(1, 40) for _ in described]
    nearest = corpus_tasks._nearest_by_length(described, lengths)
    for place in range(150):

        def key(other: int, place: int = place) -> tuple[bool, float, int]:
            return names[other] != names[place], abs(math.log(lengths[other] / lengths[place])), other * 7919 % 150

        expected = sorted((other for other in range(150) if other % 3), key=key)[:7]
        assert nearest(place, 7, lambda other: other * 7919 % 150, lambda other: bool(other % 3)) == expected


def test_labels_are_the_family_of_the_row_s_library() -> None:
    """Fails when: labels are indices into another order of names."""
    rows = load_splits("stdlib:classify")["test"]
    names = rows.features["label"].names
    assert names == list(corpus_tasks.LIBRARY_FAMILIES)
    for row in rows:
        package = place_of(row["origin"])[0].split(".")[0]
        assert package in corpus_tasks.LIBRARY_FAMILIES[names[row["label"]]].split()
    assert set(rows["label"]) == set(range(7))


def test_answers_are_spans_of_their_context() -> None:
    """Fails when: offsets count bytes, as ast does."""
    for rows in load_splits("stdlib:qa").values():
        for row in rows:
            text, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
            assert text
            assert row["context"][start : start + len(text)] == text
    source = 'def f(é):\n    """Say it in Ünïcode now."""\n    é = "ü"; return é'
    latin = corpus.Function("m", "f", "f", source, "", "Say it in Ünïcode now.")
    answers = {question: latin.source[start:end] for question, start, end in corpus_tasks.questions_about(latin)}
    assert answers["What does it return first?"] == "é"
    assert answers["What does the function do?"] == "Say it in Ünïcode now."


def test_roles_are_those_that_the_syntax_tree_gives() -> None:
    """Parameters, names of definitions and attributes against ast. Fails when: the depth of brackets is not restored."""
    rows = load_splits("stdlib:tag")["test"]
    assert rows.features["tags"].feature.names == list(TOKEN_ROLES)
    functions: dict[str, list[str]] = {}
    for each in corpus.read_functions():
        functions.setdefault(f"{each.module}:{each.qualname}", []).append(each.code)  # a property has two
    checked = 0
    for row in rows:
        codes = functions[":".join(place_of(row["origin"]))]
        if len(row["tokens"]) < 96 and len(codes) == 1:
            nodes = list(ast.walk(ast.parse(codes[0])))
            defined = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            expected = {
                "PARAM": [name for node in defined for name in parameters(node.args)],
                "DEF": [node.name for node in nodes if isinstance(node, ast.ClassDef)] + [node.name for node in defined],
                "KWARG": [node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg],
            }
            for role, names in expected.items():
                found = [t for t, tag in zip(row["tokens"], row["tags"], strict=True) if TOKEN_ROLES[tag] == role]
                assert sorted(found) == sorted(name[:40] for name in names), (role, row["origin"])
            checked += 1
    assert checked > 100


def parameters(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in (*named, arguments.vararg, arguments.kwarg) if each]


def test_an_f_string_is_one_string_on_every_version() -> None:
    """Since 3.12 the tokenizer gives its pieces. Fails when: the pieces are passed on (on 3.12 and later)."""
    tokens, tags = token_roles('def f(a):\n    return f"x {a!r:{a}}" + a')
    assert tokens == ["def", "f", "(", "a", ")", ":", "return", 'f"x {a!r:{a}}"', "+", "a"]
    assert TOKEN_ROLES[tags[7]] == "STRING"


def test_near_duplicates_of_training_rows_are_dropped_and_others_kept() -> None:
    """Fails when: NEARLY_ALL is above 1, or when the windows of one text run on into the next."""
    words = [f"w{number}" for number in range(40)]
    rows = [
        {"text": " ".join(words), "split": "train"},
        {"text": " ".join([*words[:38], "x", "y"]), "split": "test"},  # two words differ
        {"text": " ".join(reversed(words)), "split": "test"},
        {"text": "SHORT  one", "split": "validation"},
        {"text": "short one", "split": "train"},
        {"text": "w1 w2 w3", "split": "test"},
    ]
    assert without_leaks(rows, ("text",)) == [rows[0], rows[2], rows[4], rows[5]]
    parts = [" ".join(words[start : start + 7]) for start in range(0, 35, 7)]  # each too short for a window
    rows = [*({"text": part, "split": "train"} for part in parts), {"text": " ".join(parts), "split": "test"}]
    assert without_leaks(rows, ("text",)) == rows


def test_reading_the_library_imports_none_of_it() -> None:
    """Fails when: a module is imported to read its docstrings."""
    before = set(sys.modules)
    for module, text in corpus.read_modules():
        if module.split(".")[0] in ("mailbox", "antigravity", "smtplib", "xmlrpc", "wsgiref", "this"):
            list(corpus.parse_functions(module, text))
    assert not [name for name in set(sys.modules) - before if name.split(".")[0] in ("mailbox", "smtplib", "xmlrpc", "wsgiref")]
    assert not [path for path in corpus.stdlib_files() if "test" in path.split("/")[:-1] or path == "this.py"]


def test_the_digest_names_the_text_and_not_its_place_or_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the digest leaves out a file's content or its name."""

    def digest(folder: str, content: str = "x = 0", name: str = "m0.py") -> str:
        root = tmp_path / folder
        (root / "test").mkdir(parents=True)
        (root / "test" / "ignored.py").write_text(folder)
        for number in range(120):
            (root / (name if number == 0 else f"m{number}.py")).write_text(content if number == 0 else f"x = {number}")
        monkeypatch.setattr(corpus, "stdlib_root", lambda: root)
        return corpus.corpus_facts.__wrapped__().digest

    assert digest("a") == digest("b")
    assert len({digest("c"), digest("d", content="x = 1"), digest("e", name="m00.py")}) == 3


def test_a_library_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: an empty corpus is returned."""
    monkeypatch.setattr(corpus, "stdlib_root", lambda: tmp_path)
    with pytest.raises(Refusal, match=rf"^stdlib: .* {tmp_path} .*--dataset"):
        corpus.stdlib_files()


def test_a_second_load_reads_the_cache_and_has_the_same_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the key holds something of the process, or the rows are made again."""
    first = corpus.load_corpus("seq2seq")
    monkeypatch.setattr(corpus_tasks, "write_task", lambda *_: pytest.fail("made again"))
    monkeypatch.setattr(arrow, "write_tables", lambda *_: pytest.fail("written again"))
    second = corpus.load_corpus("seq2seq")
    assert [rows._fingerprint for rows in first.values()] == [rows._fingerprint for rows in second.values()]
    assert first["test"].to_list() == second["test"].to_list()


def test_a_run_can_say_what_it_read() -> None:
    """Fails when: the version or the digest is left out."""
    facts = corpus.corpus_facts()
    line = describe_source(DataConfig(dataset="stdlib:sft"))
    assert "\n" not in line
    for part in ("stdlib:sft", ".".join(map(str, sys.version_info[:3])), facts.digest[:8], str(facts.files)):
        assert part in line
    assert load_splits("stdlib:sft")["train"].info.description.startswith(line)


@pytest.mark.parametrize(("name", "said"), [("stf", "Did you mean stdlib:sft?"), ("zzz", "It has stdlib:pretrain, stdlib:sft")])
def test_an_unknown_task_is_refused_with_those_there_are(name: str, said: str) -> None:
    """Fails when: the nearest name isn't looked for."""
    with pytest.raises(Refusal, match=said.replace("?", r"\?")):
        load_splits(f"stdlib:{name}")

"""`toolkit push` as it is typed: a run's model, a model directory, what is refused, and a Hub that is away."""

import shlex
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.warm

CARD = '---\nlibrary_name: transformers\n---\n\n```python\nname = "run"\n```\n'
MODEL = {"config.json": "{}", "model.safetensors": "weights", "README.md": CARD, "preprocessor_config.json": "{}", "processing_mine.py": "x"}
REST = {".env": "HF_TOKEN=x", "notes.txt": "mine", "optimizer.pt": "0", "sub/config.json": "{}", ".git/config": "x"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run's model, with files next to it that are nobody's business."""
    for name, text in {**MODEL, **REST}.items():
        path = tmp_path / "run/model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "run/config.yaml").write_text("hub_model_id: named-in-settings\nhub_private_repo: true\n")
    return tmp_path / "run"


def test_the_model_of_a_run_goes_where_its_settings_say_and_once(push: Any, hub: Any, run: Path) -> None:
    """Only what makes a model. Fails when: other files are sent, config.yaml isn't read, or the second push commits again."""
    for _ in range(2):
        code, said = push("run", "--message", "Ours")
        assert code == 0, said
    assert hub.titles("alice/named-in-settings") == ["Ours"]
    assert hub.repositories["alice/named-in-settings"].private
    sent = hub.files("alice/named-in-settings")
    assert sent == {**{k: v.encode() for k, v in MODEL.items()}, "README.md": CARD.replace('"run"', '"alice/named-in-settings"').encode()}
    assert not (run / "hub_queue").exists()


def test_a_model_directory_goes_where_it_is_told(push: Any, hub: Any, run: Path) -> None:
    """Fails when: an option is not used. The directory is left as it was."""
    before = sorted(path.name for path in (run / "model").iterdir())
    code, said = push("run/model", "--repo-id", "alice/other", "--public", "--revision", "v1")
    assert code == 0, said
    assert hub.titles("alice/other", "v1") == ["Upload run"]
    assert not hub.repositories["alice/other"].private
    assert sorted(path.name for path in (run / "model").iterdir()) == before


@pytest.mark.parametrize("base", ["org/base", "", "{here}/base"], ids=["hub", "inside", "directory"])
def test_an_adapter_whose_base_others_have_not_is_sent_with_a_warning(push: Any, hub: Any, tmp_path: Path, base: str) -> None:
    """Fails when: it isn't said, or said of a base that others have."""
    import json

    (tmp_path / "base").mkdir()
    (tmp_path / "run").mkdir()
    base = base.replace("{here}", str(tmp_path))
    (tmp_path / "run/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (tmp_path / "run/adapter_model.safetensors").write_text("weights")
    code, said = push("run")
    assert code == 0, said
    assert ("WARNING: " in said and str(tmp_path / "base") in said) == (base == str(tmp_path / "base"))
    assert ("toolkit merge run --into DIR" in said) == (base == str(tmp_path / "base"))
    assert hub.titles("alice/run") == ["Upload run"]


def test_a_run_that_will_send_such_an_adapter_says_so_before_its_first_step(hub: Any, api: Any, tmp_path: Path) -> None:
    """Fails when: only `toolkit push` says it, when all is trained."""
    from types import SimpleNamespace

    from toolkit.hub.uploads import _find_repository

    config = SimpleNamespace(hub_strategy="end", hub_model_id="model", hub_private_repo=None, hub_revision=None, output_dir="out")
    for base, count in (("org/base", 0), (str(tmp_path), 1)):
        said: list[str] = []
        settings = {"default": SimpleNamespace(base_model_name_or_path=base)}
        model = SimpleNamespace(peft_config=settings, get_base_model=None)
        assert _find_repository(config, model, shards=False, say=said.append) == "alice/model"
        assert [line.startswith("WARNING: the adapter's base is") for line in said] == [True] * count


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nowhere"], "no such directory"), (["."], "nothing waits"), (["run", "--repo-id", "bob/x"], "belongs to bob"), (["run", "--repo-id", "a--b"], "a--b")],
    ids=["no-directory", "no-model", "somebody-else", "no-name"],
)
def test_a_mistake_is_one_message_and_code_2(push: Any, run: Path, arguments: list[str], words: str) -> None:
    """Fails when: a mistake of the user's is a traceback or code 1."""
    code, said = push(*arguments)
    assert code == 2, said
    assert words in said
    assert "Traceback" not in said


def test_while_the_hub_is_away_nothing_is_lost_and_the_code_is_1(push: Any, hub: Any, run: Path) -> None:
    """Fails when: a push that can't be made is taken for a mistake, or a second one forgets what waits."""
    hub.fail("*", ".*", 503, times=10**9)
    code, said = push("run")
    assert code == 1, said
    assert "toolkit push run\n" in said
    hub.faults.clear()
    code, said = push("run")
    assert code == 0, said
    assert hub.titles("alice/named-in-settings") == ["Upload run"]


@pytest.mark.fast(1)  # the other waits for half a minute
@pytest.mark.parametrize("route", [".*", "/commit/"], ids=["before it is asked", "at the commit"])
def test_the_command_for_later_sends_to_the_same_place_as_privately(push: Any, hub: Any, run: Path, route: str) -> None:
    """Fails when: an option that was typed isn't in it, and a private model would go to the run's place, for all to see."""
    hub.fail("POST" if route == "/commit/" else "*", route, 503, times=10**9)
    code, said = push("run/model", "--repo-id", "alice/mine", "--private", "--revision", "trial", "--message", "Two words")
    assert code == 1, said
    again = next(line for line in said.splitlines() if line.startswith("  toolkit push"))
    message = " --message 'Two words'" if route == ".*" else ""  # which is in the queue after that
    assert again == f"  toolkit push run/model --repo-id alice/mine --private --revision trial{message}"
    hub.faults.clear()
    code, said = push(*shlex.split(again)[2:])
    assert code == 0, said
    assert hub.titles("alice/mine", "trial") == ["Two words"]
    assert hub.repositories["alice/mine"].private


def test_a_name_that_none_can_have_is_refused_without_the_hub(push: Any, hub: Any, run: Path) -> None:
    """Fails when: the Hub is asked first, which may be away."""
    hub.fail("*", ".*", 503, times=10**9)
    code, said = push("run", "--repo-id", "bad name!")
    assert (code, hub.requests) == (2, []), said
    assert "bad name!" in said

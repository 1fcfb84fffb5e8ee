"""Commits on their way to a Hub that fails: the right files, each commit once, whatever breaks. The client is the real one.

100 random sequences of faults are tried, 1,000 in `make chaos`.
"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_server import DROP, DROP_AFTER

from toolkit.config import Refusal
from toolkit.hub.client import check_write_access
from toolkit.hub.queue import WAITING_MOST, Job, add_job, leave_out_replaced, list_jobs
from toolkit.hub.sender import CannotSend, send_job

MODEL = {"config.json": b"{}", "model.safetensors": b"weights" * 100, "README.md": b"---\nlicense: mit\n---\nA model\n"}
PLACES = {
    "repository": ("GET", r"/api/models/alice/model(/revision/main)?$"), "tree": ("GET", "/tree/"), "card": ("POST", "validate-yaml"),
    "preupload": ("POST", "/preupload/"), "batch": ("POST", "/objects/batch"), "put": ("PUT", "/_large/"),
    "commit": ("POST", "/commit/"),
}  # fmt: skip
PASSING = {"429": 429, "500": 500, "503": 503, "dropped": DROP, "dropped-after": DROP_AFTER}


def send_all(api: Any, queue: Path, tries: int = 5) -> None:
    for job in list_jobs(queue):
        send_job(api, job, sleep=lambda seconds: None, tries=tries)


@pytest.mark.parametrize("fault", [*PASSING, "409"])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_that_passes_costs_a_retry_and_nothing_is_committed_twice(
    hub: Any, api: Any, queued: Any, tmp_path: Path, place: str, fault: str
) -> None:
    """Fails when: a status is no longer worth another try, or a commit whose answer was lost is made again."""
    hub.make("alice/model")
    queued(MODEL)
    hub.fail(*PLACES[place], PASSING.get(fault, 409), times=2)
    send_all(api, tmp_path / "hub_queue")
    assert hub.files("alice/model") == MODEL
    assert hub.titles("alice/model") == ["step 1"]
    assert list_jobs(tmp_path / "hub_queue") == []


@pytest.mark.parametrize(("queued_as", "sent_as"), [("model", "alice/model"), ("alice/before", "alice/model")])
def test_a_card_names_the_repository_that_it_is_sent_to(hub: Any, api: Any, queued: Any, queued_as: str, sent_as: str) -> None:
    """Queued while the Hub could not be asked who we are, or for another one: `toolkit push --hub-model-id`. The rest of the card
    is kept to the byte. Fails when: the name is that of the moment when it was queued."""
    card = b"---\nlicense: mit\n---\r\nOurs\n\n```python\nname = \"run\"\n```\n"
    job = queued({**MODEL, "README.md": card}, repo_id=queued_as)
    send_job(api, job if "/" not in queued_as else dataclasses.replace(job, repo_id=sent_as), sleep=lambda seconds: None, tries=1)
    assert hub.files(sent_as) == {**MODEL, "README.md": card.replace(b'"run"', b'"alice/model"')}


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("place", ["repository", "preupload", "commit"])
def test_what_the_hub_refuses_is_asked_once_and_kept(
    hub: Any, api: Any, queued: Any, tmp_path: Path, place: str, status: int
) -> None:
    """And sent in order once it is allowed. Fails when: a refusal is tried again, or its commit leaves the queue."""
    hub.make("alice/model")
    queued(MODEL, "step 1")
    queued({**MODEL, "model.safetensors": b"later" * 100}, "step 2")
    hub.fail(*PLACES[place], status)
    with pytest.raises(CannotSend, match=f"{status} injected"):
        send_all(api, tmp_path / "hub_queue")
    waiting = list_jobs(tmp_path / "hub_queue")
    assert [job.message for job in waiting] == ["step 1", "step 2"]
    assert f"{status} injected" in str(waiting[0].problem)
    assert hub.titles("alice/model") == []
    send_all(api, tmp_path / "hub_queue")
    assert hub.titles("alice/model") == ["step 1", "step 2"]
    assert hub.files("alice/model")["model.safetensors"] == b"later" * 100


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("license: research-only", '"license" must be one'), ("license: [mit", "YAML is invalid"), ("base_model: /home/ann/model", '"base_model" with value'),
        ("license: other\nlicense_name: My Own", '"license_name"'), ("datasets: [a, 'b c']", '"datasets" with value "b c"'),
        ("model-index:\n- name: x\n  results: [{task: {}, dataset: {type: a, name: b}, metrics: [{type: loss, value: 1}]}]", '"model-index" is not valid'),
    ],
    ids=["license", "yaml", "base", "license-name", "datasets", "model-index"],
)  # fmt: skip
def test_a_card_that_the_hub_refuses_is_told_and_kept(hub: Any, api: Any, queued: Any, tmp_path: Path, card: str, said: str) -> None:
    """By the client before anything is sent, and once. Fails when: it is tried for ever, or the message isn't the Hub's."""
    hub.make("alice/model")
    queued({**MODEL, "README.md": f"---\n{card}\n---\nA model\n".encode()})
    with pytest.raises(CannotSend) as refused:
        send_all(api, tmp_path / "hub_queue")
    assert said in str(refused.value)
    assert (hub.count("POST", "validate-yaml"), hub.titles("alice/model"), len(list_jobs(tmp_path / "hub_queue"))) == (1, [], 1)


def test_a_commit_that_arrived_is_known_below_those_of_others(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """Killed when the commit was there, before that was known; then somebody else changed the same file.
    Fails when: only the newest files are compared, and the other's change is undone by a second commit."""
    hub.make("alice/model")
    queued(MODEL)

    class Killed(BaseException):
        pass

    def commit_and_die(*arguments: Any, **settings: Any) -> None:
        type(api).create_commit(api, *arguments, **settings)
        raise Killed

    api.create_commit = commit_and_die
    with pytest.raises(Killed):
        send_all(api, tmp_path / "hub_queue")
    del api.create_commit
    assert len(list_jobs(tmp_path / "hub_queue")) == 1
    other = [hub.repositories["alice/model"].at("main").files | {"README.md": type(next(iter(hub.repositories["alice/model"].at("main").files.values())))(b"theirs", False)}]
    hub.repositories["alice/model"].add(other[0], "theirs", "", "main")
    send_all(api, tmp_path / "hub_queue")
    assert hub.titles("alice/model") == ["step 1", "theirs"]
    assert hub.files("alice/model")["README.md"] == b"theirs"


def test_half_a_commit_is_none(queued: Any, tmp_path: Path) -> None:
    """As a folder that is copied file by file may bring it back. Fails when: a commit is whole when its record is there."""
    queued(MODEL, "step 1")
    queued(MODEL, "step 2")
    queue = tmp_path / "hub_queue"
    first, second = list_jobs(queue)
    first.files["model.safetensors"].unlink()
    assert [job.message for job in list_jobs(queue)] == ["step 2"]
    second.files["README.md"].write_bytes(b"cut")
    assert list_jobs(queue) == []


def test_a_commit_that_comes_back_untried_is_known_by_its_mark(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """Sent by a machine that is gone, and its folder brought back as it was before. Then a newer one had been sent as well.

    Fails when: only a commit that knows its parent is looked for, and an old model comes after the newer one.
    """
    import shutil

    hub.make("alice/model")
    queued(MODEL, "step 1")
    queue = tmp_path / "hub_queue"
    (old,) = queue.glob("[0-9]*")
    shutil.copytree(old, tmp_path / "copy")
    send_all(api, queue)
    newer = {**MODEL, "model.safetensors": b"newer" * 100}
    queued(newer, "step 2")
    send_all(api, queue)
    shutil.copytree(tmp_path / "copy", old)
    send_all(api, queue)
    assert hub.titles("alice/model") == ["step 1", "step 2"]
    assert hub.files("alice/model") == newer
    assert list_jobs(queue) == []


def test_a_commit_of_somebody_else_in_between_stays(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """It comes between our look at the branch and our commit. Fails when: commits are sent without their parent."""
    hub.make("alice/model")
    queued(MODEL)
    once = []

    def commit_late(*arguments: Any, **settings: Any) -> Any:
        if not once:
            once.append(hub.repositories["alice/model"].add({}, "theirs", "", "main"))
        return type(api).create_commit(api, *arguments, **settings)

    api.create_commit = commit_late
    send_all(api, tmp_path / "hub_queue")
    assert hub.titles("alice/model") == ["theirs", "step 1"]
    assert hub.count("POST", "/commit/") == 2
    assert hub.files("alice/model") == MODEL


def test_the_same_files_again_make_no_commit(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """As of a finished run that is started again. The client (2.4) sees to it, by what the Hub tells of each file before. Fails when:
    it no longer does, or a file says when it was sent."""
    hub.make("alice/model")
    for message in ("End of training", "End of training again"):
        queued(MODEL, message)
        send_all(api, tmp_path / "hub_queue")
    assert hub.titles("alice/model") == ["End of training"]


def test_a_model_in_other_files_leaves_none_of_the_old_ones(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """Fails when: files of the model before stay, which from_pretrained would read; or a file of the user's goes."""
    before = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2", "model.safetensors.index.json": b"{}"}
    hub.make("alice/model", files={**before, "adapter_config.json": b"{}", "notes.txt": b"mine", "other/model.safetensors": b"mine"})
    queued(MODEL)
    send_all(api, tmp_path / "hub_queue")
    assert hub.files("alice/model") == {**MODEL, "notes.txt": b"mine", "other/model.safetensors": b"mine"}


def test_the_wait_that_the_hub_asks_for_is_kept(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """Fails when: Retry-After is not read, or the pauses don't grow."""
    hub.make("alice/model")
    queued(MODEL)
    hub.fail("POST", "/commit/", 429, headers={"Retry-After": "77"})
    hub.fail("POST", "/commit/", 500, times=3)
    waited: list[float] = []
    send_job(api, list_jobs(tmp_path / "hub_queue")[0], sleep=waited.append, tries=9)
    assert waited == [77.0, 2.0, 4.0, 8.0]


def test_a_repository_and_a_branch_are_made_where_they_are_missing(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """Also for a name without a user, as it is queued while the Hub is away. Fails when: main gets what is for the branch."""
    queued(MODEL, repo_id="model", revision="trial", private=True)
    send_all(api, tmp_path / "hub_queue")
    assert hub.repositories["alice/model"].private
    assert hub.files("alice/model", "trial") == MODEL
    assert hub.files("alice/model") == {}


def test_what_is_to_be_private_does_not_go_to_a_public_repository(hub: Any, api: Any, queued: Any, tmp_path: Path) -> None:
    """Fails when: _with_repository no longer compares."""
    hub.make("alice/model", private=False)
    queued(MODEL, private=True)
    with pytest.raises(CannotSend, match="public"):
        send_all(api, tmp_path / "hub_queue")
    assert hub.files("alice/model") == {}


REFUSED = {
    "no-token": (None, "model", {}, "there is no token"),
    "unknown-token": ("hf_gone", "model", {}, "401 Invalid credentials"),
    "reading-token": ("hf_read", "model", {}, "may only read"),
    "somebody-else": ("hf_write", "bob/model", {}, "bob/model belongs to bob.*--hub-model-id alice/model"),
    "forbidden": ("hf_write", "model", {"fault": ("POST", "/repos/create", 403)}, "403"),
    "no-write-scope": ("hf_write", "model", {"fault": ("GET", "auth-check/write", 403)}, "403"),
    "public-already": ("hf_write", "there", {"private": True}, "public"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_without_write_access_there_is_one_message(hub: Any, api: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Fails when: the token's role, its owner, its rights in the repository or the repository's visibility isn't looked at."""
    token, name, more, words = REFUSED[case]
    hub.make("alice/there")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    if "fault" in more:
        hub.fail(*more["fault"])
    with pytest.raises(Refusal, match=words) as refusal:
        check_write_access(api, name, more.get("private"))
    assert "hf_" not in str(refusal.value).replace("HF_TOKEN", "")
    assert "\n" not in str(refusal.value)


def test_of_a_long_line_those_are_left_out_that_a_later_one_replaces(tmp_path: Path) -> None:
    """The first may be on its way. Fails when: the first goes, the last goes, or one with a file of its own goes."""
    queue = tmp_path / "hub_queue"
    for number in range(WAITING_MOST + 4):
        names = ["config.json", *(["only-here.txt"] if number == 2 else [])]
        add_job(queue, Job("a/b", f"{number}"), "x", lambda folder, names=names: [(folder / name).write_bytes(b"") for name in names])
    left_out = leave_out_replaced(queue)
    assert [job.message for job in left_out] == ["1", "3", "4", "5"]
    assert [job.message for job in list_jobs(queue)] == ["0", "2", "6", "7"]
    assert leave_out_replaced(queue) == []


def test_a_commit_that_can_not_be_written_leaves_the_queue_as_it_was(tmp_path: Path) -> None:
    """Fails when: a half-filled folder gets its final name, or stays under another."""

    def full(folder: Path) -> None:
        (folder / "config.json").write_bytes(b"{}")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        add_job(tmp_path / "hub_queue", Job("a/b", "1"), "x", full)
    assert list((tmp_path / "hub_queue").iterdir()) == []


class Killed(BaseException):
    """The end of the process, at any call."""


class MortalApi:
    """The client, in a process that is killed now and then: before a call, or after it when nobody heard its answer."""

    def __init__(self, api: Any, chance: Callable[[], float]) -> None:
        self._api, self._chance = api, chance

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)
        if not callable(method):
            return method

        def call(*arguments: Any, **settings: Any) -> Any:
            fate = self._chance()
            if fate < 0.05:
                raise Killed
            answer = method(*arguments, **settings)
            if fate > 0.93:
                raise Killed
            return answer

        return call


@pytest.mark.slow
def test_after_any_sequence_of_faults_the_right_files_are_there_and_each_commit_once(
    hub: Any, api: Any, tally: Any, count: Any, tmp_path: Path
) -> None:
    """Four commits, up to twelve faults of every kind at random requests, kills at random calls; the queue is all that
    survives a kill. Fails when: a commit isn't looked for before it is made, or leaves the queue before it is made."""
    line = tally("Hub", "four commits, up to 12 faults at random requests, kills at random calls: each commit once, right files")
    kills = faults = 0
    for trial in range(count(100, 1000)):
        with line.trial(trial):
            killed, failed = _one_sequence(hub, api, random.Random(trial), f"alice/model-{trial}", tmp_path / f"queue-{trial}")
            kills, faults = kills + killed, faults + failed
        line.measured = f"{faults:,} faults, {kills:,} kills"
    line.check()
    assert kills > line.tried
    assert faults > line.tried


def _one_sequence(hub: Any, api: Any, numbers: random.Random, name: str, queue: Path) -> tuple[int, int]:
    """Kills and faults of it."""
    hub.make(name, files={"mine.txt": b"kept"})
    hub.faults.clear()
    expected, kills = {"mine.txt": b"kept"}, 0
    for step in range(1, 5):
        files = {"config.json": b"{}", "model.safetensors": numbers.randbytes(300), "README.md": f"step {step}".encode()}
        if numbers.random() < 0.5:
            files |= {f"last-checkpoint/{each}": numbers.randbytes(50) for each in ("MANIFEST.json", "model.safetensors", f"{step}.json")}
            expected = {path: content for path, content in expected.items() if not path.startswith("last-checkpoint/")}
        expected |= files

        def fill(folder: Path, files: dict[str, bytes] = files) -> None:
            for path, content in files.items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_bytes(content)

        add_job(queue, Job(name, f"step {step}"), f"step-{step}", fill)
    for _ in range(numbers.randrange(12)):
        method, path = numbers.choice(list(PLACES.values()))
        status = numbers.choice([401, 403, 409, 412, 429, 500, 502, 503, DROP, DROP_AFTER, DROP_AFTER])
        hub.fail(method, path.replace("alice/model", name), status, times=numbers.choice([1, 1, 2, 7]))
    planned = sum(fault.times for fault in hub.faults)
    for _ in range(200):
        try:
            send_all(MortalApi(api, numbers.random), queue, tries=3)
            break
        except Killed:
            kills += 1
        except CannotSend:
            pass
    assert hub.files(name) == expected
    assert hub.titles(name) == [f"step {step}" for step in range(1, 5)]
    assert list_jobs(queue) == []
    return kills, planned - sum(fault.times for fault in hub.faults)

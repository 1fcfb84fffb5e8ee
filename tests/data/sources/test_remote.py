"""Data files by URL: the rows of the local files, read in place or downloaded once, over a real HTTP server that fails."""

import contextlib
import gzip
import importlib.util
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import aiohttp
import datasets
import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem

from tests.loopback import LoopbackServer
from toolkit.config import DataConfig, Refusal
from toolkit.data.sources import readers, remote
from toolkit.data.sources.load import describe_source, load_splits
from toolkit.runs.provenance import digest_of_source, digests_of_files

pytestmark = pytest.mark.warm

ROWS = [{"text": f"row {number}", "label": number % 3} for number in range(40)]


@pytest.fixture(autouse=True)
def _own_cache_and_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.01, 0.01))
    remote.files_at.cache_clear()
    yield
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]


class Server:
    """Files over HTTP. `fails`: how many of the next reads break off in the middle. `ranges`: "bytes"; without any the header's
    value, which may be empty. `pause`: seconds in the middle of a read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fails, self.reads, self.ranges, self.pause = folder, 0, 0, "bytes", 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, with_body: bool) -> None:
                path = server.folder / self.path.lstrip("/")
                if not path.is_file():
                    self.send_response(404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                content = path.read_bytes()
                wanted = self.headers.get("Range") if server.ranges == "bytes" else None
                first, _, last = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
                part = content[int(first) : int(last) + 1 if last else None]
                self.send_response(206 if wanted else 200)
                if server.ranges:
                    self.send_header("Accept-Ranges", server.ranges)
                self.send_header("ETag", str(hash(content)))
                self.send_header("Content-Length", str(len(part)))
                if wanted:
                    self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
                self.end_headers()
                if with_body:
                    server.reads += 1
                    if (wanted or server.ranges != "bytes") and server.fails:
                        server.fails -= 1
                        self.wfile.write(part[: len(part) // 2])
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    with contextlib.suppress(ConnectionError):  # a client that wanted a part of it
                        self.wfile.write(part[:100])
                        time.sleep(server.pause)
                        self.wfile.write(part[100:])

            def log_message(self, *_: Any) -> None:
                pass

        self.http = LoopbackServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    started = Server(tmp_path / "served")
    yield started
    started.http.shutdown()
    started.http.server_close()


def lines(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def load(dataset: str, **settings: Any) -> Any:
    return load_splits(DataConfig(dataset=dataset, eval_fraction=0.0, **settings))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.arrow", "rows.csv"])
def test_a_file_by_url_has_the_rows_of_the_local_one(name: str, streaming: bool, server: Server, tmp_path: Path) -> None:
    """Origins too. Fails when: a compressed or columnar file is opened by its path alone."""
    table, path = datasets.Dataset.from_list(ROWS), server.folder / name
    if name.endswith(".csv"):
        table.to_csv(path)
    elif name.endswith(".parquet"):
        table.to_parquet(path)
    elif name.endswith(".arrow"):
        table.save_to_disk(tmp_path / "saved")
        path.write_bytes(next((tmp_path / "saved").glob("*.arrow")).read_bytes())
    else:
        path.write_bytes(gzip.compress(lines()) if name.endswith(".gz") else lines())
    of_url, local = load(f"{server.url}/{name}", streaming=streaming)["train"], load(str(path), streaming=streaming)["train"]
    assert [row["text"] for row in of_url] == [row["text"] for row in ROWS]
    assert [row["origin"].rpartition("/")[2] for row in of_url] == [row["origin"].rpartition("/")[2] for row in local]


def test_the_files_of_a_remote_folder_go_to_their_splits() -> None:
    """Fails when: hidden files count, or names are matched with the folders above the given one."""
    store = fsspec.filesystem("memory")
    for name in ("test/data/train-00.jsonl", "test/data/train-01.jsonl", "test/data/validation.jsonl", "test/data/.hidden.jsonl"):
        store.pipe(f"/{name}", lines([{"text": name}] * 3))
    splits = load("memory://test/data")
    assert {name: rows["text"] for name, rows in splits.items()} == {
        "train": ["test/data/train-00.jsonl"] * 3 + ["test/data/train-01.jsonl"] * 3, "validation": ["test/data/validation.jsonl"] * 3,
    }  # fmt: skip
    assert splits["train"]["origin"][0] == "data/train-00.jsonl:1"
    assert describe_source("memory://test/data") == "memory://test/data: 3 remote file(s)"
    assert len(load("memory://test/data/train-*.jsonl")["train"]) == 6


def test_a_read_that_breaks_off_is_tried_again_and_gives_the_same_rows(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures of each kind of reading. Fails when: a read after a failure goes on where the failed one stopped, or is not made."""
    monkeypatch.setattr(remote, "BLOCK", 256)
    (server.folder / "rows.jsonl").write_bytes(lines())
    for streaming in (False, True):
        server.fails = 2
        assert [row["text"] for row in load(f"{server.url}/rows.jsonl", streaming=streaming)["train"]] == [row["text"] for row in ROWS]
        assert server.fails == 0


@pytest.mark.parametrize("header", ["", "none"])
def test_a_server_without_ranges_gives_the_same_rows(header: str, server: Server) -> None:
    """8 MB, of which fsspec takes 5 at a time: downloaded, streamed, and resumed in the middle, with reads that break off.
    Fails when: `ValueError` is passed on, what is before the place is not skipped, or a stream that broke off is read on."""
    rows = [{"text": f"{number} {'x' * 200_000}"} for number in range(40)]
    (server.folder / "rows.jsonl").write_bytes(lines(rows))
    server.ranges, url = header, f"{server.url}/rows.jsonl"
    stream = load(url, streaming=True)["train"]
    read = iter(stream)
    assert [next(read)["text"] for _ in range(33)] == [row["text"] for row in rows[:33]]
    state, again = stream.state_dict(), load(url, streaming=True)["train"]
    server.fails = 2
    assert [row["text"] for row in read] == [row["text"] for row in rows[33:]]
    server.fails = 2
    again.load_state_dict(state)
    assert [row["text"] for row in again] == [row["text"] for row in rows[33:]]
    assert server.fails == 0
    server.fails = 2
    assert load(url)["train"]["text"] == [row["text"] for row in rows]
    assert server.fails == 0


def test_what_the_user_configures_for_http_goes_for_https_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fsspec has it. Fails when: one protocol's settings alone are put next to the time that is waited."""
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"trust_env": True}})
    for scheme in ("http", "https"):
        found = remote._store_of(f"{scheme}://127.0.0.1/rows.jsonl")[0].client_kwargs
        assert (found["trust_env"], found["timeout"].total, found["timeout"].sock_read) == (True, None, 300)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_that_takes_longer_than_the_client_waits_for_whole_answers_comes(
    streaming: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server without ranges. Fails when: _options_for in remote.py is not handed on, or gives an answer a time in all."""
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    HTTPFileSystem.clear_instance_cache()
    (server.folder / "rows.jsonl").write_bytes(lines())
    server.ranges, server.pause = "", 0.6
    assert [row["text"] for row in load(f"{server.url}/rows.jsonl", streaming=streaming)["train"]] == [row["text"] for row in ROWS]


def test_a_resumed_stream_opens_the_file_it_was_in_and_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the rows of the stream that went on. Fails when: all files are one source, which is read again from the first."""
    for number in range(4):
        rows = [{"text": f"file {number}, row {row}"} for row in range(100)]
        fsspec.filesystem("memory").pipe(f"/data/train-{number}.jsonl", lines(rows))
    first = load("memory://data", streaming=True)["train"]
    rows = iter(first)
    for _ in range(250):
        next(rows)
    state, rest = first.state_dict(), [row["text"] for row in rows]
    opened: list[str] = []
    monkeypatch.setattr(readers, "open_url", lambda url: (opened.append(url), remote.open_url(url))[1])
    again = load("memory://data", streaming=True)["train"]
    again.load_state_dict(state)
    assert [row["text"] for row in again] == rest
    assert [url.rpartition("/")[2] for url in opened] == ["train-2.jsonl", "train-3.jsonl"]


def test_a_store_that_stays_away_ends_with_one_message_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """Fails when: an exception of the store's package comes through, or half of a file stays in the cache."""
    (server.folder / "rows.jsonl").write_bytes(lines())
    server.fails = 1000
    with pytest.raises(Refusal, match=r"^--dataset .*rows\.jsonl"):
        load(f"{server.url}/rows.jsonl")
    assert not list((tmp_path / "cache").glob("remote-*[!k]"))
    with pytest.raises(Refusal, match=r"rows\.jsonl"):
        list(load(f"{server.url}/rows.jsonl", streaming=True)["train"])


def test_a_download_is_made_once_for_what_the_store_holds(server: Server) -> None:
    """Fails when: the copy of other content is taken, or each start downloads again."""
    (server.folder / "rows.jsonl").write_bytes(lines())
    load(f"{server.url}/rows.jsonl")
    before = server.reads
    assert load(f"{server.url}/rows.jsonl")["train"]["text"][0] == "row 0"
    assert server.reads == before
    (server.folder / "rows.jsonl").write_bytes(lines([{"text": "row a", "label": 0}] * 40))
    assert load(f"{server.url}/rows.jsonl")["train"]["text"][0] == "row a"


def test_a_card_has_a_digest_of_files_by_url_that_changes_with_them(server: Server) -> None:
    """Fails when: a URL is passed over, or its text alone counts."""
    url = f"{server.url}/rows.jsonl"
    (server.folder / "rows.jsonl").write_bytes(lines())
    before = digests_of_files(f"{url}:0.5,stdlib:sft:0.5", None)
    assert before == {url: digest_of_source(url)}
    (server.folder / "rows.jsonl").write_bytes(lines([{"text": "row a", "label": 0}] * 40))
    assert digest_of_source(url) != before[url]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://nothing/here", "FileNotFoundError"),
        ("memory://odd/none-*.jsonl", "nothing is there"),
        ("gopher://host/rows.jsonl", "Protocol not known: gopher"),
        ("memory://odd/rows.xyz", "no data files there"),
        ("http://127.0.0.1:9/rows.jsonl", "Cannot connect"),
        ("s3://bucket/rows.jsonl", "pip install s3fs"),
    ],
)
def test_what_cannot_be_read_is_refused(url: str, said: str) -> None:
    """Fails when: one of them ends in the store's own exception."""
    if url.startswith("s3:") and importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    fsspec.filesystem("memory").pipe("/odd/rows.xyz", b"?")
    with pytest.raises(Refusal) as refused:
        load(url)
    assert said in str(refused.value)
    assert url in str(refused.value)


def test_a_store_that_does_not_answer_is_named_while_the_read_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, in the middle of the read, which then goes on; a read that is answered in time has none.

    Fails when: nobody watches a read; the line comes although it was answered.
    """
    said, answered = threading.Event(), list[str]()
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(remote, "say", lambda text, error: (answered.append(text), said.set()))

    class Slow(io.BytesIO):
        def read(self, size: int = -1) -> bytes:
            assert said.wait(60)
            return super().read(size)

    assert remote._Retried(lambda: io.BytesIO(b"quick"), "s3://bucket/quick").read() == b"quick"
    assert remote._Retried(lambda: Slow(b"slow"), "s3://bucket/slow").read(4) == b"slow"
    assert len(answered) == 1
    assert "s3://bucket/slow" in answered[0]

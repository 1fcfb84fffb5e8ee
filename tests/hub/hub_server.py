"""A Hub on loopback: as much of its HTTP interface as the real client needs for models, and to read datasets; faults on demand.

    with Hub() as hub:             # hub.url is the HF_ENDPOINT
        hub.make("datasets/alice/rows", files={"train.jsonl": b"..."})
        hub.fail("POST", "/commit/", 503, times=2)

A fault is an answer with a status, or a dropped connection: DROP before the request has an effect, DROP_AFTER when it had it.
"""

import base64
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from card_rules import problems_of_card

from tests.loopback import LoopbackServer

DROP, DROP_AFTER = -1, -2
TOKENS = {"hf_write": ("alice", "write"), "hf_read": ("bob", "read")}
STORED_LARGE = (".safetensors", ".bin")


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit; a large one is stored apart and known by its SHA-256, a small one by git's SHA-1."""

    content: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        if self.is_large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    """What a commit made of its parent."""

    sha: str
    files: dict[str, StoredFile]
    title: str
    description: str
    parent: str | None


@dataclass
class Repository:
    """A model repository: its commits, and the branches that name the newest ones."""

    name: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, files: dict[str, StoredFile], title: str, description: str, branch: str) -> str:
        sha = secrets.token_hex(20)
        self.commits[sha] = Commit(sha, files, title, description, self.branches.get(branch))
        self.branches[branch] = sha
        return sha

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.branches.get(revision, revision))

    def history(self, revision: str = "main") -> list[Commit]:
        """Newest first."""
        found, commit = [], self.at(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits.get(commit.parent or "")
        return found


@dataclass
class Fault:
    """So many requests of this method and path are answered so, after `delay` seconds."""

    method: str
    path: re.Pattern[str]
    status: int
    times: int
    delay: float
    headers: dict[str, str]


class Hub:
    """The server. `requests` is all that it received: (method, path, headers without the token, body)."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens = dict(TOKENS)
        self.large: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.lock = threading.RLock()
        self.httpd = LoopbackServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()

    def fail(
        self, method: str, path: str, status: int, times: int = 1, delay: float = 0.0, headers: dict[str, str] | None = None
    ) -> None:
        """Let the next requests that match fail; method "*" is any."""
        self.faults.append(Fault(method, re.compile(path), status, times, delay, headers or {}))

    def make(self, name: str, private: bool = False, files: dict[str, bytes] | None = None) -> Repository:
        repository = self.repositories[name] = Repository(name, private)
        repository.add({k: StoredFile(v, k.endswith(STORED_LARGE)) for k, v in (files or {}).items()}, "initial commit", "", "main")
        return repository

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.repositories[name].at(revision)
        assert commit is not None
        return {path: file.content for path, file in commit.files.items()}

    def titles(self, name: str, revision: str = "main") -> list[str]:
        """Of the commits, oldest first, without the initial one."""
        return [commit.title for commit in reversed(self.repositories[name].history(revision))][1:]

    def count(self, method: str, path: str) -> int:
        return sum(1 for seen, where, *_ in self.requests if seen == method and re.search(path, where))


class Refused(Exception):
    """An answer that is an error: status, message, and the code by which the client chooses its exception."""


class Handler(BaseHTTPRequestHandler):
    """One request: a fault, or the route that fits."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments: Any) -> None:
        pass

    def answer(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def drop(self) -> None:
        self.close_connection = True
        self.connection.close()

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "authorization"}
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path, headers, self.body))
            fault = next((f for f in self.hub.faults if f.times > 0 and f.method in ("*", self.command) and f.path.search(self.path)), None)
            if fault:
                fault.times -= 1
        if fault:
            time.sleep(fault.delay)
            if fault.status == DROP:
                return self.drop()
            if fault.status > 0:
                said = f"injected {fault.status}"
                return self.answer(fault.status, {"error": said}, {"X-Error-Message": said, **fault.headers})
        try:
            with self.hub.lock:
                answered = self.act()
        except Refused as refused:
            status, message, code = refused.args
            return self.answer(status, {"error": message}, {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})})
        if fault and fault.status == DROP_AFTER:
            return self.drop()
        if answered is not None:
            self.answer(*answered)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def act(self) -> tuple[int, Any] | None:
        address = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(address.query).items()}
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
        if token and token not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header", None)
        self.user, self.role = self.hub.tokens.get(token, (None, None))
        for method, pattern, route in ROUTES:
            found = re.fullmatch(pattern, address.path)
            if found and method == self.command:
                return route(self, *(unquote(group) for group in found.groups() if group is not None))
        raise Refused(404, f"no route for {self.command} {address.path}", None)

    def repository(self, name: str, write: bool = False) -> Repository:
        repository = self.hub.repositories.get(name)
        owns = self.user == name.removeprefix("datasets/").split("/")[0]
        if repository is None or (repository.private and not owns):
            raise Refused(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and not (owns and self.role == "write"):
            raise Refused(403 if self.user else 401, "Forbidden: pass a token with write access", None)
        return repository

    def commit_of(self, repository: Repository, revision: str) -> Commit:
        commit = repository.at(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit


def whoami(request: Handler) -> tuple[int, Any]:
    if not request.user:
        raise Refused(401, "Invalid username or password.", None)
    token = {"role": request.role, "displayName": "test"}
    return 200, {"type": "user", "name": request.user, "orgs": [], "auth": {"accessToken": token}}


def create(request: Handler) -> tuple[int, Any]:
    asked = json.loads(request.body)
    owner = asked.get("organization") or request.user
    if request.role != "write" or owner != request.user:
        raise Refused(403 if request.user else 401, f'You don\'t have the rights to create a model under the namespace "{owner}"', None)
    name = f"{owner}/{asked['name']}"
    if name in request.hub.repositories:
        return 409, {"error": "You already created this model repo", "url": f"{request.hub.url}/{name}"}
    request.hub.make(name, asked.get("visibility") == "private" or asked.get("private") is True)
    return 200, {"url": f"{request.hub.url}/{name}", "id": name}


def may_write(request: Handler, name: str) -> tuple[int, Any]:
    request.repository(name, write=True)
    return 200, {}


def info(request: Handler, name: str, revision: str = "main") -> tuple[int, Any]:
    repository = request.repository(name)
    commit = request.commit_of(repository, revision)
    dates = {"lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z"}
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    card = commit.files.get("README.md")
    license = re.search(rb"^license: (\S+)$", card.content if card else b"", re.MULTILINE)
    return 200, {
        "_id": name, "id": name, "modelId": name, "sha": commit.sha, "private": repository.private, "author": name.split("/")[0],
        "tags": [], "downloads": 0, "likes": 0, "gated": False, "disabled": False, "siblings": siblings, **dates,
        "cardData": {"license": license[1].decode()} if license else {},
    }  # fmt: skip


def tree(request: Handler, name: str, revision: str) -> tuple[int, Any]:
    entries = []
    for path, file in sorted(request.commit_of(request.repository(name), revision).files.items()):
        entry = {"type": "file", "path": path, "size": len(file.content), "oid": file.oid[:40]}
        large = {"lfs": {"oid": file.oid, "size": len(file.content), "pointerSize": 134}} if file.is_large else {}
        entries.append({**entry, **large})
    return 200, entries


def paths_info(request: Handler, name: str, revision: str) -> tuple[int, Any]:
    form = request.body.decode()
    asked = json.loads(form)["paths"] if form.startswith("{") else parse_qs(form).get("paths", [])
    return 200, [entry for entry in tree(request, name, revision)[1] if entry["path"] in asked]


def download(request: Handler, name: str, revision: str, path: str) -> None:
    """A file, or the part of it that the header Range asks for; answers by itself."""
    commit = request.commit_of(request.repository(name), revision)
    of_commit = {"X-Repo-Commit": commit.sha}
    file = commit.files.get(path)
    if file is None:
        said = {**of_commit, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
        return request.answer(404, {"error": "Entry not found"}, said)
    headers = {**of_commit, "ETag": f'"{file.oid}"', "Content-Type": "application/octet-stream"}
    if file.is_large:
        headers |= {"X-Linked-Etag": f'"{file.oid}"', "X-Linked-Size": str(len(file.content))}
    part = re.match(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
    if part is None:
        return request.answer(200, file.content, headers)
    first, last = int(part[1]), min(int(part[2] or len(file.content) - 1), len(file.content) - 1)
    range_ = {"Content-Range": f"bytes {first}-{last}/{len(file.content)}"}
    return request.answer(206, file.content[first : last + 1], {**headers, **range_})


def history(request: Handler, name: str, revision: str) -> tuple[int, Any]:
    repository = request.repository(name)
    request.commit_of(repository, revision)
    shown = {"authors": [{"user": name.split("/")[0]}], "date": "2026-01-01T00:00:00.000Z"}
    return 200, [{"id": c.sha, "title": c.title, "message": c.description, **shown} for c in repository.history(revision)]


def make_branch(request: Handler, name: str, branch: str) -> tuple[int, Any]:
    repository = request.repository(name, write=True)
    if branch in repository.branches:
        raise Refused(409, f"Reference already exists: {branch}", None)
    start = json.loads(request.body or b"{}").get("startingPoint") or "main"
    repository.branches[branch] = request.commit_of(repository, start).sha
    return 200, {}


def preupload(request: Handler, name: str, revision: str) -> tuple[int, Any]:
    there = request.commit_of(request.repository(name, write=True), revision).files
    answers = []
    for asked in json.loads(request.body)["files"]:
        mode = "lfs" if asked["path"].endswith(STORED_LARGE) else "regular"
        oid = there[asked["path"]].oid if asked["path"] in there else None
        answers.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return 200, {"files": answers}


def validate_card(request: Handler) -> tuple[int, Any]:
    problems = problems_of_card(json.loads(request.body)["content"])
    return (400 if problems else 200), {"errors": [{"message": each} for each in problems], "warnings": []}


def large_batch(request: Handler, name: str) -> tuple[int, Any]:
    request.repository(name, write=True)
    answers = []
    for asked in json.loads(request.body)["objects"]:
        upload = {"upload": {"href": f"{request.hub.url}/_large/{asked['oid']}", "header": {}}}
        missing = asked["oid"] not in request.hub.large
        answers.append({"oid": asked["oid"], "size": asked["size"], **({"actions": upload} if missing else {})})
    return 200, {"transfer": "basic", "objects": answers}


def put_large(request: Handler, oid: str) -> tuple[int, Any]:
    if hashlib.sha256(request.body).hexdigest() != oid:
        raise Refused(400, "not the bytes that were promised", None)
    request.hub.large[oid] = request.body
    return 200, {}


def commit(request: Handler, name: str, branch: str) -> tuple[int, Any]:
    repository = request.repository(name, write=True)
    before = request.commit_of(repository, branch)
    files, header = dict(before.files), {}
    for line in request.body.splitlines():
        part = json.loads(line)
        value = part["value"]
        if part["key"] == "header":
            header = value
            if value.get("parentCommit") not in (None, before.sha):
                raise Refused(412, "A commit has happened since. Please refresh and try again.", None)
        elif part["key"] == "file":
            files[value["path"]] = StoredFile(base64.b64decode(value["content"]), is_large=False)
            if value["path"] == "README.md" and (problems := problems_of_card(files["README.md"].content.decode())):
                raise Refused(400, f"Invalid metadata in README.md: {'; '.join(problems)}", None)
        elif part["key"] == "lfsFile":
            if value["oid"] not in request.hub.large:
                raise Refused(400, f"{value['oid']} was not uploaded", None)
            files[value["path"]] = StoredFile(request.hub.large[value["oid"]], is_large=True)
        elif part["key"] == "deletedFile":
            del files[value["path"]]
    sha = repository.add(files, header["summary"], header.get("description", ""), branch)
    return 200, {"success": True, "commitOid": sha, "commitUrl": f"{request.hub.url}/{name}/commit/{sha}", "hookOutput": ""}


_NAME, _PART = "([^/]+/[^/]+)", "([^/]+)"
_MODEL, _ANY = f"/api/models/{_NAME}", "/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", validate_card),
    ("GET", f"{_MODEL}/auth-check/write", may_write),
    ("GET", _ANY, info),
    ("GET", f"{_ANY}/revision/{_PART}", info),
    ("GET", f"{_ANY}/tree/{_PART}(?:/.*)?", tree),
    ("POST", f"{_ANY}/paths-info/{_PART}", paths_info),
    ("GET", f"/((?:datasets/)?[^/]+/[^/]+)/resolve/{_PART}/(.+)", download),
    ("HEAD", f"/((?:datasets/)?[^/]+/[^/]+)/resolve/{_PART}/(.+)", download),
    ("GET", f"{_MODEL}/commits/{_PART}", history),
    ("POST", f"{_MODEL}/branch/{_PART}", make_branch),
    ("POST", f"{_MODEL}/preupload/{_PART}", preupload),
    ("POST", f"{_MODEL}/commit/{_PART}", commit),
    ("POST", f"/{_NAME}\\.git/info/lfs/objects/batch", large_batch),
    ("PUT", f"/_large/{_PART}", put_large),
]

"""Data files elsewhere, by URL (`s3://`, `gs://`, `hf://`, `https://` ...), through fsspec.

A stream reads them where they are. Else each is downloaded once, into the verified cache, under its store's metadata of it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.config import Refusal
from toolkit.system.console import first_line, say
from toolkit.system.progress import progress

STALL_SECONDS = 60.0  # without an answer before a line is printed: a store's own timeouts may add up to half an hour
WAITS = (1.0, 4.0, 16.0)  # seconds before a read that failed is tried again
BLOCK = 1 << 20  # bytes read at a time


def is_url(source: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", source) is not None


@functools.cache
def files_at(url: str) -> tuple[str, ...]:
    """The URLs of all files that a pattern matches or that are below a folder, sorted; a file's own where it is one.

    Raises:
        Refusal: nothing is there, no access, a store that can't be reached or whose package is not installed.
    """
    store, path = _store_of(url)
    try:
        if "*" in path:
            found = store.glob(path)
        elif store.exists(path):
            is_file = bool(Path(path).suffix) and store.isfile(path)
            found = [path] if is_file else store.find(path)
        else:
            found = [store.info(path)["name"]]  # it raises the reason where there is nothing
    except Exception as error:  # of any store's package: they have no class in common
        raise Refusal(f"--dataset {url}: {_reason(error.__cause__ or error)}") from None
    if not found:
        raise Refusal(f"--dataset {url}: nothing is there, or this login can't see it.")
    return tuple(sorted(store.unstrip_protocol(name) for name in found))


def open_url(url: str) -> BinaryIO:
    """A file to read. A read that fails is tried again three times, over 21 seconds.

    Raises:
        OSError: it can't be opened, or, later, read.
    """
    store, path = _store_of(url)
    try:
        with _stalls_are_said(url):
            return io.BufferedReader(_Retried(functools.partial(store.open, path, "rb"), url), BLOCK)
    except Exception as error:
        raise OSError(_reason(error)) from error


def description_of(url: str) -> str:
    """The store's metadata of a file, which changes with its content: its size, time, ETag or the like, as JSON.

    Raises:
        Refusal: it is not there, or the store can't be reached.
    """
    store, path = _store_of(url)
    try:
        return json.dumps(store.info(path), sort_keys=True, default=str)
    except Exception as error:
        raise Refusal(f"--dataset {url}: {_reason(error)}") from None


def download(url: str) -> Path:
    """A local copy in the cache, made once for a file's description."""
    from toolkit.cache.arrow import cache_folder  # with pyarrow

    about, name = description_of(url), url.rpartition("/")[2]

    def build(folder: Path) -> None:
        size = json.loads(about).get("size")
        try:
            bar = progress(f"Downloading {name}", "B", size)
            with open_url(url) as source, open(folder / name, "wb") as target, bar as add:
                while block := source.read(BLOCK):
                    add(target.write(block))
        except OSError as error:
            if error.filename is not None:  # of the local copy
                raise
            raise Refusal(f"--dataset {url}: {error}") from None

    return cache_folder(f"remote-{hashlib.sha256(f'{url} {about}'.encode()).hexdigest()[:24]}", build) / name


class _Retried(io.RawIOBase):
    """A store's file whose reads are tried again.

    A server may give files from their beginning only (HTTP without ranges): then what is before the place is read again.
    """

    def __init__(self, open_file: Callable[..., Any], url: str) -> None:
        self._open, self._url, self._place = open_file, url, 0
        self._file, self._is_broken = open_file(), False
        self._in_order = not self._file.seekable() or getattr(self._file, "size", 0) is None  # so is fsspec's stream of HTTP

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 2 and self._in_order:
            raise OSError(f"{self._url}: this server gives files from their beginning only. Leave out --streaming")
        self._place = int(self._file.seek(offset, 2)) if whence == 2 else offset + (self._place if whence else 0)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        block = self._again(len(buffer))
        buffer[: len(block)] = block
        self._place += len(block)
        return len(block)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _again(self, size: int) -> bytes:
        for wait in (*WAITS, None):
            try:
                with _stalls_are_said(self._url):
                    return self._read(size)
            except Exception as error:
                if wait is None:
                    raise OSError(f"{self._url}: {_reason(error)}") from error
                say(f"{self._url}: {_reason(error)}; tried again in {wait:g} s", error=True)
                time.sleep(wait)
        raise AssertionError

    def _read(self, size: int) -> bytes:
        if not self._in_order:
            self._file.seek(self._place)
            try:
                return bytes(self._file.read(size))
            except ValueError:  # fsspec (2026.9): the server has answered a range with the whole file
                if type(self._file).__name__ != "HTTPFile":
                    raise
                self._in_order = self._is_broken = True
        begins_again = self._is_broken or self._file.tell() > self._place
        self._is_broken = True  # unless this ends well: a file that is closed looks like one at its end
        if begins_again:
            self._file.close()
            self._file = self._open(block_size=0)
        while (before := self._place - self._file.tell()) > 0 and self._file.read(min(before, BLOCK)):
            pass
        block = bytes(self._file.read(size))
        self._is_broken = False
        return block


@contextmanager
def _stalls_are_said(url: str) -> Iterator[None]:
    line = f"{url}: no answer for {STALL_SECONDS:g} s; still waiting for the store"
    timer = threading.Timer(STALL_SECONDS, say, (line,), {"error": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _store_of(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.url_to_fs(url, **_options_for(url))
    except ImportError as error:  # its message names the package: "Install s3fs to access S3"
        package = re.search(r"nstall [`'\"]?([\w-]+)", str(error))
        install = f". Type: pip install {package[1]}" if package else ""
        raise Refusal(f"--dataset {url}: needs a package that is not installed: {_reason(error)}{install}") from None
    except ValueError as error:
        raise Refusal(f"--dataset {url}: {_reason(error)}. Known are s3://, gs://, az://, hf://, https:// and others") from None
    except Exception as error:  # a login that is looked for at once
        raise Refusal(f"--dataset {url}: {_reason(error)}") from None


def _options_for(url: str) -> dict[str, Any]:
    """aiohttp (3.14) gives a whole answer five minutes: a file that takes longer never came from a server without ranges. Here
    it is five minutes without a byte, unless the user's configuration of fsspec has another timeout."""
    protocols = ("http", "https")  # fsspec takes the configuration of both for either
    if url.partition("://")[0] not in protocols:
        return {}
    try:
        from aiohttp import ClientTimeout
    except ImportError:  # which fsspec says itself
        return {}
    from fsspec.config import conf

    options = {"timeout": ClientTimeout(sock_connect=30, sock_read=300)}
    for protocol in protocols:
        options |= conf.get(protocol, {}).get("client_kwargs", {})
    return {"client_kwargs": options}


def _reason(error: BaseException) -> str:
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"

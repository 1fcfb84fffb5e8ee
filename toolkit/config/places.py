"""Paths that are to be written: what keeps a file or a directory from being made there, found before any work is done."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from toolkit.config.setting import Refusal

LONGEST_PATH = 3800  # bytes: of the 4,096 that Linux takes, files in the directory need some
LONGEST_NAME = 240  # bytes: of the 255 that Linux takes, temporary names next to it need some


def place_to_write(path: str | Path, shown: str, *, is_file: bool = False) -> Path:
    """The path with a leading ~ as the home directory, once it is clear that it can be written.

    Nothing is left behind: an empty directory is made next to it and removed. `shown` begins the messages, such as `--into`.

    Raises:
        Refusal: as `check_place`, or no such user, a name that is no text, or the disk lets nobody write there.
    """
    place = Path(os.path.expanduser(path))
    if str(place).startswith("~"):
        user = str(place).partition("/")[0]
        raise Refusal(f"{shown} {path}: there is no user {user[1:]!r}. For a folder of that name: ./{path}")
    try:
        str(place).encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{shown}: character {error.start + 1} is not Unicode text. Take a name in UTF-8.") from None
    parent = check_place(place, shown, is_file=is_file)
    try:
        if not (is_file and place.exists()):
            os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=parent))
    except OSError as error:  # such as /proc, or a disk that is mounted to be read
        raise unwritable(place, shown, error) from None
    return place


def check_place(place: Path, shown: str, *, is_file: bool = False) -> Path:
    """The nearest folder that is there, of a place that can be written as far as one can see; writes nothing.

    Raises:
        Refusal: a file in place of a directory or the reverse, a link to nothing, a name too long, no permission.
    """
    try:
        if is_file and place.is_dir():
            raise Refusal(f"{shown} {place}: is a folder, not a file. Name a file in it.")
        if not is_file and place.exists() and not place.is_dir():
            raise Refusal(f"{shown} {place}: is a file, not a directory.")
        for each in (place, *place.absolute().parents):
            if each.is_symlink() and not each.exists():
                raise Refusal(f"{shown} {place}: {each} is a link to {os.readlink(each)}, where nothing is.")
        above = place.absolute().parents
        parent = next(each for each in ((*above,) if is_file else (place, *above)) if each.exists())
        if not parent.is_dir():
            raise Refusal(f"{shown} {place}: {parent} is a file, not a directory.")
        longest = max(len(os.fsencode(part)) for part in ("", *place.parts))
        if len(os.fsencode(place.absolute())) > LONGEST_PATH or longest > LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        writable = os.access(place if is_file and place.exists() else parent, os.W_OK)
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise unwritable(place, shown, error) from None
    if not writable:
        raise Refusal(f"{shown} {place}: no permission to write in {parent}.")
    return parent


def unwritable(place: Path, shown: str, error: Exception) -> Refusal:
    """The message for a place that the operating system refuses."""
    name = str(place) if len(str(place)) <= 100 else f"{str(place)[:100]}..."
    return Refusal(f"{shown} {name}: can't be written ({getattr(error, 'strerror', None) or error}). Take another {shown}.")

"""What of this machine a run depends on next to its settings: the toolkit's code, files that settings name."""

import contextlib
import hashlib
import os
from pathlib import Path

from toolkit.config import Refusal
from toolkit.data.sources.find_files import find_files
from toolkit.data.sources.mixtures import as_mixture
from toolkit.data.sources.remote import description_of, files_at, is_url
from toolkit.system.digests import add_file, code_digest
from toolkit.system.environment import git_commit


def toolkit_identity() -> dict[str, str | None]:
    """Version, `code_digest`, and the git commit where a clone is what runs."""
    import toolkit

    folder = Path(toolkit.__file__).resolve().parents[1]
    is_clone = (folder / ".git").exists()  # else a clone of something else may lie around the environment
    return {"version": toolkit.__version__, "sha256": code_digest(), "commit": git_commit(folder) if is_clone else None}


def digests_of_files(dataset: str | None, *others: str | None) -> dict[str, str]:
    """By name: digests of the files of a dataset, or of the parts of a mixture, and of single other files."""
    names = [name for name in others if name]
    if dataset:
        with contextlib.suppress(Refusal):  # a recipe may read its data in a way of its own
            sources = as_mixture(dataset)
            names += [dataset] if sources is None else [each.dataset for each in sources]
            names += [dataset] if Path(os.path.expanduser(dataset)).is_file() else []  # that of a mixture
    found = {}
    for name in names:
        with contextlib.suppress(Refusal, OSError):
            found[name] = digest_of_source(name)
    return {name: digest for name, digest in found.items() if digest is not None}


def digest_of_source(name: str) -> str | None:
    """SHA-256 over names, sizes and contents of the files that a file's, a folder's or a pattern's name means; None for others.

    Of a file above 16 MB 8 MB are read, as `add_file` has it. Of one by URL its store's metadata of it counts.

    Raises:
        Refusal: it looks like a path, and nothing is there; or its store can't be reached.
    """
    digest, path = hashlib.sha256(), Path(os.path.expanduser(name))
    if is_url(name):
        for url in files_at(name):
            digest.update(f"{url}\0{description_of(url)}\0".encode())
        return digest.hexdigest()
    if path.is_file():
        files = [(path.name, path)]
    else:
        splits = find_files(name)
        if splits is None:
            return None
        files = [(file.shown, Path(file.path)) for each in splits.values() for file in each]
    for shown, file in files:
        add_file(digest.update, shown, file)
    return digest.hexdigest()


def working_directory() -> str:
    """The absolute path of the working directory; the home directory's as `~`, since a card is shown to others."""
    here, home = os.getcwd(), os.path.expanduser("~").rstrip("/\\")
    inside = bool(home) and (here == home or here.startswith(home + os.sep))
    return "~" + here[len(home) :] if inside else here

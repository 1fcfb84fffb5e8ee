"""Which files a path, a folder, a pattern or a URL names, which split each belongs to, and how messages name their rows.

Rows are named by a path that is the same wherever their folder is; people are shown the path that they gave.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import is_special, parse_json, read_text_file
from toolkit.data.sources.readers import COMPRESSIONS, TEXT_READERS
from toolkit.data.sources.remote import files_at, is_url

COLUMNAR = (".parquet", ".arrow", ".feather")
# the words by which datasets, too, finds splits in file names
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ABOUT_THE_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_ENDINGS = f"{', '.join((*TEXT_READERS, *COLUMNAR))}; text also compressed as {', '.join(COMPRESSIONS)}"
_FAMILIES = (
    (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".txt",), (".conll", ".bio", ".iob"), (".parquet",),
    (".arrow", ".feather"),
)  # fmt: skip
# Of the files that this process has looked for, by the name of their rows: the path that was given; None: two have that name.
_GIVEN: dict[str, str | None] = {}


@dataclass(frozen=True)
class DataFile:
    """A file to read, and the name of its rows in messages: `<shown>:<line>`. `sample_by`: what a row of a .txt is."""

    path: str
    shown: str
    sample_by: str = "line"

    @property
    def ending(self) -> str:
        """What determines how it is read, without a compression's ending; empty where it is unknown."""
        path = self.path.partition("?")[0] if is_url(self.path) else self.path
        suffixes = [suffix.lower() for suffix in Path(path).suffixes]
        compressed = len(suffixes) > 1 and suffixes[-1] in COMPRESSIONS
        ending = suffixes[-2 if compressed else -1] if suffixes else ""
        return ending if ending in TEXT_READERS or (ending in COLUMNAR and not compressed) else ""


Splits = dict[str, list[DataFile]]


def find_files(source: str) -> Splits | None:
    """The files of each split, sorted by name; None when `source` is neither there nor looks like a path.

    A single file, and files whose names have no split, are all train. Names of folders below the given one count too.

    Raises:
        Refusal: nothing is there, or it isn't clear what belongs where.
    """
    if is_url(source):
        return _files_of_url(source)
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return _saved_to_disk(Path(path)) or _by_split(source, path, _none_missing(source, _files_below(path)))
    if os.path.isfile(path):
        return {"train": [_known(_named(path, os.path.dirname(path)))]}
    if kind := is_special(path):
        raise Refusal(f"--dataset {source}: is {kind}, and rows are read more than once. Save them as a file.")
    if os.path.islink(path):
        raise Refusal(f"--dataset {source}: is a link to {os.readlink(path)}, where nothing is.")
    if glob.has_magic(path):
        fixed = os.path.dirname(path[: re.search(r"[*?\[]", path).start()])  # type: ignore[union-attr]  # has_magic found one
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        if not found:
            raise Refusal(f"--dataset {source}: no file matches this pattern (from {os.getcwd()}).")
        return _by_split(source, fixed or ".", found)
    if _looks_like_a_path(source):
        raise Refusal(_missing(source, path))
    return None


def with_given_paths(text: str) -> str:
    """A text about rows, such as `folder/train.jsonl:7: text is empty`, with the paths that can be opened from here."""
    names = sorted((shown for shown, path in _GIVEN.items() if path), key=len, reverse=True)
    if not names:
        return text
    pattern = rf"(?<![^\s(])(?:{'|'.join(map(re.escape, names))})(?=:\d)"
    return re.sub(pattern, lambda found: _GIVEN[found[0]] or found[0], text)


def _files_of_url(url: str) -> Splits:
    """As of a local path: a single file is train, those of a folder or a pattern are of the splits in their names."""
    found, root = files_at(url), re.split(r"/(?=[^/]*[*?\[])", url.rstrip("/"))[0]
    if found == (url,):
        return {"train": [_known(_named(url, os.path.dirname(url)))]}
    inside = [name for name in found if not re.search(r"/(\.|__)", name.removeprefix(root))]
    inside = [name for name in inside if DataFile(name, "").ending and os.path.basename(name) not in _ABOUT_THE_DATA]
    if not inside:
        there = ", ".join(os.path.basename(name) for name in found[:5])
        raise Refusal(f"--dataset {url}: no data files there ({there}). Data files end in {_ENDINGS}.")
    return _by_split(url, root, inside if root != url.rstrip("/") else _none_missing(url, inside))


def _files_below(folder: str) -> list[str]:
    """Data files of a folder and its subfolders, but for hidden ones and those that describe the data."""
    found = []
    for inside, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        found += [os.path.join(inside, name) for name in names if not name.startswith(".") and name not in _ABOUT_THE_DATA]
    return [name for name in found if DataFile(name, "").ending and not is_special(name)]


def _none_missing(source: str, paths: list[str]) -> list[str]:
    """The files of a folder, refused where one of `train-00000-of-00006.parquet` ... is not among them."""
    series: dict[tuple[str, int, str], dict[int, str]] = defaultdict(dict)
    for path in paths:
        if found := re.fullmatch(r"(.*-)(\d{1,6})-of-(\d{1,6})([.-][^/\\]*)", path):
            series[found[1], int(found[3]), found[4]][int(found[2])] = path
    for (begin, count, end), numbers in series.items():
        first = int(0 not in numbers and count in numbers)  # some count from 1
        if missing := [number for number in range(first, first + count) if number not in numbers]:
            width = len(next(iter(numbers.values()))) - len(begin) - len(end) - len("-of-")
            name = f"{begin}{missing[0]:0{width // 2}}-of-{count:0{width // 2}}{end}"
            more = f", nor are {len(missing) - 1:,} more of its {count:,}" if len(missing) > 1 else ""
            raise Refusal(
                f"--dataset {source}: {name} is not there{more}. Copy the folder again; or, to read what is there, name it "
                f"by a pattern: --dataset '{source.rstrip('/')}/*{end}'"
            )
    return paths


def _by_split(source: str, root: str, paths: list[str]) -> Splits:
    if not paths:
        there = ", ".join(sorted(os.listdir(root))[:5]) or "it is empty"
        raise Refusal(f"--dataset {source}: no data files in this folder ({there}). Data files end in {_ENDINGS}.")
    splits: dict[str | None, list[DataFile]] = defaultdict(list)
    for path in sorted(paths):
        splits[_split_of(os.path.relpath(path, root))].append(_known(_named(path, root)))
    unnamed = splits.pop(None, [])
    if unnamed and splits:
        raise Refusal(
            f"--dataset {source}: {unnamed[0].path} belongs to no split, though others do ({', '.join(map(str, splits))}). "
            "Name it by its split, move it away, or name the files that are meant: --dataset 'folder/train*.jsonl'"
        )
    named: Splits = {str(split): files for split, files in splits.items()} or {"train": unnamed}
    for split, files in named.items():
        families = {next(family for family in _FAMILIES if file.ending in family): file.path for file in files}
        if len(families) > 1:
            raise Refusal(
                f"--dataset {source}: the {split} split has files of several formats ({', '.join(families.values())}), which "
                "may be the same rows twice. Name the files that are meant: --dataset 'folder/*.jsonl'"
            )
    return {split: named[split] for split in _SPLIT_WORDS if split in named}


def _saved_to_disk(folder: Path) -> Splits:
    """The files of what `save_to_disk` of datasets wrote; empty for another folder."""
    names = folder / "dataset_dict.json"
    if names.is_file():
        parts = {split: folder / split for split in _names_in(names, "splits")}
    else:
        parts = {"train": folder} if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file() else {}
    splits = {}
    for split, part in parts.items():
        files = _names_in(part / "state.json", "_data_files", "filename")
        splits[split] = [DataFile(str(part / name), f"{part.name}/{name}") for name in files]
    return splits


def _names_in(path: Path, key: str, inner: str = "") -> list[str]:
    """The names that a file of `save_to_disk` lists under a key; each an object's `inner` where that is given.

    Raises:
        Refusal: it lists none, or one outside its folder.
    """
    content = parse_json(read_text_file(path, str(path)), str(path), is_file=True)
    listed = content.get(key) if isinstance(content, dict) else None
    listed = listed if isinstance(listed, list) else []
    found = [each.get(inner) if inner and isinstance(each, dict) else each for each in listed]
    names = [name for name in found if isinstance(name, str) and name and os.path.basename(name) == name]
    if not names or len(names) < len(found):
        raise Refusal(f"{path}: lists no names under {key!r}, as save_to_disk of datasets writes it. Save the dataset again.")
    return names


def _split_of(path: str) -> str | None:
    """The split in the file's name, else in the nearest folder's."""
    for part in reversed(Path(path).parts):
        for split, words in _SPLIT_WORDS.items():
            if re.search(rf"(^|[-._ 0-9])({'|'.join(words)})([-._ 0-9]|$)", part.lower()):
                return split
    return None


def _named(path: str, root: str) -> DataFile:
    """Named by the path from the given folder's name on: the same wherever that lies, for it is part of the data's key."""
    shown = Path(os.path.relpath(path, os.path.dirname(os.path.abspath(root)))).as_posix()
    known = _GIVEN.get(shown, path)
    _GIVEN[shown] = path if known is not None and os.path.realpath(known) == os.path.realpath(path) else None
    return DataFile(path, shown)


def _known(file: DataFile) -> DataFile:
    if not file.ending:
        raise Refusal(f"--dataset {file.path}: unknown kind of file. Data files end in {_ENDINGS}.")
    return file


def _looks_like_a_path(source: str) -> bool:
    starts = source.startswith((".", "/", "~", "\\")) or bool(re.match(r"[A-Za-z]:[\\/]", source))
    folder_is_there = bool(os.path.dirname(source)) and os.path.isdir(os.path.dirname(source))
    return starts or folder_is_there or "\\" in source or source.count("/") > 1 or bool(DataFile(source, "").ending)


def _missing(source: str, path: str) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"--dataset {source}: there is no folder {folder} (from {os.getcwd()})."
    near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(os.path.join(os.path.dirname(source), name) for name in near)}?" if near else ""
    return f"--dataset {source}: there is no such file or folder (from {os.getcwd()}).{hint}"

"""A name for the rows of a streamed data set that changes with them, made without reading a row."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

from toolkit.config import DataConfig
from toolkit.data.sources.find_files import find_files
from toolkit.data.sources.load import commits_of_sources, describe_source, is_built_in, sources_of
from toolkit.data.sources.remote import description_of, is_url
from toolkit.system.digests import code_digest, sha256_of

_DECIDE = (
    "dataset", "train_split", "eval_split", "eval_fraction", "rename_columns", "sample_by", "max_train_examples",
    "max_eval_examples", "seed",
)  # fmt: skip


def content_of_streams(config: DataConfig) -> str:
    """A digest of what decides which rows `load_splits` streams, and how they are read.

    Of a file its content (by URL the store's metadata of it), of a dataset of the Hub its commit; one whose commit is not
    known has another name each time.
    """
    parts: list[object] = [code_digest(), {name: getattr(config, name) for name in _DECIDE}]
    commits = commits_of_sources(config)
    for source in sources_of(config.dataset):
        if is_built_in(source.dataset):
            parts.append(describe_source(source.dataset))
        elif (files := find_files(source.dataset)) is not None:
            parts += [
                [split, file.shown, description_of(file.path) if is_url(file.path) else sha256_of(Path(file.path))]
                for split in files for file in files[split]
            ]  # fmt: skip
        else:
            parts.append(commits.get(source.dataset) or uuid.uuid4().hex)
        parts.append([source.weight, source.rename_columns])
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

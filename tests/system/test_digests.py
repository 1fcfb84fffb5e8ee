"""The digest of a model directory: what changes it, and what it costs. Each test names the one-line change under which it fails."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from toolkit.system.digests import digests_of_directories, directory_digest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Weights of 48 MB in two tensors, which are read in pieces."""
    numbers = np.random.default_rng(0).standard_normal((2, 6_000_000), dtype=np.float32)
    (tmp_path / "model").mkdir()
    save_file({"a": numbers[0], "b": numbers[1]}, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text('{"hidden_size": 8}')
    return tmp_path / "model"


def test_what_makes_a_model_changes_the_digest_and_nothing_else_does(directory: Path) -> None:
    """Fails when: only sizes and headers are read, which training leaves as they are."""
    before = directory_digest(directory)
    (directory / "README.md").write_text("its card, with another date")
    assert directory_digest(directory) == before
    (directory / "config.json").write_text('{"hidden_size": 9}')
    assert directory_digest(directory) != before
    (directory / "config.json").write_text('{"hidden_size": 8}')
    numbers = np.random.default_rng(0).standard_normal((2, 6_000_000), dtype=np.float32)
    save_file({"a": numbers[0], "b": numbers[1]}, directory / "model.safetensors")
    assert directory_digest(directory) == before
    save_file({"a": numbers[0], "b": numbers[1] * np.float32(1.001)}, directory / "model.safetensors")  # one tensor was trained
    assert directory_digest(directory) != before
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    assert directory_digest(directory) != before


def test_large_weights_cost_no_more_than_small_ones(directory: Path) -> None:
    """2 GB, of which almost nothing is on the disk. Fails when: all of a file is read."""
    with open(directory / "model-00002-of-00002.safetensors", "wb") as file:
        file.truncate(2 << 30)
    began = time.process_time()
    directory_digest(directory)
    assert time.process_time() - began < 0.5


def test_an_adapters_base_is_digested_too(directory: Path, tmp_path: Path) -> None:
    """Fails when: of an adapter only its own directory is looked at. Names that are no directories here have none."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(directory)}))
    adapter = str(tmp_path / "adapter")
    found = digests_of_directories(adapter, None, "org/name")
    assert found == {adapter: directory_digest(adapter), str(directory): directory_digest(directory)}

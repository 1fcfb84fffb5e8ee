"""Datasets of the Hugging Face Hub, with refusals that name what was requested and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import Refusal
from toolkit.system.console import first_line
from toolkit.system.network import stay_offline_without_network

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_from_hub(dataset: str, streaming: bool) -> tuple[dict[str, Dataset | IterableDataset], str | None]:
    """The splits of `name`, `name:config` or `name:config@revision`, and their commit where it is known.

    Code in a dataset's repository is never run.

    Raises:
        Refusal: no network, no such dataset, configuration or revision, no access, or data that can't be read.
    """
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    name, config, revision = parse_hub_name(dataset)
    stay_offline_without_network()
    try:
        splits = datasets.load_dataset(name, config, revision=revision, streaming=streaming)
    except DatasetNotFoundError as error:
        reason = first_line(error)
        if "gated" in reason.lower():
            raise Refusal(f"--dataset {dataset}: {reason} Once you have access, log in: hf auth login") from None
        raise Refusal(
            f"--dataset {dataset}: not a local file or folder, and not on the Hub for this login ({reason}). For a private "
            "dataset: hf auth login"
        ) from None
    except (DataFilesNotFoundError, EmptyDatasetError):
        raise Refusal(f"--dataset {dataset}: the repository has no data files that datasets can read.") from None
    except (OfflineModeIsEnabled, ConnectionError, HfHubHTTPError, TimeoutError, FileNotFoundError) as error:
        raise Refusal(_unreachable(dataset, error)) from None  # FileNotFoundError: datasets', when the Hub answered with 5xx
    except RuntimeError as error:
        if "script" not in str(error):
            raise
        raise Refusal(f"--dataset {dataset} is a script, and code from a dataset's repository is not run here.") from None
    except ValueError as error:  # datasets' kind for a missing or unknown configuration; its message lists those there are
        there = re.search(r"\[.*?\]", str(error))
        if not there:
            raise Refusal(f"--dataset {dataset}: {first_line(error)}") from None
        found = f"no configuration {config!r}" if config else "it has several configurations"
        raise Refusal(f"--dataset {dataset}: {found}. Write {name}:NAME with one of {there[0]}") from None
    except DatasetGenerationError as error:
        raise Refusal(f"--dataset {dataset}: the data can't be read: {first_line(error.__cause__ or error)}") from None
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("httpx", "httpcore", "requests", "aiohttp"):
            raise Refusal(_unreachable(dataset, error)) from None
        raise
    return dict(splits), _commit_of(next(iter(splits.values())), name, revision)


def _commit_of(rows: Dataset | IterableDataset, name: str, revision: str | None) -> str | None:
    """datasets (5.2) keeps rows in a folder that has the commit's name; for a stream the Hub is queried."""
    for file in getattr(rows, "cache_files", None) or []:
        if _COMMIT.fullmatch(folder := Path(file["filename"]).parent.name):
            return folder
    if hasattr(rows, "__len__"):
        return None
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision, timeout=10).sha
    except Exception:  # it is written down for later, and nothing here depends on it
        return None


def parse_hub_name(dataset: str) -> tuple[str, str | None, str | None]:
    """Name, configuration and revision of `name[:config][@revision]`.

    Raises:
        Refusal: it can't be the name of a dataset.
    """
    found = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?::([^@]+))?(?:@(.+))?", dataset)
    if not found:
        raise Refusal(
            f"--dataset {dataset!r} is not a local path and not the name of a dataset on the Hub, which is user/name, with a "
            "configuration and a revision user/name:config@revision. The embedded corpus: stdlib:sft"
        )
    return found[1], found[2], found[3]


def _unreachable(dataset: str, error: BaseException) -> str:
    return (
        f"--dataset {dataset} is not a local path, and the Hugging Face Hub can't be reached ({first_line(error)}). Check the "
        "network; with HF_HUB_OFFLINE=1 what was downloaded before is used; stdlib:sft and local files need no network."
    )

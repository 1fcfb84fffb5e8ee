"""toolkit generate --dataset: a model answers the prompts of a data set, and a file of rows for training is written."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import DataConfig, Refusal
from toolkit.config.places import place_to_write
from toolkit.system.console import say

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.generation.answers import Sampling


def write_dataset(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", dataset: str, split: str, output: Path,
    sampling: "Sampling", *, name: str, overwrite: bool, raw: bool, system: str | None, renames: list[str],
) -> None:  # fmt: skip
    """Write `output` (`toolkit.generation.written_rows`). `name`: the directory or the Hub id that the model is from."""
    from toolkit.data.sources.load import load_source
    from toolkit.data.sources.mixtures import Source
    from toolkit.export.card import shown_model
    from toolkit.generation.answers import USUAL_TOKENS, sampling_settings
    from toolkit.generation.written_rows import asked_of, write_rows
    from toolkit.models.compat import commit_of
    from toolkit.system.digests import digests_of_directories

    name = str(Path(name).absolute()) if Path(name).is_dir() else name
    place = place_to_write(output, "--output", is_file=True)
    splits = load_source(Source(dataset), DataConfig(dataset=dataset, rename_columns=renames))
    if split not in splits:
        raise Refusal(f"--split {split}: {dataset} has no such split. It has: {', '.join(splits)}.")
    asked = asked_of(splits[split], tokenizer, raw=raw, system=system)
    digests, commit = digests_of_directories(name), commit_of(model.config)
    version = next(iter(digests.values()), commit or "")[:12]
    writer = shown_model(name) + (f"@{version}" if version else "")
    if overwrite:
        place.unlink(missing_ok=True)
    say(f"{writer} answers {len(asked):,} prompts of {dataset}; what is done is in {output}.part", error=True)
    longest = sampling.max_new_tokens or USUAL_TOKENS
    written = write_rows(
        model, tokenizer, asked, place, settings=sampling_settings(model, tokenizer, sampling, longest), seed=sampling.seed,
        writer=writer, made_of={"files": list(digests.values()), "commit": commit, "dtype": str(model.dtype)},
    )  # fmt: skip
    known = f", {written.known:,} of which an earlier start had" if written.known else ""
    say(f"{output}: {written.rows:,} rows{known}", error=True)
    if written.truncated:
        say(f"{written.truncated:,} answers were cut by --max-new-tokens {longest}", error=True)

"""toolkit generate: what a trained model answers, to prompts, or to those of a data set as rows for training."""

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.sampling_options import (
    BlockLength,
    DenoisingSteps,
    NewTokens,
    Seed,
    System,
    Temperature,
    TopP,
    load_to_answer,
    read_sampling,
)
from toolkit.cli.setting_options import OF_MODEL, Device, ModelName, option, read_options, with_settings
from toolkit.config import DataConfig, ModelConfig, Refusal, Seq2SeqConfig, read_config_file
from toolkit.config.json_and_yaml import read_text_file
from toolkit.config.places import place_to_write
from toolkit.system.console import DIM, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from toolkit.generation.answers import Sampling


@with_settings(f"{OF_MODEL} dtype", ModelConfig)
def generate(
    model: ModelName,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; may be given several times.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt a line; a .jsonl file with prompt or messages a row. - is stdin."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(metavar="DATASET", help="Answer its prompts, into --output.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --dataset: the .jsonl file of rows to train on. A killed start goes on where it was."
        ),
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="With --dataset: of it.")] = "train",
    rename_columns: Annotated[str | None, option(DataConfig, "rename_columns")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --dataset: take the place of FILE.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line: prompt and text.")] = False,
    system: System = None,
    source_prefix: Annotated[
        str | None,
        option(Seq2SeqConfig, "source_prefix", help="Of encoder-decoders: put before each source. Default: the run's own."),
    ] = None,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    denoising_steps: DenoisingSteps = None,
    block_length: BlockLength = None,
    seed: Seed = 0,
    device: Device = None,
    *,
    typed: dict[str, Any],
) -> None:
    """Answer prompts: of --prompt, of a file, or of what is piped in.

    A prompt is a user's turn where the model has a chat template, and a source for an encoder-decoder. A masked-diffusion
    model also fills in what a text leaves out, <|mask|>*16 for 16 tokens. The answer is shown as it is made; several prompts
    are answered at a time. Only the answers go to standard output; with several prompts each is below its prompt.

    With --dataset the answers are rows of a file that recipes/sft.py and recipes/distill.py read (sequence-level distillation).
    """
    from toolkit.generation.answers import answer_prompts, read_prompts, text_prompt
    from toolkit.models.diffusion import diffusion_of

    if (dataset is None) != (output is None):
        given, other = ("--dataset", "--output") if output is None else ("--output", "--dataset")
        raise typer.BadParameter(f"needs {other}.", param_hint=given)
    if dataset is None and (rename_columns or overwrite or split != "train"):
        raise typer.BadParameter("has no effect without --dataset.", param_hint="--overwrite" if overwrite else "--split")
    if dataset is not None and (prompt or file or as_json or source_prefix is not None):
        raise typer.BadParameter("leave --prompt, --file, --json and --source-prefix out.", param_hint="--dataset")
    if system is not None and raw:
        raise typer.BadParameter("is a turn of a chat, and --raw leaves the chat template out.", param_hint="--system")
    lines = [] if dataset is not None else _prompt_lines(prompt, file)
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
    loaded, tokens = load_to_answer(model, typed, device, kinds[:1] if dataset is not None else kinds)
    sampling = read_sampling(loaded, max_new_tokens, temperature, top_p, denoising_steps, block_length, seed)
    is_diffusion, is_source = diffusion_of(loaded) is not None, loaded.config.is_encoder_decoder
    if system is not None and (is_source or not tokens.chat_template):
        raise Refusal(f"--system: {model} has no chat template that it could be written into. Remove it.")
    if dataset is not None and is_diffusion:
        raise Refusal(
            "--dataset: is for models that write one token behind the other, and this one is a masked-diffusion model. It "
            "answers a file of prompts: --file FILE --json"
        )
    if dataset is not None and output is not None:
        from toolkit.models.trained import find_model

        renames = read_options(DataConfig, {"rename_columns": rename_columns}).rename_columns
        write_dataset(
            loaded, tokens, dataset, split, output, sampling, name=find_model(model), overwrite=overwrite, raw=raw,
            system=system, renames=renames,
        )  # fmt: skip
        return
    if source_prefix is not None and not is_source:
        raise Refusal(f"--source-prefix {source_prefix}: is for encoder-decoders, and {model} is none. Remove it.")
    raw = raw or is_source  # which has no chat template
    before = _prefix_of_run(model, source_prefix) if is_source else ""
    gap = tokens.mask_token if is_diffusion else None
    if prompt:
        prompts = [text_prompt(text, tokens, raw, system, gap) for text in prompt]
    else:
        prompts = read_prompts(lines, str(file or "standard input"), tokens, raw, system, gap)
    printer = _Printer([each.written for each in prompts], as_json)
    answer_prompts(loaded, tokens, [before + each.text for each in prompts], sampling, printer.show, printer.end)


class _Printer:
    """Answers in the order of their prompts, though several are made at a time: pieces of the next one as they come."""

    def __init__(self, prompts: list[str], as_json: bool) -> None:
        self.prompts, self.as_json, self.next = prompts, as_json, -1
        self.pieces: dict[int, list[str]] = {}
        self.ended: dict[int, str] = {}
        self._begin()

    def show(self, number: int, piece: str) -> None:
        if self.as_json:
            return
        if number == self.next:
            _show(piece)
        else:
            self.pieces.setdefault(number, []).append(piece)

    def end(self, number: int, text: str) -> None:
        self.ended[number] = text
        while self.next in self.ended:
            text = self.ended.pop(self.next)
            say(json.dumps({"prompt": self.prompts[self.next], "text": text}, ensure_ascii=False) if self.as_json else "")
            self._begin()

    def _begin(self) -> None:
        self.next += 1
        if self.as_json or self.next == len(self.prompts):
            return
        if len(self.prompts) > 1:
            say(("\n" if self.next else "") + self.prompts[self.next], style=DIM)
        _show("".join(self.pieces.pop(self.next, [])))


def _prefix_of_run(model: str, typed: str | None) -> str:
    """What was put before each source in training: as typed, else as in the run's config.yaml."""
    from toolkit.data.sources.trained_rows import config_of_run

    of_run = config_of_run(model)
    if typed is not None or of_run is None:
        return typed or ""
    found = read_config_file(of_run).get("source_prefix")
    return found if isinstance(found, str) else ""


def _prompt_lines(prompt: list[str] | None, file: Path | None) -> list[str]:
    """The lines of the file or of standard input; read before the model is loaded."""
    if prompt and file:
        raise typer.BadParameter("or --prompt: give one of them.", param_hint="--file")
    if prompt:
        return []
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("which? Give --prompt TEXT or --file FILE, or pipe prompts in.", param_hint="--prompt")
    if file is None or str(file) == "-":
        return list(sys.stdin)
    # as standard input is read: splitlines() would also part lines at U+2028, which JSON and texts may hold
    return list(io.StringIO(read_text_file(file, f"--file {file}", most=1 << 30), newline=None))


def _show(piece: str) -> None:
    say(piece, end="")


def write_dataset(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", dataset: str, split: str, output: Path,
    sampling: "Sampling", *, name: str, overwrite: bool, raw: bool, system: str | None, renames: list[str],
) -> None:  # fmt: skip
    """Write `output` (`toolkit.generation.written_rows`). `name`: the directory or the Hub id that the model is from."""
    from toolkit.data.sources.load import load_source, split_named
    from toolkit.data.sources.mixtures import Source
    from toolkit.export.card import shown_model
    from toolkit.generation.answers import USUAL_TOKENS, sampling_settings
    from toolkit.generation.written_rows import asked_of, write_rows
    from toolkit.models.compat import commit_of
    from toolkit.system.digests import digests_of_directories

    name = str(Path(name).absolute()) if Path(name).is_dir() else name
    place = place_to_write(output, "--output", is_file=True)
    splits = load_source(Source(dataset), DataConfig(dataset=dataset, rename_columns=renames))
    asked = asked_of(split_named(split, splits, dataset), tokenizer, raw=raw, system=system)
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

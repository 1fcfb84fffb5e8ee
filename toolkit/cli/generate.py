"""toolkit generate and chat: what a trained model answers."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.generate_rows import write_dataset
from toolkit.cli.refusals import print_refusal
from toolkit.cli.setting_options import (
    ChatTemplate,
    Device,
    DType,
    ModelName,
    Revision,
    Tokenizer,
    TrustRemoteCode,
    option,
    read_options,
)
from toolkit.config import DataConfig, DiffusionConfig, ModelConfig, Refusal, Seq2SeqConfig, read_config_file
from toolkit.config.json_and_yaml import read_text_file
from toolkit.system.console import DIM, as_typed, say

if TYPE_CHECKING:
    from toolkit.generation.answers import Sampling

_System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system's message.", show_default=False)]
_NewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", metavar="N", min=1, max=1 << 20, show_default=False,
        help="At most N tokens an answer. Default: 512; of a masked-diffusion model what it was trained for.",
    ),
]  # fmt: skip
_Steps = Annotated[str | None, option(DiffusionConfig, "denoising_steps")]
_BlockLength = Annotated[str | None, option(DiffusionConfig, "block_length")]


def _a_number(value: float | None) -> float | None:
    """Refuse nan, which is within every range as Python compares it."""
    if value is not None and value != value:
        raise typer.BadParameter("nan is not a number.")
    return value


_Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", min=0.0, max=1e6, callback=_a_number, show_default=False,
        help="0 takes the likeliest token. Default: as the model's generation_config says.",
    ),
]  # fmt: skip
_TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", min=0.0, max=1.0, callback=_a_number, show_default=False,
        help="Draw from the likeliest tokens that have this share.",
    ),
]  # fmt: skip
_Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="Of what is drawn.")]


def generate(
    model: ModelName,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="What is asked; may be given several times.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="A prompt a line; a .jsonl file with prompt or messages a row. - is stdin.",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="DATASET", help="Answer its prompts, into --output.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", show_default=False,
            help="With --dataset: the .jsonl file of rows to train on. A killed start goes on where it was.",
        ),
    ] = None,
    split: Annotated[str, typer.Option("--split", metavar="NAME", help="With --dataset: of it.")] = "train",
    rename_columns: Annotated[str | None, option(DataConfig, "rename_columns", "OLD=NEW,...")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --dataset: take the place of FILE.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line: prompt and text.")] = False,
    system: _System = None,
    source_prefix: Annotated[
        str | None,
        option(Seq2SeqConfig, "source_prefix", help="Of encoder-decoders: put before each source. Default: the run's own."),
    ] = None,
    max_new_tokens: _NewTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    denoising_steps: _Steps = None,
    block_length: _BlockLength = None,
    seed: _Seed = 0,
    device: Device = None,
    model_revision: Revision = None,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    trust_remote_code: TrustRemoteCode = None,
    dtype: DType = None,
) -> None:
    """Answer prompts: of --prompt, of a file, or of what is piped in.

    A prompt is a user's turn where the model has a chat template, and a source for an encoder-decoder. A masked-diffusion
    model also fills in what a text leaves out, <|mask|>*16 for 16 tokens. The answer is shown as it is made; several prompts
    are answered at a time. Only the answers go to standard output; with several prompts each is below its prompt.

    With --dataset the answers are rows of a file that recipes/sft.py and recipes/distill.py read (sequence-level distillation).
    """
    from toolkit.generation.answers import answer_prompts, read_prompts, text_prompt

    if (dataset is None) != (output is None):
        given, other = ("--dataset", "--output") if output is None else ("--output", "--dataset")
        raise typer.BadParameter(f"needs {other}.", param_hint=given)
    if dataset is None and (rename_columns or overwrite or split != "train"):
        raise typer.BadParameter("has no effect without --dataset.", param_hint="--overwrite" if overwrite else "--split")
    if dataset is not None and (prompt or file or as_json or source_prefix is not None):
        raise typer.BadParameter("leave --prompt, --file, --json and --source-prefix out.", param_hint="--dataset")
    lines = [] if dataset is not None else _prompt_lines(prompt, file)
    settings = {
        "model_revision": model_revision, "tokenizer": tokenizer, "chat_template": chat_template,
        "trust_remote_code": trust_remote_code, "dtype": dtype,
    }  # fmt: skip
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
    loaded, tokens = _load(model, settings, device, kinds[:1] if dataset is not None else kinds)
    sampling = _sampling(loaded, max_new_tokens, temperature, top_p, denoising_steps, block_length, seed)
    if dataset is not None and output is not None:
        from toolkit.models.trained import find_model

        renames = read_options(DataConfig, _given({"rename_columns": rename_columns})).rename_columns
        write_dataset(
            loaded, tokens, dataset, split, output, sampling, name=find_model(model), overwrite=overwrite, raw=raw,
            system=system, renames=renames,
        )  # fmt: skip
        return
    is_source = loaded.config.is_encoder_decoder
    if source_prefix is not None and not is_source:
        raise Refusal(f"--source-prefix {source_prefix}: is for encoder-decoders, and {model} is none. Remove it.")
    raw = raw or is_source  # which has no chat template
    before = _prefix_of_run(model, source_prefix) if is_source else ""
    raw = raw or any(token in text for text in (*(prompt or ()), *lines) for token in _gaps(loaded, tokens))
    if prompt:
        prompts = [text_prompt(text, tokens, raw, system) for text in prompt]
    else:
        prompts = read_prompts(lines, str(file or "standard input"), tokens, raw, system)
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


def _gaps(model: Any, tokenizer: Any) -> list[str]:
    """What marks a gap in a text that a masked-diffusion model fills in: such a text is no user's turn."""
    from toolkit.models.diffusion import diffusion_of

    return [] if diffusion_of(model) is None else [tokenizer.mask_token]


def _sampling(
    model: Any, max_new_tokens: int | None, temperature: float | None, top_p: float | None, denoising_steps: str | None,
    block_length: str | None, seed: int,
) -> "Sampling":  # fmt: skip
    """How answers are sampled; what the model has no use for is refused."""
    from toolkit.generation.answers import Sampling
    from toolkit.models.diffusion import diffusion_of

    of_diffusion = _given({"denoising_steps": denoising_steps, "block_length": block_length})
    is_diffusion = diffusion_of(model) is not None
    if of_diffusion and not is_diffusion:
        flag = next(iter(of_diffusion)).replace("_", "-")
        raise Refusal(f"--{flag}: is for masked-diffusion models, and this model writes one token behind the other. Remove it.")
    if is_diffusion and top_p is not None:
        raise Refusal(f"--top-p {top_p:g}: is for models that write one token behind the other. Remove it.")
    settings = read_options(DiffusionConfig, of_diffusion)
    return Sampling(max_new_tokens, temperature, top_p, settings.denoising_steps, settings.block_length, seed)


def _prefix_of_run(model: str, typed: str | None) -> str:
    """What was put before each source in training: as typed, else as the run's config.yaml says."""
    from toolkit.data.sources.trained_rows import config_of_run

    of_run = config_of_run(model)
    if typed is not None or of_run is None:
        return typed or ""
    found = read_config_file(of_run).get("source_prefix")
    return found if isinstance(found, str) else ""


def chat(
    model: ModelName,
    system: _System = None,
    max_new_tokens: _NewTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    denoising_steps: _Steps = None,
    block_length: _BlockLength = None,
    seed: _Seed = 0,
    device: Device = None,
    model_revision: Revision = None,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    trust_remote_code: TrustRemoteCode = None,
    dtype: DType = None,
) -> None:
    """Talk to a model through its chat template.

    Ctrl-C ends an answer, Ctrl-D the chat. /reset forgets what was said, /quit ends the chat.
    """
    from toolkit.generation.answers import chat_prompt

    settings = {
        "model_revision": model_revision, "tokenizer": tokenizer, "chat_template": chat_template,
        "trust_remote_code": trust_remote_code, "dtype": dtype,
    }  # fmt: skip
    loaded, tokens = _load(model, settings, device)
    opening = [{"role": "system", "content": system}] if system else []
    chat_prompt([*opening, {"role": "user", "content": "?"}], tokens)  # a model that can't be talked to is refused now
    if sys.stdin.isatty():
        say("Ctrl-C ends an answer, Ctrl-D the chat; /reset forgets what was said.", style=DIM)
    _talk(loaded, tokens, opening, _sampling(loaded, max_new_tokens, temperature, top_p, denoising_steps, block_length, seed))


def _talk(model: Any, tokenizer: Any, opening: list[dict[str, str]], sampling: "Sampling") -> None:
    from toolkit.generation.answers import answer, chat_prompt

    messages = list(opening)
    for said in _turns():
        if said == "/reset":
            messages = list(opening)
            say("Forgotten.", style=DIM)
            continue
        if said.startswith("/") and " " not in said:
            say(f"{said}: no such command. There are /reset and /quit.", style=DIM)
            continue
        pieces = list[str]()
        try:
            prompt = chat_prompt([*messages, {"role": "user", "content": said}], tokenizer)
            of_turn = sampling._replace(seed=sampling.seed + len(messages))
            answer(model, tokenizer, prompt, of_turn, partial(_show_and_keep, pieces))
        except KeyboardInterrupt:
            say(" (ended)", style=DIM, end="")
        except Refusal as refusal:  # a chat that has grown too long: it may be reset
            print_refusal(refusal)
            continue
        say("\n")
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": "".join(pieces)}]


def _turns() -> Iterator[str]:
    """What the user types, up to Ctrl-D or /quit."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - what input() edits its line with
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\nCtrl-D ends the chat.", style=DIM)
            continue
        if said == "/quit":
            return
        if said:
            yield said


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


def _load(
    model: str, settings: dict[str, Any], device: str | None, kinds: tuple[str, ...] = ("AutoModelForCausalLM",)
) -> tuple[Any, Any]:
    from toolkit.models.trained import find_model

    config = read_options(ModelConfig, {"dtype": "auto", "model": find_model(model), **_given(settings)})

    from toolkit.export.model_directory import no_progress_bar
    from toolkit.models.diffusion import diffusion_in, of_both_sides
    from toolkit.models.trained import auto_class_of, best_device, load_trained

    kind = auto_class_of(config)
    if kind not in kinds or (kind == "AutoModelForMaskedLM" and not diffusion_in(config)):
        if kind == "AutoModelForSeq2SeqLM":
            raise Refusal(f"{config.model}: an encoder-decoder, which holds no chat: {as_typed('toolkit', 'generate', model)}")
        instead = as_typed("toolkit", "evaluate", model)
        raise Refusal(f"{config.model}: is for {kind}, and writes no text. For its metrics: {instead}")
    with no_progress_bar(), contextlib.redirect_stdout(sys.stderr):  # standard output is for the results
        return load_trained(kind, config, best_device(device), **of_both_sides(config))


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _show_and_keep(pieces: list[str], piece: str) -> None:
    pieces.append(piece)
    _show(piece)


def _show(piece: str) -> None:
    say(piece, end="")

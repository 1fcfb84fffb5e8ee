"""toolkit generate and chat: what a trained model answers."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.setting_options import option, read_options
from toolkit.config import ModelConfig, Refusal

if TYPE_CHECKING:
    from toolkit.answers import Sampling

_ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run's output directory, a model's or an adapter's directory, or a Hub id.", show_default=False
    ),
]
_System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system's message.", show_default=False)]
_NewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="At most so many tokens an answer.")]
_Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", min=0.0, show_default=False,
        help="0 takes the likeliest token. Default: as the model's generation_config says.",
    ),
]  # fmt: skip
_TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        min=0.0,
        max=1.0,
        help="Draw from the likeliest tokens that have this share.",
        show_default=False,
    ),
]
_Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of what is drawn.")]
_Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", help="Such as cuda:1 or cpu. Default: an accelerator, if any.", show_default=False
    ),
]
_Revision = Annotated[str | None, option(ModelConfig, "model_revision")]
_Tokenizer = Annotated[str | None, option(ModelConfig, "tokenizer")]
_Template = Annotated[str | None, option(ModelConfig, "chat_template", "FILE")]
_Remote = Annotated[bool | None, option(ModelConfig, "trust_remote_code")]
_DType = Annotated[str | None, option(ModelConfig, "dtype")]


def generate(
    model: _ModelName,
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
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line: prompt and text.")] = False,
    system: _System = None,
    max_new_tokens: _NewTokens = 512,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = 0,
    device: _Device = None,
    model_revision: _Revision = None,
    tokenizer: _Tokenizer = None,
    chat_template: _Template = None,
    trust_remote_code: _Remote = None,
    dtype: _DType = None,
) -> None:
    """Answer prompts: of --prompt, of a file, or of what is piped in.

    A prompt is a user's turn where the model has a chat template. The answer is shown as it is made. Only the answers go to
    standard output; with several prompts each stands below its prompt.
    """
    from toolkit.answers import Sampling, answer, read_prompts, text_prompt

    lines = _prompt_lines(prompt, file)
    settings = {
        "model_revision": model_revision, "tokenizer": tokenizer, "chat_template": chat_template,
        "trust_remote_code": trust_remote_code, "dtype": dtype,
    }  # fmt: skip
    loaded, tokens = _load(model, settings, device, seed)
    if prompt:
        prompts = [text_prompt(text, tokens, raw, system) for text in prompt]
    else:
        prompts = read_prompts(lines, str(file or "standard input"), tokens, raw, system)
    sampling = Sampling(max_new_tokens, temperature, top_p)
    for number, each in enumerate(prompts):
        if as_json:
            text = answer(loaded, tokens, each.text, sampling, lambda piece: None)
            typer.echo(json.dumps({"prompt": each.written, "text": text}, ensure_ascii=False))
            continue
        if len(prompts) > 1:
            typer.secho(("\n" if number else "") + _printable(each.written), dim=True)
        answer(loaded, tokens, each.text, sampling, _show)
        typer.echo()


def chat(
    model: _ModelName,
    system: _System = None,
    max_new_tokens: _NewTokens = 512,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = 0,
    device: _Device = None,
    model_revision: _Revision = None,
    tokenizer: _Tokenizer = None,
    chat_template: _Template = None,
    trust_remote_code: _Remote = None,
    dtype: _DType = None,
) -> None:
    """Talk to a model through its chat template.

    Ctrl-C ends an answer, Ctrl-D the chat. /reset forgets what was said, /quit ends the chat.
    """
    from toolkit.answers import Sampling, chat_prompt

    settings = {
        "model_revision": model_revision, "tokenizer": tokenizer, "chat_template": chat_template,
        "trust_remote_code": trust_remote_code, "dtype": dtype,
    }  # fmt: skip
    loaded, tokens = _load(model, settings, device, seed)
    opening = [{"role": "system", "content": system}] if system else []
    chat_prompt([*opening, {"role": "user", "content": "?"}], tokens)  # a model that can't be talked to is refused now
    if sys.stdin.isatty():
        typer.secho("Ctrl-C ends an answer, Ctrl-D the chat; /reset forgets what was said.", dim=True)
    _talk(loaded, tokens, opening, Sampling(max_new_tokens, temperature, top_p))


def _talk(model: Any, tokenizer: Any, opening: list[dict[str, str]], sampling: "Sampling") -> None:
    from toolkit.answers import answer, chat_prompt

    messages = list(opening)
    for said in _turns():
        if said == "/reset":
            messages = list(opening)
            typer.secho("Forgotten.", dim=True)
            continue
        if said.startswith("/") and " " not in said:
            typer.secho(f"{said}: no such command. There are /reset and /quit.", dim=True)
            continue
        pieces = list[str]()
        try:
            prompt = chat_prompt([*messages, {"role": "user", "content": said}], tokenizer)
            answer(model, tokenizer, prompt, sampling, partial(_show_and_keep, pieces))
        except KeyboardInterrupt:
            typer.secho(" (ended)", dim=True, nl=False)
        except Refusal as refusal:  # a chat that has grown too long: it may be reset
            typer.echo(f"refused: {refusal}", err=True)
            continue
        typer.echo("\n")
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": "".join(pieces)}]


def _turns() -> Iterator[str]:
    """What the user types, up to Ctrl-D or /quit."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - what input() edits its line with
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.secho("\nCtrl-D ends the chat.", dim=True)
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
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"--file {file}: can't be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}.") from error


def _load(model: str, settings: dict[str, Any], device: str | None, seed: int) -> tuple[Any, Any]:
    from toolkit.trained import find_model

    config = read_options(ModelConfig, {"dtype": "auto", "model": find_model(model), **_given(settings)})
    import torch

    from toolkit.hub.model_directory import no_progress_bar
    from toolkit.trained import auto_class_of, best_device, load_trained

    if auto_class_of(config) != "AutoModelForCausalLM":
        raise Refusal(f"{config.model}: is a classifier, which writes no text. For its figures: toolkit evaluate {model}")
    with no_progress_bar():
        loaded = load_trained("AutoModelForCausalLM", config, best_device(device))
    torch.manual_seed(seed)
    return loaded


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _show_and_keep(pieces: list[str], piece: str) -> None:
    pieces.append(piece)
    _show(piece)


def _show(piece: str) -> None:
    sys.stdout.write(_printable(piece))
    sys.stdout.flush()


def _printable(text: str) -> str:
    from toolkit.data.tokenising.preflight import printable

    encoding = sys.stdout.encoding or "utf-8"
    return printable(text).encode(encoding, errors="backslashreplace").decode(encoding)

"""toolkit chat: talk to a trained model."""

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

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
from toolkit.cli.setting_options import OF_MODEL, Device, ModelName, with_settings
from toolkit.command_line.refusals import print_refusal
from toolkit.config import ModelConfig, Refusal
from toolkit.system.console import DIM, say
from toolkit.system.interruptions import Terminated

if TYPE_CHECKING:
    from toolkit.generation.answers import Sampling


@with_settings(f"{OF_MODEL} dtype", ModelConfig)
def chat(
    model: ModelName, system: System = None, max_new_tokens: NewTokens = None, temperature: Temperature = None,
    top_p: TopP = None, denoising_steps: DenoisingSteps = None, block_length: BlockLength = None, seed: Seed = 0,
    device: Device = None, *, typed: dict[str, Any],
) -> None:  # fmt: skip
    """Talk to a model through its chat template.

    Ctrl-C ends an answer, Ctrl-D the chat. /reset forgets what was said, /quit ends the chat.
    """
    from toolkit.generation.answers import chat_prompt

    loaded, tokens = load_to_answer(model, typed, device)
    opening = [{"role": "system", "content": system}] if system else []
    chat_prompt([*opening, {"role": "user", "content": "?"}], tokens)  # a model that can't be talked to is refused now
    if sys.stdin.isatty():
        say("Ctrl-C ends an answer, Ctrl-D the chat; /reset clears the conversation.", style=DIM)
    sampling = read_sampling(loaded, max_new_tokens, temperature, top_p, denoising_steps, block_length, seed)
    _talk(loaded, tokens, opening, sampling)


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
        except Terminated:
            raise
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
        except Terminated:
            raise
        except KeyboardInterrupt:
            say("\nCtrl-D ends the chat.", style=DIM)
            continue
        if said == "/quit":
            return
        if said:
            yield said


def _show_and_keep(pieces: list[str], piece: str) -> None:
    pieces.append(piece)
    say(piece, end="")

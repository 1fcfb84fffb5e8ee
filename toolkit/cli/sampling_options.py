"""What `toolkit generate` and `toolkit chat` share: how answers are sampled, and the model that gives them."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.setting_options import option, read_options
from toolkit.config import DiffusionConfig, ModelConfig, Refusal
from toolkit.config.setting import flag_of
from toolkit.system.console import as_typed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toolkit.generation.answers import Sampling

System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system's message.")]
NewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", metavar="N", min=1, max=1 << 20,
        help="At most N tokens an answer. Default: 512; of a masked-diffusion model what it was trained for.",
    ),
]  # fmt: skip
DenoisingSteps = Annotated[str | None, option(DiffusionConfig, "denoising_steps")]
BlockLength = Annotated[str | None, option(DiffusionConfig, "block_length")]


def _a_number(value: float | None) -> float | None:
    """Refuse nan, which is within every range as Python compares it."""
    if value is not None and value != value:
        raise typer.BadParameter("nan is not a number.")
    return value


Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", min=0.0, max=1e6, callback=_a_number,
        help="0 is greedy decoding. Default: as in the model's generation_config.",
    ),
]  # fmt: skip
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", min=0.0, max=1.0, callback=_a_number,
        help="Sample from the most probable tokens whose probabilities add up to this (nucleus sampling).",
    ),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="Of what is drawn.")]


def read_sampling(
    model: "PreTrainedModel", max_new_tokens: int | None, temperature: float | None, top_p: float | None,
    denoising_steps: str | None, block_length: str | None, seed: int,
) -> "Sampling":  # fmt: skip
    """How answers are sampled; what the model has no use for is refused."""
    from toolkit.generation.answers import Sampling
    from toolkit.models.diffusion import diffusion_of

    of_diffusion = {"denoising_steps": denoising_steps, "block_length": block_length}
    is_diffusion = diffusion_of(model) is not None
    flag = next((flag_of(name) for name, value in of_diffusion.items() if value is not None), None)
    if flag and not is_diffusion:
        raise Refusal(f"{flag}: is for masked-diffusion models, and this model writes one token behind the other. Remove it.")
    if is_diffusion and top_p is not None:
        raise Refusal(f"--top-p {top_p:g}: is for models that write one token behind the other. Remove it.")
    settings = read_options(DiffusionConfig, of_diffusion)
    return Sampling(max_new_tokens, temperature, top_p, settings.denoising_steps, settings.block_length, seed)


def load_to_answer(
    model: str, settings: dict[str, Any], device: str | None, kinds: tuple[str, ...] = ("AutoModelForCausalLM",)
) -> tuple[Any, Any]:
    """The model and its tokenizer, on the requested device, else on the best there is.

    Raises:
        Refusal: it is of no kind in `kinds`, and writes no text.
    """
    from toolkit.export.model_directory import no_progress_bar
    from toolkit.models.diffusion import diffusion_in, of_both_sides
    from toolkit.models.trained import auto_class_of, best_device, find_model, load_trained

    config = read_options(ModelConfig, {"dtype": "auto", "model": find_model(model), **settings})
    kind = auto_class_of(config)
    if kind not in kinds or (kind == "AutoModelForMaskedLM" and not diffusion_in(config)):
        if kind == "AutoModelForSeq2SeqLM":
            raise Refusal(f"{config.model}: an encoder-decoder, which holds no chat: {as_typed('toolkit', 'generate', model)}")
        instead = as_typed("toolkit", "evaluate", model)
        raise Refusal(f"{config.model}: is for {kind}, and writes no text. For its metrics: {instead}")
    with no_progress_bar(), contextlib.redirect_stdout(sys.stderr):  # standard output is for the results
        return load_trained(kind, config, best_device(device), **of_both_sides(config))

"""The `toolkit` command: train, look at checkpoints, verify that a recipe resumes exactly, merge an adapter."""

import sys

import typer

from toolkit.cli.checkpoints import checkpoints
from toolkit.cli.merge import merge
from toolkit.cli.train import train
from toolkit.cli.verify_resume import verify_resume
from toolkit.config import Refusal

# From the recipe's name on, everything is the recipe's own: Typer must not read it.
_RECIPE_FLAGS = {"allow_interspersed_args": False}

app = typer.Typer(
    help="Functional training on Hugging Face Accelerate. `toolkit COMMAND --help` says more.",
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
)  # fmt: skip
app.command(context_settings=_RECIPE_FLAGS)(train)
app.command()(checkpoints)
app.command()(merge)
app.command("verify-resume", context_settings=_RECIPE_FLAGS)(verify_resume)


def main() -> None:
    """Run the command line; what cannot be meant ends with one message and code 2."""
    try:
        app(prog_name="toolkit")
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(2)

"""The `toolkit` command: a table of what it does. A command is imported when it is called."""

import os
import signal
import sys
from typing import Annotated

import typer

from toolkit.cli.lazy import LOOK, Stopped, lazy_group
from toolkit.command_line.refusals import print_mistake, print_refusal
from toolkit.config import Refusal
from toolkit.system.console import StreamError, as_typed, first_line, keep_bars_out_of_logs, say
from toolkit.system.free_memory import is_out_of_memory
from toolkit.system.interruptions import raise_on_sigterm
from toolkit.system.standard_streams import open_closed_streams

# name: (module:function, its line of help); in panels
COMMANDS = {
    "Training": {
        "recipes": ("toolkit.cli.recipes:recipes", "List the recipes, configs and launch files that there are."),
        "copy": ("toolkit.cli.recipes:copy", "Copy a recipe, a config or a launch file, to edit it."),
        "diff": ("toolkit.cli.recipes:diff", "Show what you changed in a copy, and what upstream did since."),
        "train": ("toolkit.cli.train:train", "Run a recipe, as one process or as several."),
        "sweep": ("toolkit.cli.sweep:sweep", "Search settings of a recipe: trials as runs, continued when killed."),
        "checkpoints": ("toolkit.cli.checkpoints:checkpoints", "List the checkpoints of a run."),
        "report": ("toolkit.cli.report:report", "Write one HTML page about runs: curves, samples, settings."),
        "compare": ("toolkit.cli.compare:compare", "Show where runs differ first, and why: settings, data, steps, tensors."),
        "runs": ("toolkit.cli.runs:runs", "List the runs below a directory: status, steps, metrics, time."),
        "rollouts": ("toolkit.cli.rollouts:rollouts", "Show what a run sampled, filter it, score it again."),
        "replay": ("toolkit.cli.replay:replay", "Run a run again, and compare the weights."),
        "plan": ("toolkit.cli.plan:plan", "Find the memory a recipe needs, and where it fits, before it is run."),
        "doctor": ("toolkit.cli.doctor:doctor", "Look for mistakes in a recipe: labels, gradients, rates, evaluation ..."),
        "find-learning-rate": (
            "toolkit.cli.find_learning_rate:find_learning_rate", "Raise a recipe's learning rate step by step and suggest one."
        ),
        "profile": ("toolkit.cli.profile:profile", "Show where the time of a recipe's steps goes, and what to change first."),
        "verify-resume": ("toolkit.cli.verify_resume:verify_resume", "Kill and resume a recipe, and compare the bits."),
        "slurm": ("toolkit.cli.slurm:app", "A recipe as a Slurm job that comes back until it is done."),
        "sagemaker": ("toolkit.sagemaker_jobs.command:app", "A recipe as a SageMaker job: submit, follow, fetch, simulate."),
    },
    "Data": {
        "mine": ("toolkit.cli.mine:mine", "Find hard negatives with an embedding model."),
        "prepare": ("toolkit.cli.prepare:prepare", "Tokenize a dataset once, as files that training reads or streams."),
        "inspect": ("toolkit.cli.inspect:inspect", "Look at a dataset as training would see it: lengths, masks, problems."),
    },
    "Models": {
        "generate": ("toolkit.cli.generate:generate", "Answer prompts: of --prompt, of a file, or piped in."),
        "chat": ("toolkit.cli.chat:chat", "Talk to a model through its chat template."),
        "evaluate": ("toolkit.cli.evaluate:evaluate", "Evaluate a model on a dataset."),
        "export": ("toolkit.cli.export:export", "Write the model of a checkpoint, of a run that has not ended too."),
        "merge": ("toolkit.cli.merge:merge", "Make an ordinary model of an adapter and its base."),
        "push": ("toolkit.cli.push:push", "Send a model to the Hugging Face Hub, or finish what a run could not send."),
    },
    "Help": {
        "env": ("toolkit.cli.environment:env", "Print what a bug report needs, without secrets."),
    },
}  # fmt: skip
# From the recipe's name on, everything is the recipe's own: Typer must not read it.
RECIPE_FLAGS_FOLLOW = frozenset({"train", "plan", "profile", "doctor", "find-learning-rate", "verify-resume", "sweep"})
# What they write is in temporary folders, which go when they are ended.
LEAVE_NOTHING = frozenset({"plan", "doctor", "profile", "find-learning-rate"})


def _elsewhere(word: str) -> str:
    """What to type for the name of a recipe."""
    from toolkit.command_line.recipe_file import complete_recipe

    return as_typed("toolkit", "train", word) if word in complete_recipe(word) else ""


app = typer.Typer(
    help="Functional training on Hugging Face Accelerate. `toolkit COMMAND --help` has more.",
    cls=lazy_group(COMMANDS, RECIPE_FLAGS_FOLLOW, _elsewhere), no_args_is_help=True, **LOOK,
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from toolkit import __version__

        say(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What is before the command."""


def main() -> None:
    """Run the command line; what cannot be meant ends with one message and code 2, a signal with one and 128 + its number."""
    open_closed_streams()
    keep_bars_out_of_logs()
    raise_on_sigterm()
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # ranks refuse and end together: one message for each node
    try:
        # A command's own exit code comes back as a number outside of Typer's standalone mode.
        code = app(prog_name="toolkit", standalone_mode=False)
    except typer.TyperException as mistake:
        print_mistake(mistake)
        code = mistake.exit_code
    except Stopped as stopped:
        if is_first:
            by = "Ctrl-C" if stopped.number == signal.SIGINT else stopped.number.name
            say(f"interrupted by {by}{'; nothing was left behind' * (stopped.command in LEAVE_NOTHING)}", error=True)
        code = 128 + stopped.number
    except typer.Abort:
        code = 130
    except Refusal as refusal:
        if is_first:
            print_refusal(refusal)
        code = 2
    except StreamError as error:
        with open(os.devnull, "w") as nowhere:  # where Python writes at its end what the stream still holds
            os.dup2(nowhere.fileno(), (sys.stdout if error.filename == "standard output" else sys.stderr).fileno())
        say(f"{error.filename}: {error.strerror}", error=True)
        code = 1
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        say(f"out of memory: {first_line(error)}", error=True)  # of each rank: it may be the only one
        code = 1
    sys.exit(code)

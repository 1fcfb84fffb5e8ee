"""toolkit slurm: a recipe as a Slurm job that goes on where it stopped, on one node or several; the workers of a sweep."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.command_line.placement import MOST_RANKS
from toolkit.command_line.recipe_file import Flags, Recipe, find_recipe
from toolkit.config import Refusal
from toolkit.system.console import as_typed, say

app = typer.Typer(
    help="Run a recipe as a Slurm job.", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
)  # fmt: skip

_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_ARRAY = re.compile(r"-a|--ar(r(ay?)?)?([= ]|$)")  # as sbatch reads it: with a space or =, shortened


@app.callback()
def _group() -> None:
    """Run a recipe as a Slurm job."""


@app.command(context_settings={"ignore_unknown_options": True})
def submit(
    recipe: Recipe,
    flags: Flags = None,
    time: Annotated[
        str | None, typer.Option(metavar="H:MM:SS", help="Time of one stay on the nodes; the job comes back until it is done.")
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Machines.")] = 1,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Processes on each machine. Default: one for each GPU, or one."),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(metavar="N", min=0, max=1024, help="GPUs of each machine.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(metavar="N", min=1, max=1 << 16, help="Cores of each machine.")] = None,
    mem: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of each machine, such as 200G; 0 is all.")] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Where the job waits.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Whom it is charged to.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Any other option of sbatch, as --sbatch=--qos=high; repeatable.")
    ] = None,
    stop_seconds: Annotated[
        int, typer.Option(metavar="S", min=10, max=3600, help="Stop so long before the end of the time, for a checkpoint.")
    ] = 120,
    sweep_workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=4096, help="Run `toolkit sweep RECIPE FLAGS` as N jobs that share the sweep's trials."
        ),
    ] = None,
    job_name: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the recipe's.")] = None,
    setup: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Run on each node first, such as 'module load cuda'.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and send nothing.")] = False,
) -> None:
    """Send a recipe to Slurm. The options may be before RECIPE or among its flags.

    Before its time is over the run is stopped, saves a checkpoint and goes back into the queue, until it has finished; so does
    one that Slurm takes off its nodes. The nodes see this folder, and Python at the same place.
    """
    if time is not None and not _TIME.fullmatch(time):
        raise typer.BadParameter(f"{time}: is no time of Slurm, such as 90 (minutes) or 2-12:00:00.", param_hint="--time")
    seconds = _seconds(time) if time is not None else 0
    if 0 < seconds <= stop_seconds:
        raise typer.BadParameter(
            f"{time}: is {seconds} seconds for Slurm, and the run is stopped {stop_seconds} before their end (--stop-seconds)."
            " An hour is 1:00:00.",
            param_hint="--time",
        )
    words, script = list(flags or []), find_recipe(recipe, "toolkit slurm submit")
    name = job_name or Path(script).stem
    python = [sys.executable, "-m", "toolkit"]
    if sweep_workers:
        if nodes > 1:
            raise Refusal(f"--nodes {nodes}: a trial of a sweep runs on one machine. Remove it, or leave --sweep-workers out.")
        from toolkit.cli.sweep_workers import words_of_a_worker

        placed = ["--processes", str(processes)] if processes else []
        sweep_words, folder = words_of_a_worker(script, [*words, *placed], sweep_workers)
        run_words = [*python, "sweep", *sweep_words]
    else:
        config = _settings(script, words)
        if config.overwrite_output_dir:
            raise Refusal("--overwrite-output-dir: would throw the run away each time that it comes back. Remove it.")
        resume = [] if config.resume or config.resume_from else ["--resume"]
        count = processes or gpus_per_node or 1
        placed = ["--processes", str(count)] if count > 1 else []
        run_words, folder = [*python, "train", script, *words, *resume, *placed], Path(config.output_dir)
    wanted = {
        "--time": time, "--partition": partition, "--account": account, "--gpus-per-node": gpus_per_node or None,
        "--cpus-per-task": cpus_per_task, "--mem": mem,
    }  # fmt: skip
    options = [f"{option}={value}" for option, value in wanted.items() if value is not None] + list(sbatch or [])
    for option, text in (("--job-name", name), ("--output-dir", str(folder))):
        if "\n" in text:
            raise typer.BadParameter(f"{text!r}: a line of a batch script can't hold it.", param_hint=option)
    for option in options:
        if "\n" in option or not option.startswith("-"):
            raise typer.BadParameter(f"{option!r}: is no option of sbatch, such as --qos=high.", param_hint="--sbatch")
    array = next((f"--sbatch={option}" for option in options if _ARRAY.match(option)), "")
    if array or os.environ.get("SBATCH_ARRAY_INX"):  # which sbatch takes for it, and prefers to what is in its script
        raise Refusal(
            f"{array or 'SBATCH_ARRAY_INX'}: the jobs of an array would write into one output directory ({folder}). Submit "
            "once for each --output-dir; jobs that share the trials of a sweep are --sweep-workers N."
        )
    command = command_of_nodes(run_words, nodes=nodes)
    text = batch_script(
        name, f"{setup}\n    {command}" if setup else command,
        log=f"{folder}".replace("%", "%%") + f".slurm-{'%A_%a' if sweep_workers else '%j'}.log",
        nodes=nodes, array=sweep_workers, stop_seconds=stop_seconds, options=options,
    )  # fmt: skip
    if dry_run:
        say(text, end="")
        return
    number = _send(text, folder)
    log = f"{folder}.slurm-{number}{'_0' * bool(sweep_workers)}.log"
    size = f"{sweep_workers} workers" if sweep_workers else f"{nodes} node{'s' * (nodes > 1)}"
    say(f"Submitted {number}: {name}, {size}")
    for words in (["tail", "-F", log], ["squeue", "--job", number], ["scancel", number]):
        say("  " + as_typed(*words))


def command_of_nodes(words: Sequence[str], *, nodes: int) -> str:
    """Words of `toolkit train`, quoted for a shell, with the place of each node where there are several."""
    places = ' --nodes "$NODES" --node-rank "$NODE" --main-address "$MAIN" --main-port "$PORT"' if nodes > 1 else ""
    return shlex.join(words) + places


def _quoted(option: str) -> str:
    """An option that sbatch reads back whole: to it a space or a # ends a value, quotes and backslashes are a shell's."""
    name, equals, value = option.partition("=")
    if not equals or value[:1] in ("'", '"') or not re.search(r"[\s#'\"\\]", value):  # in quotes already, or nothing to quote
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'


def batch_script(
    name: str, command: str, *, log: str, nodes: int = 1, array: int | None = None, stop_seconds: int = 120,
    options: Sequence[str] = (),
) -> str:  # fmt: skip
    """The script for sbatch.

    A signal that Slurm sends to a step reaches all processes in it, so that is how the step is stopped. A command that ended
    with 75 (stopped after a checkpoint) is put back into the queue if it was stopped for its time, not if by scancel; its code
    becomes 0 until then, since srun ends the other nodes' tasks at the first other code, while they may be saving.

    Args:
        command: run on each node, with the variables NODES, NODE, MAIN and PORT (how many, which, where node 0 is reached).
        log: with %j, or %A and %a, for the job's number; another % is doubled.
        array: as many jobs that run the same command.
        stop_seconds: before the end of its time the job is stopped, with SIGUSR1.
        options: of sbatch, as "--time=4:00:00".
    """
    options = [
        f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", f"--output={log}", "--open-mode=append",
        "--requeue", f"--signal=B:USR1@{stop_seconds}", *([f"--array=0-{array - 1}"] if array else []), *options,
    ]  # fmt: skip
    lines = "\n".join(f"#SBATCH {_quoted(option)}" for option in options)
    return f"""#!/bin/bash
{lines}

export STOPPED=$(mktemp -u "${{TMPDIR:-/tmp}}/toolkit-stopped-$SLURM_JOB_ID-XXXXXX")  # job 7 of another cluster may be here too

run() {{  # on each node
    trap : USR1 TERM
    export NODES=$SLURM_NNODES NODE=$SLURM_NODEID MAIN=$SLURM_LAUNCH_NODE_IPADDR PORT=$((20000 + SLURM_JOB_ID % 20000))
    {command}
    code=$?
    if [ "$code" = 75 ]; then
        [ "$NODE" = 0 ] && : > "$STOPPED"
        exit 0
    fi
    exit "$code"
}}
export -f run

this=$SLURM_JOB_ID
# the number of one job of an array may be that of all of them
[ -n "$SLURM_ARRAY_TASK_ID" ] && this=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
out_of_time=
trap 'out_of_time=1; scancel --signal=USR1 "$this"' USR1  # the step, not this script
trap : TERM  # of scancel, or of a job that goes first: the step has it too, and is waited for
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c run &
step=$!
until wait "$step"; ! kill -0 "$step" 2> /dev/null; do :; done
wait "$step"
code=$?
if [ "$code" = 0 ] && [ -e "$STOPPED" ]; then
    rm -f "$STOPPED"
    code=75
    if [ -n "$out_of_time" ]; then
        echo "out of time: back into the queue"
        scontrol requeue "$this" && sleep 60  # until Slurm ends this script
    fi
fi
exit "$code"
"""


def _seconds(time: str) -> int:
    """Of a time as Slurm reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; 0 where it has no end."""
    if not time[0].isdigit():
        return 0
    days, _, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if not days and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _settings(script: str, words: list[str]) -> Any:
    """The recipe's settings, which are refused here as the recipe would refuse them, and not after hours in a queue."""
    from toolkit.command_line.reading import read_command_line
    from toolkit.command_line.recipe import config_class_of_file
    from toolkit.config import check_together

    config_class = config_class_of_file(Path(script))
    config: Any = read_command_line(config_class, words, {}, sys.modules[config_class.__module__].__doc__ or "")
    check_together(config)
    return config


def _send(text: str, folder: Path) -> str:
    """The number of the job that sbatch made of a script."""
    if shutil.which("sbatch") is None:
        raise Refusal("There is no sbatch on this machine. Type this where jobs are submitted; --dry-run shows the script.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    sent = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False)
    if sent.returncode:
        said = sent.stderr.strip().removeprefix("sbatch: ").replace("error: ", "").replace("\nsbatch:", ";")
        raise Refusal(f"sbatch refuses the job: {said or f'exit code {sent.returncode}'}")
    return sent.stdout.strip().partition(";")[0]

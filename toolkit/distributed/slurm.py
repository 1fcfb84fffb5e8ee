"""A command as a Slurm job: the batch script, which stops it ahead of the end of its time and puts it back into the queue."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence


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

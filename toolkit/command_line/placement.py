"""Where a recipe's ranks run: from --processes, --accelerate-config and --nodes to what is started on this machine."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from toolkit.command_line.recipe_file import complete_accelerate_config, find_accelerate_config
from toolkit.config import Refusal
from toolkit.config.setting import flag_of
from toolkit.distributed.accelerate_config import AccelerateConfig, check_devices, read_accelerate_config
from toolkit.distributed.launch import MAIN_PORT, ONE_MACHINE, TRAIN_OPTIONS, Nodes
from toolkit.system.console import as_typed

MOST_RANKS = 1 << 14  # processes of a machine, and machines: more than any has, and few enough to count

Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=MOST_RANKS, help="Processes on this machine, one for each GPU: those of the config file, or 1."
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE", help="An Accelerate config: a name of recipes/launch, such as zero2, or any file.",
        autocompletion=complete_accelerate_config,
    ),
]  # fmt: skip
NodeCount = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Machines; type the same command on each, with its --node-rank."),
]
NodeRank = Annotated[
    int | None, typer.Option(metavar="R", min=0, max=MOST_RANKS - 1, help="Which of the machines this is, from 0.")
]
MainAddress = Annotated[str | None, typer.Option(metavar="HOST", help="Where machine 0 is reached by all others.")]
MainPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=1, max=65535, help=f"The port there: {MAIN_PORT}; a free one on a single machine."),
]


@dataclass(frozen=True)
class Placement:
    """The ranks of this machine, and the machines. `typed`: the options that set it once more."""

    processes: int = 1
    nodes: Nodes = ONE_MACHINE
    config: AccelerateConfig | None = None
    typed: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """What each rank is given, apart from its place."""
        of_file = self.config.environment if self.config else {}
        return {**of_file, **({TRAIN_OPTIONS: shlex.join(self.typed)} if self.typed else {})}


def placement_of(values: Mapping[str, Any]) -> Placement:
    """What the options set together; where one isn't given, the Accelerate config file decides.

    Raises:
        typer.BadParameter: there is no such file.
        Refusal: options are missing or contradict each other; the file can't be read, or requires GPUs that are missing.
    """
    name = values["accelerate_config"]
    config = read_accelerate_config(find_accelerate_config(name)) if name else None
    nodes = _nodes(values, config)
    processes = values["processes"]
    if processes is None and config is not None:
        if config.processes is None:
            raise Refusal(f"{config.path} gives no num_processes: add --processes, the number on this machine.")
        check_devices(config)
    processes = processes or (config.processes if config else None) or 1
    typed = [] if processes == 1 else ["--processes", str(processes)]
    typed += ["--accelerate-config", name] if name else []
    if nodes.count > 1:
        typed += ["--nodes", str(nodes.count), "--node-rank", str(nodes.this), "--main-address", nodes.main_address]
    typed += ["--main-port", str(values["main_port"])] if values.get("main_port") else []
    return Placement(processes, nodes, config, tuple(typed))


def what_is_started(placement: Placement, script: str, words: Sequence[str]) -> str:
    """One line: what is started, as it would be typed without `toolkit train`."""
    processes, nodes, config = placement.processes, placement.nodes, placement.config
    number = processes * nodes.count
    if number == 1 and config is None:
        return f"starting: {as_typed('python', script, *words)}"
    # --cpu would start a single process (Accelerate 1.15); where there is no GPU, a recipe's ranks take the CPU by themselves.
    options = ["--config_file", config.path] if config else ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    options += ["--num_processes", str(number)]
    if config is None or config.machines != nodes.count:
        options += ["--num_machines", str(nodes.count)]
    if nodes.count > 1:
        options += ["--machine_rank", str(nodes.this), "--main_process_ip", nodes.main_address]
        options += ["--main_process_port", str(nodes.main_port or MAIN_PORT)]
        if config is not None and config.distributed_type == "DEEPSPEED":
            options += ["--deepspeed_multinode_launcher", "standard"]  # else pdsh, over ssh
    command = as_typed("accelerate", "launch", *options, script, *words)
    if config is not None and config.on_cpu:
        command = f"ACCELERATE_USE_CPU=true {command}"
    here = f", here {processes}" if nodes.count > 1 else ""
    return f"starting {number} process{'es' * (number > 1)}{here}, as would: {command}"


def _nodes(values: Mapping[str, Any], config: AccelerateConfig | None) -> Nodes:
    def given(option: str, in_file: Any) -> Any:
        value = values.get(option)
        return in_file if value is None else value

    count = given("nodes", config.machines if config else 1)
    port = given("main_port", config.main_port if config else None)
    if count == 1:
        for option in ("node_rank", "main_address"):
            if values.get(option) is not None:
                raise Refusal(f"{flag_of(option)} has no effect with one node. For several add --nodes, such as --nodes 2.")
        return Nodes(main_port=port)
    this = given("node_rank", config.machine_rank if config else None)
    address = given("main_address", config.main_address if config else None)
    for option, value in (("main_address", address), ("node_rank", this)):
        if value is None:
            raise Refusal(
                f"{flag_of(option)} is missing: there are {count} nodes. Type on node 0, on the others with their own rank: "
                f"--nodes {count} --node-rank 0 --main-address HOST, where HOST is the name or address of node 0."
            )
    if not 0 <= this < count:
        raise Refusal(f"--node-rank {this}: the {count} nodes are 0 to {count - 1}.")
    return Nodes(count, this, address, port)

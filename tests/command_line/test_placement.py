"""From the options of `toolkit train` to the ranks of this machine, what they are given, and how a run is continued.

Each test names the one-line change under which it fails.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.command_line.placement import placement_of, what_is_started
from toolkit.config import Refusal
from toolkit.distributed.accelerate_config import read_accelerate_config
from toolkit.distributed.launch import MAIN_PORT, Nodes

pytestmark = pytest.mark.warm
COLD = sys.executable  # for tests of what is imported, or of how a process was started

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("processes", "accelerate_config", "nodes", "node_rank", "main_address", "main_port")
SHOWS_ITS_RANK = """
import json, os
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "FSDP_VERSION", "TOOLKIT_TRAIN_OPTIONS")
print(json.dumps([os.environ.get(name) for name in names]), flush=True)
"""


def placement(**options: Any) -> Any:
    return placement_of({**dict.fromkeys(OPTIONS), **options})


def written(tmp_path: Path, **keys: Any) -> str:
    file = tmp_path / "mine.yaml"
    content = {"distributed_type": "MULTI_GPU", "num_processes": 6, "use_cpu": True, **keys}
    file.write_text("".join(f"{key}: {value}\n" for key, value in content.items()))
    return str(file)


def train(folder: Path, source: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(source)
    command = [sys.executable, "-m", "toolkit", "train", "mine.py", *words]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, env=environment, check=False)


def test_options_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    """Fails when: num_processes of several machines is taken for those of one, or the file's machine_rank is forgotten."""
    both = {"num_machines": 3, "machine_rank": 2, "main_process_ip": "10.0.0.7", "main_process_port": 1234}
    found = placement(accelerate_config=written(tmp_path, **both))
    assert (found.processes, found.nodes) == (2, Nodes(3, 2, "10.0.0.7", 1234))
    found = placement(accelerate_config=written(tmp_path, **both), processes=4, nodes=2, node_rank=0, main_address="a", main_port=99)
    assert (found.processes, found.nodes) == (4, Nodes(2, 0, "a", 99))
    found = placement(accelerate_config=written(tmp_path, **both), nodes=1)
    assert (found.processes, found.nodes.count) == (2, 1)
    assert (placement().processes, placement().nodes, placement().environment) == (1, Nodes(), {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": 2}, "--main-address is missing"),
        ({"nodes": 2, "main_address": "a"}, "--node-rank is missing"),
        ({"nodes": 2, "node_rank": 2, "main_address": "a"}, "--node-rank 2: the 2 nodes are 0 to 1"),
        ({"main_address": "a"}, "--main-address .*one node"),
        ({"node_rank": 0, "nodes": 1}, "--node-rank .*one node"),
    ],
)
def test_nodes_that_are_missing_something_or_contradict_each_other_are_refused(options: dict[str, Any], said: str) -> None:
    """Fails when: a forgotten --node-rank counts as 0, and two machines both are the first."""
    with pytest.raises(Refusal, match=said):
        placement(**options)


def test_a_file_that_leaves_the_number_open_wants_it_on_the_command_line(tmp_path: Path) -> None:
    """Fails when: one process is started where the file says that the user gives their number."""
    path = written(tmp_path, num_processes=-1)
    with pytest.raises(Refusal, match="add --processes"):
        placement(accelerate_config=path)
    assert placement(accelerate_config=path, processes=3).processes == 3


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "starting: python X.py"),
        ({"accelerate_config": "zero2", "processes": 3}, "3 processes, as would: accelerate launch --config_file {launch}/zero2.yaml --num_processes 3 X.py"),
        ({"accelerate_config": "zero2", "processes": 1}, "1 process, as would: accelerate launch --config_file {launch}/zero2.yaml --num_processes 1 X.py"),
        ({"accelerate_config": "cpu2"}, "2 processes, as would: ACCELERATE_USE_CPU=true accelerate launch --config_file {launch}/cpu2.yaml --num_processes 2 X.py"),
        (
            {"accelerate_config": "zero1", "processes": 4, "nodes": 2, "node_rank": 1, "main_address": "a"},
            "8 processes, here 4, as would: accelerate launch --config_file {launch}/zero1.yaml --num_processes 8 --num_machines 2 "
            "--machine_rank 1 --main_process_ip a --main_process_port 29500 --deepspeed_multinode_launcher standard X.py",
        ),
        (
            {"accelerate_config": "multi_node", "processes": 4, "node_rank": 1, "main_address": "a"},
            "8 processes, here 4, as would: accelerate launch --config_file {launch}/multi_node.yaml --num_processes 8 "
            "--machine_rank 1 --main_process_ip a --main_process_port 29500 X.py",
        ),
    ],
)  # fmt: skip
def test_what_is_started_is_shown_as_accelerate_would_start_it(options: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate counts the processes of all machines. Fails when: those of one are shown, or a file's name for its path."""
    monkeypatch.chdir(ROOT)
    shown = what_is_started(placement(**options), "X.py", [])
    assert shown == ("" if line.startswith("starting") else "starting ") + line.format(launch="recipes/launch")


@pytest.mark.parametrize(("nodes", "name"), [(1, "zero1"), (2, "zero1"), (2, "multi_node"), (2, None)])
def test_accelerate_understands_the_line_that_is_shown(nodes: int, name: str | None) -> None:
    """By its own parser. Fails when: an option is misspelled, or DeepSpeed on two machines is left to pdsh."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    where = {"nodes": nodes, "node_rank": 1, "main_address": "a"} if nodes > 1 else {}
    shown = what_is_started(placement(accelerate_config=name, processes=4, **where), "X.py", ["--flag"])
    found, _, _ = _validate_launch_command(launch_command_parser().parse_args(shlex.split(shown.partition("accelerate launch ")[2])))
    assert (found.num_processes, found.num_machines, found.training_script, found.training_script_args) == (4 * nodes, nodes, "X.py", ["--flag"])
    assert (found.use_deepspeed, found.multi_gpu) == (name == "zero1", name != "zero1")
    if nodes > 1:
        assert (int(found.machine_rank), found.main_process_ip, found.main_process_port) == (1, "a", MAIN_PORT)
        assert name != "zero1" or found.deepspeed_multinode_launcher == "standard"


def test_every_rank_is_told_what_the_file_means_wherever_the_option_stands(tmp_path: Path) -> None:
    """Fails when: the file's environment isn't handed to the ranks, or the option reaches the recipe."""
    ran = train(tmp_path, SHOWS_ITS_RANK, "--processes", "2", "--accelerate_config=zero3")
    assert ran.returncode == 0, ran.stderr
    options = '"--processes 2 --accelerate-config zero3"'
    assert sorted(ran.stdout.splitlines()) == [f'["{rank}", "2", "127.0.0.1", "3", null, {options}]' for rank in (0, 1)]


def test_one_rank_of_an_engine_is_a_group_of_one_as_with_accelerate(tmp_path: Path) -> None:
    """Fails when: a single process is started plain, where DeepSpeed and FSDP look for RANK."""
    ran = train(tmp_path, SHOWS_ITS_RANK, "--processes", "1", "--accelerate-config", "fsdp2")
    assert ran.stdout == '["0", "1", "127.0.0.1", null, "2", "--accelerate-config fsdp2"]\n'
    ran = train(tmp_path, SHOWS_ITS_RANK, "--processes", "1", "--accelerate-config", "ddp")
    assert ran.stdout == '[null, null, null, null, null, "--accelerate-config ddp"]\n'


def test_a_file_for_more_gpus_than_there_are_ends_with_2_and_one_message(tmp_path: Path) -> None:
    """Fails when: the refusal of a file isn't one of the command line, and its traceback is shown."""
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 1000\n")
    ran = train(tmp_path, SHOWS_ITS_RANK, "--accelerate-config", "mine.yaml")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("refused: mine.yaml: 1000 processes ")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "repeated"),
    [
        ({}, []),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}, ["--processes", "2"]),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"},
            ["--processes", "2", "--nodes", "2", "--node-rank", "1", "--main-address", "10.0.0.7"],
        ),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "TOOLKIT_TRAIN_OPTIONS": "--processes 2 --accelerate-config 'my file.yaml'"},
            ["--processes", "2", "--accelerate-config", "my file.yaml"],
        ),
    ],
    ids=["alone", "torchrun", "torchrun on two machines", "toolkit train"],
)  # fmt: skip
def test_the_command_that_continues_repeats_how_the_ranks_were_started(
    given: dict[str, str], repeated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when: the engine's file or the nodes are left out, and the run continues as another world."""
    from toolkit.training.stopping import continuing_command

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "GROUP_RANK", "TOOLKIT_TRAIN_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["recipes/sft.py", "--seed", "3"])
    starter = ["-m", "toolkit", "train", *repeated] if repeated else []
    assert shlex.split(continuing_command()) == [sys.executable, *starter, "recipes/sft.py", "--seed", "3", "--resume"]


@pytest.mark.parametrize(
    "typed",
    [
        "python 'my recipe.py' --run-name 'a b'",
        "toolkit train 'my recipe.py' --run-name 'a b' --processes 1",
        "{bin}/python -m toolkit train --processes 2 'my recipe.py' --run-name 'a b'",
        pytest.param("accelerate launch --cpu 'my recipe.py' --run-name 'a b'", marks=pytest.mark.slow),
        pytest.param("torchrun --nproc-per-node 1 'my recipe.py' --run-name 'a b'", marks=pytest.mark.slow),
    ],
)
def test_the_command_that_continues_is_what_was_typed(tmp_path: Path, typed: str) -> None:
    """By a shell, with the launcher and its options. Fails when: `launcher_words` is left out, or the interpreter behind a script's
    first line is shown."""
    bin_folder = Path(COLD).parent
    (tmp_path / "my recipe.py").write_text("from toolkit.training.stopping import continuing_command\nprint(f'SAID {continuing_command()}\\n', end='')\n")
    typed = typed.replace("{bin}/python", shlex.quote(f"{bin_folder}/python"))
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", f"{typed}; exit $?"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert set(re.findall(r"^SAID (.*)$", done.stdout, re.MULTILINE)) == {f"{typed} --resume"}


def test_help_waits_for_no_heavy_import() -> None:
    """Fails when: Accelerate's launcher, and torch with it, is imported where no config file was given."""
    listing = (
        "import sys; sys.argv = ['toolkit', 'train', '--help']\n"
        "import toolkit.cli.main as main\n"
        "try: main.main()\n"
        "except SystemExit: print('HEAVY', *{'torch', 'accelerate', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([COLD, "-c", listing], capture_output=True, text=True, cwd=ROOT, timeout=30, check=True)
    assert "--accelerate-config" in done.stdout
    assert done.stdout.rpartition("HEAVY")[2].split() == []


def test_the_file_read_is_the_one_named() -> None:
    """Fails when: a name is looked up in another folder than recipes/launch."""
    assert placement(accelerate_config="fsdp2_offload", processes=2).config == read_accelerate_config(os.path.relpath(ROOT / "recipes/launch/fsdp2_offload.yaml"))

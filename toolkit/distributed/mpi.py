"""Ranks that mpirun started: their place, as MPI has it, in the variables that torch.distributed reads."""

import os
import zlib
from collections.abc import MutableMapping

from toolkit.config import Refusal

# Rank, number of ranks, and the same on this host.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
)
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # one text for all ranks of a job: Open MPI from 2 on, and before
_PORTS = range(20000, 32768)  # below those that Linux hands out by itself


def adopt_mpi_ranks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE and their like where mpirun started several ranks, so that `mpirun -np 2 python X.py` trains.

    Nothing changes where RANK or WORLD_SIZE is set, or where there is one rank. Without MASTER_ADDR the ranks of one host meet
    on loopback. Without MASTER_PORT each derives the same port from the job's name, so that two jobs on a host don't collide.

    Raises:
        Refusal: several hosts and no MASTER_ADDR, or a rank whose local rank is not set.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return
    for names in _OF_MPI:
        if int(environment.get(names[1], 1)) > 1 and names[0] in environment:
            _adopt(names, environment)
            return


def _adopt(names: tuple[str, ...], environment: MutableMapping[str, str]) -> None:
    from toolkit.distributed.launch import MAIN_PORT, threads_of_a_rank

    # The rank first: a refusal that all of them meet is printed by rank 0.
    environment["RANK"] = environment[names[0]]
    if missing := [name for name in names if name not in environment]:
        raise Refusal(
            f"{names[1]} shows that MPI started {environment[names[1]]} ranks, but {' and '.join(missing)} (the place on its "
            "host) is not set. Start them with toolkit train RECIPE --processes N, or with torchrun."
        )
    for ours, theirs in zip(_NAMES, names, strict=True):
        environment[ours] = environment[theirs]
    on_this_host = int(environment["LOCAL_WORLD_SIZE"])
    if "MASTER_ADDR" not in environment:
        if on_this_host != int(environment["WORLD_SIZE"]):
            raise Refusal(
                f"mpirun started {environment['WORLD_SIZE']} ranks, {on_this_host} of them on this host: where they meet must "
                "be set. Type: mpirun -x MASTER_ADDR=HOST ..., where HOST is the name or address of the host of rank 0 "
                "(with MPICH and Intel MPI: mpirun -genv MASTER_ADDR HOST ...)."
            )
        environment["MASTER_ADDR"] = "127.0.0.1"
    job = next((environment[name] for name in _JOBS if name in environment), None)
    port = MAIN_PORT if job is None else _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
    environment.setdefault("MASTER_PORT", str(port))
    environment.setdefault("OMP_NUM_THREADS", str(threads_of_a_rank(on_this_host)))

"""What mpirun tells a rank becomes what torch.distributed asks for.

Each test names the one-line change under which it fails.
"""

import pytest

from toolkit.config import Refusal
from toolkit.distributed import launch as launching
from toolkit.distributed.mpi import adopt_mpi_ranks


def open_mpi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}, **more}


def adopted(environment: dict[str, str]) -> dict[str, str]:
    adopt_mpi_ranks(environment)
    return environment


@pytest.mark.parametrize(
    "given",
    [
        open_mpi(3, 4, 3, 4),
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"},
    ],
    ids=["Open MPI", "MPICH and Intel MPI"],
)
def test_a_rank_of_one_host_learns_its_place_and_where_to_meet(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: LOCAL_RANK is taken for RANK's variable, or the threads are those of the whole machine."""
    monkeypatch.setattr(launching, "usable_cores", lambda: 9)
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    assert adopted(dict(given)) == {**given, **place, "MASTER_PORT": "29500", "OMP_NUM_THREADS": "2"}


def test_ranks_of_one_job_meet_at_one_port_and_other_jobs_at_others() -> None:
    """Fails when: the port is fixed, so that two trainings on a host collide, or depends on the rank."""
    jobs = [f"job-{number}" for number in range(50)]
    ports = {job: {adopted(open_mpi(rank, 2, rank, 2, PMIX_NAMESPACE=job))["MASTER_PORT"] for rank in (0, 1)} for job in jobs}
    assert all(len(found) == 1 for found in ports.values())
    taken = [int(port) for found in ports.values() for port in found]
    assert len(set(taken)) >= 49
    assert all(20000 <= port < 32768 for port in taken)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        open_mpi(0, 1, 0, 1),
        open_mpi(1, 2, 1, 2, RANK="0", WORLD_SIZE="1"),
        open_mpi(1, 2, 1, 2, WORLD_SIZE="8"),
    ],
    ids=["no MPI", "one rank", "torchrun inside", "set by hand"],
)
def test_what_is_no_rank_of_mpi_stays_as_it_is(environment: dict[str, str]) -> None:
    """Fails when: variables of another launcher are overwritten, or a single process is made a group."""
    assert adopted(dict(environment)) == environment


def test_what_is_set_wins_over_what_is_derived() -> None:
    """Fails when: -x MASTER_PORT or OMP_NUM_THREADS of the user is overwritten."""
    given = {"MASTER_ADDR": "node7", "MASTER_PORT": "1234", "OMP_NUM_THREADS": "5", "PMIX_NAMESPACE": "job"}
    found = adopted(open_mpi(5, 8, 1, 4, **given))
    assert {name: found[name] for name in given} == given
    assert (found["RANK"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("5", "1", "4")


def test_several_hosts_without_an_address_are_refused_with_what_to_type() -> None:
    """Fails when: loopback is taken, where ranks of another host wait for ever. Rank 0 alone says so: it has its rank by then."""
    environment = open_mpi(5, 8, 1, 4)
    with pytest.raises(Refusal, match=r"8 ranks, 4 .*mpirun -x MASTER_ADDR=HOST"):
        adopt_mpi_ranks(environment)
    assert environment["RANK"] == "5"


def test_a_rank_that_is_not_told_its_place_on_its_host_is_refused() -> None:
    """As by srun with PMI. Fails when: a missing number is taken for 0, and all ranks take the first GPU."""
    with pytest.raises(Refusal, match="MPI_LOCALRANKID and MPI_LOCALNRANKS"):
        adopt_mpi_ranks({"PMI_RANK": "1", "PMI_SIZE": "4"})

"""Which rank this is, and a channel between the ranks that is not Horovod's. Knows no framework."""

import os

SPECS = [
    "none",
    "fp16",
    "bf16",
    "adacomp",
    "adacomp:bin=50,c=1",
    "qsgd:bits=4",
    "qsgdinf:bits=2",
    "nuqsgd:bits=4",
    "nuqsgd:bits=3,bucket=100,coding=elias",
    "qsgd:bits=8,feedback=true",
    "onebit",
]
COMPRESSED = [spec for spec in SPECS if spec not in ("none", "fp16")]
WITH_RESIDUAL = ["adacomp", "qsgd:bits=8,feedback=true", "onebit:scale=l2"]


def rank():
    """The own one, before Horovod is initialized too."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", 0)))


def gather(value, hvd):
    """That value of every rank, in order: over mpi4py, and over Horovod itself only where there is no MPI."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        from mpi4py import MPI

        return MPI.COMM_WORLD.allgather(value)
    return hvd.allgather_object(value)


def assert_equal_on_all_ranks(arrays, hvd):
    """Bitwise."""
    mine = [array.tobytes() for array in arrays]
    for other, theirs in enumerate(gather(mine, hvd)):
        assert theirs == mine, f"rank {rank()} and rank {other} differ"

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
    "qsgd:bits=8,error_feedback=true",
    "nuqsgd:bits=auto",
    "onebit",
    "topk:fraction=0.05",
    "randomk:fraction=0.2",
    "cat",
    "cat:scheme=topk+sign,cost=time,latency=1e-4,bandwidth=1e8",
    "cat:scheme=stochastic,cost=packets,scope=model",
]
COMPRESSED = [spec for spec in SPECS if spec not in ("none", "fp16")]
WITH_RESIDUAL = [
    "adacomp",
    "qsgd:bits=8,error_feedback=true",
    "onebit:scale=l2",
    "topk",
    "randomk:fraction=0.1",
    "cat:cost=time,latency=1e-6,bandwidth=1e8",
    "cat:scheme=topk+sign,cost=packets,scope=model",
]


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

"""Ranks that do not agree, and what is not supported: an error on every rank, with a sentence, within the first step."""

import time
import warnings

import horovod.torch as hvd
import pytest
import torch
from helpers import Vectors, assert_equal_on_all_ranks, distributed, random
from horovod.common.exceptions import HorovodInternalError

import hvd_compress.plan
import hvd_compress.torch.compressor
from hvd_compress import PayloadError
from hvd_compress.message import MessageWriter
from hvd_compress.torch import Compression, MismatchError
from hvd_compress.torch.exchange import Exchange

HEAD = MessageWriter.HEADER_BYTES + MessageWriter.ENTRY_BYTES

pytestmark = pytest.mark.gloo


def first_step(model, optimizer, **gradients):
    optimizer.zero_grad()
    model.backward(**gradients)
    optimizer.step()


def mine(first, other):
    return first if hvd.rank() == 0 else other


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        ("adacomp", "qsgd:bits=4", "spec: rank 0 has 'adacomp:c=2', rank 1 has 'qsgd:bits=4,bucket=512'"),
        ("qsgd:bits=4", "qsgd:bits=3", "spec: rank 0 has 'qsgd:bits=4,bucket=512', rank 1 has 'qsgd:bits=3,bucket=512'"),
        ("none", "adacomp", "spec: rank 0 has 'none', rank 1 has 'adacomp:c=2'"),
    ],
)
def test_specs(first, other, text):
    model = Vectors(w=(40, 40), b=(20,))
    optimizer, _ = distributed(model, mine(first, other))
    with pytest.raises(MismatchError, match=text):
        first_step(model, optimizer, w=random(40, 40), b=random(20))


def test_policies():
    model = Vectors(w=(40, 40), b=(20,))
    optimizer, _ = distributed(model, "adacomp", overrides=mine({}, {"w": "none"}))
    with pytest.raises(MismatchError, match="spec of 'w': rank 0 has 'adacomp:bin=500,c=2', rank 1 has 'none'"):
        first_step(model, optimizer, w=random(40, 40), b=random(20))


def test_shapes():
    shape = mine((40, 40), (40, 41))
    model = Vectors(w=shape)
    optimizer, _ = distributed(model, "adacomp")
    with pytest.raises(MismatchError, match=r"shape of 'w': rank 0 has \[40, 40\], rank 1 has \[40, 41\]"):
        first_step(model, optimizer, w=random(*shape))


def test_names():
    name = mine("w", "v")
    model = Vectors(**{name: (40, 40)})
    optimizer, _ = distributed(model, "adacomp")
    with pytest.raises(MismatchError, match="parameters: rank 0 has 'w', rank 1 has not"):
        first_step(model, optimizer, **{name: random(40, 40)})


def test_versions(monkeypatch):
    monkeypatch.setattr(hvd_compress.plan, "__version__", mine("1.0", "1.1"))
    model = Vectors(w=(40, 40))
    optimizer, _ = distributed(model, "adacomp")
    with pytest.raises(MismatchError, match=r"hvd_compress version: rank 0 has '1.0', rank 1 has '1.1'"):
        first_step(model, optimizer, w=random(40, 40))


def test_layouts():
    model = Vectors(w=(8, 8, 5, 5))
    model.w.data = model.w.data.to(memory_format=mine(torch.contiguous_format, torch.channels_last))
    optimizer, _ = distributed(model, "adacomp")
    with pytest.raises(MismatchError, match="layout of 'w': rank 0 has 'row-major', rank 1 has 'strides"):
        first_step(model, optimizer, w=random(8, 8, 5, 5))


def test_state_that_only_one_rank_has_loaded():
    model = Vectors(w=(40, 40))
    optimizer, compression = distributed(model, "adacomp")
    if hvd.rank() == 0:
        compression.load_state_dict({**compression.state_dict(), "step": 7})
    with pytest.raises(MismatchError, match=r"at step [18].*load_state_dict"):
        first_step(model, optimizer, w=random(40, 40))


def test_adasum(ranks):
    if ranks & (ranks - 1):
        return  # Horovod itself takes it only on a power of two of ranks
    model = Vectors(w=(40, 40))
    compression = Compression.adacomp(model.named_parameters())
    _optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression, op=hvd.Adasum
    )
    with pytest.raises(ValueError, match="op=Adasum is not supported together with hvd_compress"):
        model.backward(w=random(40, 40))


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_ops(op):
    model = Vectors(w=(40, 40))
    optimizer, _ = distributed(model, "bf16", optimizer_options={"op": getattr(hvd, op)})
    with pytest.raises(ValueError, match=r"takes op=hvd.Average and op=hvd.Sum, no other op"):
        first_step(model, optimizer, w=random(40, 40))


@pytest.mark.parametrize(
    ("spec", "exchange"),
    [("adacomp", "allgather"), ("qsgd:bits=4", "allgather"), ("onebit", "scatter-gather"), ("cat", "allgather")],
)
def test_join(spec, exchange):
    model = Vectors(w=(40, 40))
    optimizer, _ = distributed(model, spec, exchange=exchange)
    for step in range(3):
        first_step(model, optimizer, w=random(40, 40, step=step))
    if hvd.rank() != 0:
        with pytest.raises(RuntimeError, match=r"hvd.join\(\) is not supported together with hvd_compress"):
            first_step(model, optimizer, w=random(40, 40))
    hvd.join()


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(hvd_compress.torch.compressor, "PLAN_SECONDS", 0.2)


@pytest.mark.parametrize("exchange", ["allgather", "scatter-gather", "auto"])
@pytest.mark.usefixtures("_impatient")
def test_codec_that_only_one_rank_has_changed(exchange):
    """Under "auto", and with three ranks, it also changes the exchange: ranks must not wait for each other's messages then."""
    model = Vectors(b=(30,), w=(40, 40))
    optimizer, compression = distributed(model, "adacomp", exchange=exchange)
    first_step(model, optimizer, w=random(40, 40), b=random(30))
    if hvd.rank() == 0:
        compression.set_codec("qsgd:bits=4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(MismatchError, match=r"has another plan than rank .*Was set_codec\(\) called on every rank"):
            first_step(model, optimizer, w=random(40, 40), b=random(30))


def test_exchanges():
    model = Vectors(w=(40, 40))
    optimizer, _ = distributed(model, "onebit", exchange=mine("allgather", "scatter-gather"))
    with pytest.raises(MismatchError, match="exchange: rank 0 has 'allgather', rank 1 has 'scatter-gather'"):
        first_step(model, optimizer, w=random(40, 40))


@pytest.mark.usefixtures("_impatient")
def test_rank_that_comes_late_is_waited_for():
    model = Vectors(w=(40, 40))
    optimizer, _ = distributed(model, "adacomp")
    if hvd.rank() == 1:
        time.sleep(1)
        first_step(model, optimizer, w=random(40, 40))
    else:
        with pytest.warns(UserWarning, match="have announced their compression"):
            first_step(model, optimizer, w=random(40, 40))
    first_step(model, optimizer, w=random(40, 40))
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.filterwarnings("ignore:not all")
@pytest.mark.usefixtures("_impatient")
def test_rank_without_our_compression():
    """Horovod itself then finds that the shapes differ: an error on every rank, and no hang."""
    model = Vectors(w=(40, 40))
    compression = Compression.adacomp(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), mine(compression, hvd.Compression.none)
    )
    with pytest.raises(HorovodInternalError, match=r"(?i)mismatched allreduce tensor shapes"):
        first_step(model, optimizer, w=random(40, 40))


@pytest.mark.parametrize("spec", ["onebit", "qsgd:bits=4", "adacomp", "cat:scheme=topk+sign,cost=packets", "randomk"])
def test_a_damaged_payload_is_an_error_on_every_rank(spec, exchange, monkeypatch):
    """In a scatter-gather one rank alone sees it; the others wait for what it makes of it."""
    model = Vectors(w=(40, 40))
    optimizer, _ = distributed(model, spec)
    first_step(model, optimizer, w=random(40, 40))
    names = {"allgather": "allgather_async", "scatter-gather": "alltoall_async"}
    send = getattr(Exchange, names[exchange])

    def damaged(self, name, data, *lengths):
        data = data.copy()
        data[(lengths[0][0] if lengths else 0) + HEAD + 5] ^= 0x10  # of what goes to rank 1
        return send(self, name, data, *lengths)

    if hvd.rank() == 0:
        monkeypatch.setattr(Exchange, names[exchange], damaged)
    text = "checksum" if exchange == "allgather" or hvd.rank() == 1 else "what rank 1 received was damaged"
    with pytest.raises(PayloadError, match=text):
        first_step(model, optimizer, w=random(40, 40))

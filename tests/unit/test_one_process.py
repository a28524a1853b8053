"""With one process nothing is compressed, and training is what it would be without us."""

import copy
import dataclasses
import inspect

import horovod.torch as hvd
import pytest
import torch
from horovod.torch.compression import Compressor

from hvd_compress.codecs.cost import Costed
from hvd_compress.torch import Compression
from hvd_compress.torch.exchange import StandIn


@pytest.fixture(scope="module", autouse=True)
def _horovod():
    hvd.init()


def trained(compression_of):
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = compression_of(model)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), compression


@pytest.mark.parametrize("elastic", [False, True], ids=["plain", "elastic"])
@pytest.mark.parametrize("spec", ["adacomp", "qsgd:bits=2", "fp16", "bf16", "none"])
def test_training_is_dense(spec, elastic, monkeypatch):
    if elastic:  # Horovod then calls the compressor even in one process
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    expected, _ = trained(lambda model: hvd.Compression.none)
    got, compression = trained(lambda model: Compression.from_spec(spec, model.named_parameters()))
    assert torch.equal(got, expected)
    assert compression.stats.total.bytes_sent == 0


def test_all_are_horovods_compressors():
    parameters = list(torch.nn.Linear(40, 40).named_parameters())
    for name in ("adacomp", "qsgd", "qsgdinf", "nuqsgd", "onebit", "fp16", "bf16", "none"):
        assert isinstance(getattr(Compression, name)(parameters), Compressor)
    assert issubclass(Compression.none, hvd.Compression.none)
    assert issubclass(Compression.fp16, hvd.Compression.fp16)
    assert isinstance(Compression.fp16(), hvd.Compression.fp16)
    assert isinstance(Compression.from_spec("none"), hvd.Compression.none)


def test_options_reach_the_codec():
    parameters = list(torch.nn.Linear(40, 40).named_parameters())
    assert str(Compression.adacomp(parameters, bin=100, c=1)) == "adacomp:bin=100,c=1"
    assert str(Compression.nuqsgd(parameters, bits=3, bucket=64, coding="elias")) == "nuqsgd:bits=3,bucket=64,coding=elias"
    assert str(Compression.from_spec("qsgd:bits=2", parameters)) == "qsgd:bits=2,bucket=512"


def test_what_is_no_algorithm():
    with pytest.raises(AttributeError, match=r"no algorithm .adacmp.: there are adacomp, bf16, .*nuqsgd, onebit, qsgd"):
        _ = Compression.adacmp
    with pytest.raises(TypeError, match=r"pass Compression.adacomp\(model.named_parameters\(\)\), for example"):
        _ = Compression.compress
    with pytest.raises(TypeError, match=r"pass Compression.from_spec\(spec, model.named_parameters\(\)\)"):
        Compression.from_spec.compress(None)


def test_what_is_printed():
    compression = Compression.adacomp(torch.nn.Linear(3, 3).named_parameters(), bin=50)
    assert repr(compression) == "<hvd_compress.torch compression adacomp:bin=50,c=2 of 2 parameters>"
    assert repr(compression.stats) == "<Stats of 0 steps: 0 bytes sent, ratio 1.0>"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": 7}, "name=7 is not allowed; allowed is a string of at least one character"),
        ({"name": 'my "model"'}, "is not allowed; allowed is a string of at least one character, without quotes"),
        ({"overrides": []}, r"overrides=\[\] is not allowed; allowed is a dict of name pattern to spec"),
        ({"bin": 0}, "bin=0 is not allowed; allowed is a whole number from 1 to 16383"),
        ({"c": 0.5}, "c=0.5 is not allowed"),
        ({"min_numel": -1}, "min_numel=-1 is not allowed"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 is not allowed"),
        ({"seed": -1}, "seed=-1 is not allowed"),
        ({"process_set": 3}, "process_set=3 is not allowed"),
        ({"grad_scaler": 3}, "grad_scaler=3 is not allowed"),
        ({"overrides": {"nothing": "none"}}, "the pattern 'nothing' matches no parameter; there are 'weight', 'bias'"),
        ({"overrides": {"weight": "topq"}}, "no codec is named 'topq'"),
        ({"overrides": 3}, "overrides=3 is not allowed"),
        ({"overrides": {3: "none"}}, "the pattern 3 is not allowed"),
        ({"bits": 4}, "adacomp: unknown option 'bits': there are bin, c, min_numel, "),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=text):
        Compression.adacomp(torch.nn.Linear(40, 40).named_parameters(), **options)


def test_bad_parameters():
    with pytest.raises(ValueError, match="the name 'a' twice"):
        Compression.adacomp([("a", torch.nn.Parameter(torch.zeros(2))), ("a", torch.nn.Parameter(torch.zeros(2)))])
    with pytest.raises(ValueError, match=r"takes \(name, parameter\) pairs"):
        Compression.adacomp(torch.nn.Linear(4, 4).parameters())
    with pytest.raises(ValueError, match=r"a Linear: it takes model.named_parameters\(\)"):
        Compression.adacomp(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="named_parameters is empty"):
        Compression.adacomp([])
    with pytest.raises(TypeError, match=r"cat needs parameters: pass Compression\.cat\(model\.named_parameters\(\)\)"):
        Compression.cat(cost="bits")
    with pytest.raises(TypeError, match="needs parameters"):
        Compression.from_spec("adacomp")
    with pytest.raises(ValueError, match="has no option 'seed'"):
        Compression.from_spec("none", seed=1)


def test_copies():
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(Compression.adacomp(torch.nn.Linear(4, 4).named_parameters()))


def test_passed_without_being_called():
    model = torch.nn.Linear(40, 40)
    with pytest.raises(TypeError, match=r"pass Compression.adacomp\(model.named_parameters\(\)\)"):
        Compression.adacomp.compress(model.weight)


@pytest.mark.parametrize("size", [2, 3, 64, 4096])
def test_stand_in_tells_what_the_op_is(size):
    stand_ins = torch.stack([StandIn.make(rank, size, 12345) for rank in range(size)])
    rounded = 1 + 2e-6  # as a ring's float32 sum may be off
    assert StandIn.read(stand_ins.double().mean(0).float() * rounded, size, 12345) == (1, True)
    assert StandIn.read(stand_ins.double().sum(0).float() * rounded, size, 12345) == (size, True)
    for other in (stand_ins.amin(0), stand_ins.amax(0), stand_ins.prod(0)):
        with pytest.raises(ValueError, match="no other op"):
            StandIn.read(other, size, 12345)


@pytest.mark.parametrize("size", [2, 3, 64])
def test_stand_in_tells_that_ranks_have_joined(size):
    stand_ins = torch.stack([StandIn.make(rank, size, 12345) for rank in range(size)])
    for joined in range(1, size):
        stand_ins[joined] = 0
        for reduced in (stand_ins.mean(0), stand_ins.sum(0)):
            with pytest.raises((RuntimeError, ValueError), match=r"hvd.join\(\)"):
                StandIn.read(reduced, size, 12345)


@pytest.mark.parametrize("size", [2, 3, 64])
@pytest.mark.parametrize("digest", [12344, 12345 + 256])
def test_stand_in_tells_that_a_rank_has_another_plan(size, digest):
    stand_ins = torch.stack([StandIn.make(rank, size, digest if rank == 1 else 12345) for rank in range(size)])
    for own in (12345, digest):
        assert StandIn.read(stand_ins.mean(0), size, own) == (1, False)
        assert StandIn.read(stand_ins.sum(0), size, own) == (size, False)


def test_help_tells_the_options():
    signature = inspect.signature(Compression.cat)
    costs = [field.name for field in dataclasses.fields(Costed)]
    assert [name for name in signature.parameters if name in costs] == costs
    assert "cls" not in signature.parameters
    assert Compression.cat.__doc__.startswith("CAT")

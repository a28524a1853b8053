"""Which codec a parameter gets, what travels together, and how differences between ranks are named."""

import copy

import pytest

from hvd_compress.codecs import AdaComp, Identity, make, parse
from hvd_compress.plan import Parameter, Plan, Policy, Segment, bucket_name, difference

QSGD = parse("qsgd:bits=4,bucket=512")
LAYERS = [
    Parameter("conv.weight", (64, 3, 7, 7), "float32"),
    Parameter("conv.bias", (64,), "float32"),
    Parameter("norm.weight", (2048,), "float32"),
    Parameter("fc.weight", (100, 64), "float32"),
    Parameter("fc.bias", (100,), "float32"),
    Parameter("head.weight", (10, 100), "float32"),
]


def plan_of(parameters=LAYERS, codec="adacomp", bucket_bytes=1 << 20, **options):
    return Plan(parameters, Policy(parse(codec), **options), bucket_bytes)


def codecs_of(plan):
    return {segment.parameter.name: str(segment.codec) for segment in plan.segments}


class TestParameter:
    def test_sizes(self):
        assert Parameter("p", (3, 4, 5), "float32").numel == 60
        assert Parameter("p", (), "float32").numel == 1
        assert Parameter("p", (3, 0), "float32").numel == 0
        sizes = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 4}
        assert {dtype: Parameter("p", (1,), dtype).nbytes for dtype in sizes} == sizes


class TestPolicy:
    def test_by_dimensions_and_size(self):
        assert codecs_of(plan_of()) == {
            "conv.weight": "adacomp:bin=50,c=2",
            "conv.bias": "none",
            "norm.weight": "none",
            "fc.weight": "adacomp:bin=500,c=2",
            "fc.bias": "none",
            "head.weight": "none",  # 1000 elements
        }

    @pytest.mark.parametrize(("min_numel", "compressed"), [(0, True), (1000, True), (1001, False)])
    def test_min_numel(self, min_numel, compressed):
        codec = Policy(QSGD, min_numel=min_numel).codec_for(LAYERS[5])
        assert codec == (QSGD if compressed else Identity())
        assert Policy(QSGD, min_numel=min_numel).codec_for(LAYERS[1]) == Identity()

    def test_what_allreduce_does_itself_is_for_all(self):
        for spec in ("none", "fp16"):
            assert set(codecs_of(plan_of(codec=spec)).values()) == {spec}
        assert codecs_of(plan_of(codec="bf16"))["conv.bias"] == "none"

    def test_first_override_wins(self):
        overrides = {"fc.*": "qsgd:bits=8,bucket=64", "*.weight": "nuqsgd", "*": "fp16"}
        assert codecs_of(plan_of(overrides=overrides)) == {
            "conv.weight": "nuqsgd:bits=4,bucket=512",
            "conv.bias": "fp16",
            "norm.weight": "nuqsgd:bits=4,bucket=512",
            "fc.weight": "qsgd:bits=8,bucket=64",
            "fc.bias": "qsgd:bits=8,bucket=64",  # overrides know no minimum
            "head.weight": "nuqsgd:bits=4,bucket=512",
        }

    def test_overrides_are_filled_in_for_the_shape(self):
        plan = plan_of(codec="none", overrides={"conv.weight": "adacomp", "fc.*": AdaComp(c=3)})
        assert codecs_of(plan)["conv.weight"] == "adacomp:bin=50,c=2"
        assert codecs_of(plan)["fc.bias"] == "adacomp:bin=500,c=3"

    def test_names_are_matched_with_their_case(self):
        with pytest.raises(ValueError, match=r"'FC\.\*' matches no parameter"):
            plan_of(overrides={"FC.*": "none"})

    def test_pattern_without_a_parameter(self):
        with pytest.raises(ValueError, match=r"'fc\.wieght' matches no parameter; there are 'conv.weight', .* and 1 more"):
            plan_of(overrides={"conv.*": "none", "fc.wieght": "fp16"})
        with pytest.raises(ValueError, match="there are none"):
            plan_of([], overrides={"x": "none"})

    def test_other_dtypes_are_not_compressed(self):
        parameter = Parameter("p", (100, 100), "complex64")
        assert Policy(QSGD, overrides={"p": "qsgd"}).codec_for(parameter) == Identity()

    @pytest.mark.parametrize("min_numel", [-1, 2.0, True, "7", None])
    def test_bad_min_numel(self, min_numel):
        with pytest.raises(ValueError, match=f"min_numel={min_numel!r} is not allowed; allowed is"):
            Policy(QSGD, min_numel=min_numel)

    def test_bad_overrides(self):
        with pytest.raises(ValueError, match=r"overrides=.* is not allowed; allowed is a dict"):
            Policy(QSGD, overrides=[("a", "none")])
        with pytest.raises(ValueError, match="bits=1"):
            Policy(QSGD, overrides={"a": "qsgd:bits=1"})


class TestBuckets:
    def names(self, sizes, bucket_bytes, **options):
        parameters = [Parameter(str(i), (n, 1), "float32") for i, n in enumerate(sizes)]
        plan = plan_of(parameters, codec="qsgd", bucket_bytes=bucket_bytes, min_numel=0, **options)
        assert [s.index for s in plan.segments] == list(range(len(sizes)))
        assert [s.parameter for s in plan.segments] == parameters
        return [[s.parameter.name for s in bucket] for bucket in plan.buckets]

    def test_filled_from_the_back(self):
        assert self.names([10, 20, 30, 40], 4 * 70) == [["2", "3"], ["0", "1"]]
        assert self.names([10, 20, 30, 40], 4 * 69) == [["3"], ["0", "1", "2"]]
        assert self.names([10, 20, 30, 40], 4 * 100) == [["0", "1", "2", "3"]]

    def test_larger_segments_stand_alone(self):
        assert self.names([10, 500, 10], 4 * 100) == [["2"], ["1"], ["0"]]
        assert self.names([1, 1, 1], 1) == [["2"], ["1"], ["0"]]

    def test_empty_parameters(self):
        assert self.names([0, 0], 1) == [["0", "1"]]
        assert self.names([], 1) == []

    def test_what_allreduce_sends_is_in_none(self):
        assert self.names([10, 20, 30], 4 * 40, overrides={"1": "none"}) == [["0", "2"]]
        plan = plan_of(codec="fp16")
        assert plan.buckets == []
        assert {s.bucket for s in plan.segments} == {None}

    def test_bytes_of_the_dtype_count(self):
        parameters = [Parameter(str(i), (10, 1), dtype) for i, dtype in enumerate(("float64", "float16", "bfloat16"))]
        assert len(plan_of(parameters, codec="qsgd", min_numel=0, bucket_bytes=120).buckets) == 1
        assert len(plan_of(parameters, codec="qsgd", min_numel=0, bucket_bytes=119).buckets) == 2

    @pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, True, "1", None])
    def test_bad_bucket_bytes(self, bucket_bytes):
        with pytest.raises(ValueError, match=f"bucket_bytes={bucket_bytes!r} is not allowed; allowed is"):
            plan_of(bucket_bytes=bucket_bytes)


def with_parameter(index, **changes):
    layers = list(LAYERS)
    layers[index] = layers[index]._replace(**changes)
    return plan_of(layers)


ORDER = [LAYERS[1], LAYERS[0], *LAYERS[2:]]
DIFFERENT = {
    "spec": (plan_of(codec="qsgd"), ["spec", "'adacomp:c=2'", "'qsgd:bits=4,bucket=512'"]),
    "bucket_bytes": (plan_of(bucket_bytes=4096), ["bucket_bytes", "1048576", "4096"]),
    "one less": (plan_of(LAYERS[1:]), ["parameters: rank 0 has 'conv.weight', rank 3 has not"]),
    "one more": (
        plan_of([*LAYERS, Parameter("extra", (3,), "float32")]),
        ["parameters: rank 3 has 'extra', rank 0 has not"],
    ),
    "another name": (with_parameter(4, name="fc.shift"), ["parameters: rank 0 has 'fc.bias', rank 3 has not"]),
    "shape": (with_parameter(4, shape=(101,)), ["shape of 'fc.bias'", "[100]", "[101]"]),
    "dtype": (with_parameter(4, dtype="float16"), ["dtype of 'fc.bias'", "'float32'", "'float16'"]),
    "layout": (with_parameter(0, layout="channels last"), ["layout of 'conv.weight'", "'row-major'", "'channels last'"]),
    "codec of one": (plan_of(overrides={"fc.bias": "fp16"}), ["spec of 'fc.bias'", "'none'", "'fp16'"]),
    "min_numel": (plan_of(min_numel=10), ["spec of 'head.weight'", "'none'", "'adacomp:bin=500,c=2'"]),
    "order": (plan_of(ORDER), ["order of the parameters", "'conv.weight', 'conv.bias'", "'conv.bias', 'conv.weight'"]),
}


class TestDifference:
    @pytest.mark.parametrize("name", DIFFERENT)
    def test_named(self, name):
        other, words = DIFFERENT[name]
        text = difference({0: plan_of().description, 1: plan_of().description, 3: other.description})
        for word in [*words, "rank 0", "rank 3"]:
            assert word in text
        assert "rank 1" not in text

    @pytest.mark.parametrize(("key", "word"), [("version", "hvd_compress version"), ("wire", "wire format")])
    def test_of_the_installation(self, key, word):
        other = copy.deepcopy(plan_of().description)
        other[key] = "other"
        text = difference({2: other, 5: plan_of().description})
        assert text.startswith(f"{word}: rank 2 has 'other', rank 5 has ")

    def test_none(self):
        assert difference({rank: plan_of().description for rank in range(4)}) is None
        assert difference({0: plan_of().description}) is None

    def test_long_lists_are_cut(self):
        layers = [Parameter(f"p{i}", (3,), "float32") for i in range(20)]
        text = difference({0: plan_of(layers).description, 1: plan_of([]).description})
        assert "'p4' and 15 more" in text
        assert "'p5'" not in text


class TestDigest:
    def test_equal_plans(self):
        assert plan_of().digest == plan_of(list(LAYERS)).digest
        assert 0 <= plan_of().digest < 2**64
        assert plan_of(overrides={"fc.weight": "adacomp"}).digest == plan_of().digest  # as it would be anyway

    def test_changes_with_anything(self):
        digests = {plan_of().digest, *(plan.digest for plan, _ in DIFFERENT.values())}
        assert len(digests) == 1 + len(DIFFERENT)

    def test_changes_with_the_installation(self):
        for key in ("version", "wire"):
            plan = plan_of()
            plan.description[key] = "other"
            assert plan.digest != plan_of().digest

    def test_options_of_a_codec(self):
        specs = [
            "qsgd",
            "qsgd:bits=5",
            "qsgd:bucket=511",
            "qsgd:coding=elias",
            "qsgd:error_feedback=true",
            "nuqsgd",
            "adacomp:c=1",
        ]
        assert len({plan_of(codec=spec).digest for spec in specs}) == len(specs)
        assert plan_of(codec="qsgd").digest == Plan(LAYERS, Policy(make("qsgd", bits=4)), 1 << 20).digest


@pytest.mark.parametrize(
    ("names", "name"),
    [([], "bucket.3"), (["a.w"], "bucket.3:a.w"), (["a.w", "b.w", "c.w"], "bucket.3:a.w..c.w"), (['"\\\n'], "bucket.3:___")],
)
def test_what_a_bucket_is_called(names, name):
    segments = [Segment(i, Parameter(of, (2, 2), "float32"), parse("adacomp"), 3) for i, of in enumerate(names)]
    assert bucket_name(3, segments) == name

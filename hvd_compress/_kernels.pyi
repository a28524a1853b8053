from collections.abc import Callable

class _Enum:
    def __int__(self) -> int: ...
    name: str
    __members__: dict[str, _Enum]

class Kind(_Enum):
    none: Kind
    fp16: Kind
    bf16: Kind
    adacomp: Kind
    qsgd: Kind
    qsgdinf: Kind
    nuqsgd: Kind
    onebit: Kind
    topk: Kind
    randomk: Kind
    cat: Kind

class DType(_Enum):
    float16: DType
    bfloat16: DType
    float32: DType
    float64: DType

class Coding(_Enum):
    fixed: Coding
    elias: Coding

class Scale(_Enum):
    l1: Scale
    l2: Scale

class Scheme(_Enum): ...

class CostKind(_Enum):
    measured: CostKind
    bits: CostKind
    packets: CostKind
    time: CostKind

class PayloadError(ValueError): ...

class CostModel:
    def __init__(
        self,
        kind: CostKind,
        *,
        c0: float = 0.0,
        c1: float = 1.0,
        packet_bytes: float = 1500.0,
        latency: float = 0.0,
        seconds_per_byte: float = 0.0,
    ) -> None: ...
    def of(self, bytes: float, /) -> float: ...

class Step:
    def __init__(self, seed: int = 0, latency: float = ..., seconds_per_byte: float = ..., explore: float = 0.0) -> None: ...
    latency: float
    seconds_per_byte: float
    explore: float

class Meter:
    FASTEST: float
    def __init__(self, network: str = "") -> None: ...
    def said(self, exchange: int, seconds: list[float], /) -> None: ...
    def sent(self, exchange: int, bytes: float, /) -> None: ...
    def finish_round(self) -> None: ...
    def step(self) -> Step: ...
    @property
    def is_fitted(self) -> bool: ...

class Encoded:
    bytes: int
    selected: int
    residual_sq: float
    finite: bool
    energy: float
    improvement: float

class Scope:
    def add(
        self,
        index: int,
        grad: int,
        dtype: DType,
        residual_in: int,
        residual_out: int,
        n: int,
        momentum: int = 0,
        weight: float = 1.0,
        momentum_weight: float = 0.0,
    ) -> bool: ...
    def choose(self, step: Step, /) -> None: ...
    def encode(self, index: int, seed: int, out: int, /) -> Encoded: ...

class Codec:
    def __init__(
        self,
        kind: Kind,
        *,
        bin: int = 0,
        c: float = 2.0,
        bits: int = 0,
        bucket: int = 0,
        coding: Coding = ...,
        feedback: bool = False,
        scale: Scale = ...,
        scheme: Scheme = ...,
        fraction: float = 0.0,
        joint: bool = False,
        cost: CostModel = ...,
    ) -> None: ...
    def max_payload(self, n: int, /) -> int: ...
    def encode(
        self,
        grad: int,
        dtype: DType,
        residual_in: int,
        residual_out: int,
        n: int,
        step: Step,
        out: int,
        momentum: int = 0,
        weight: float = 1.0,
        momentum_weight: float = 0.0,
    ) -> Encoded: ...
    def decode_add(self, payload: int, bytes: int, weight: float, out: int, n: int, /) -> None: ...
    @property
    def grain(self) -> int: ...
    @property
    def shares_seed(self) -> bool: ...
    def scope(self) -> Scope: ...
    def cut(self, payload: int, bytes: int, n: int, begin: int, end: int, cursor: int, out: int, /) -> tuple[int, int]: ...

class Chunks:
    def __init__(self, segments: list[tuple[int, Codec, int]], owners: int, /) -> None: ...
    def pieces(self, owner: int, /) -> list[tuple[int, int, int]]: ...
    @property
    def split_room(self) -> int: ...
    def message_room(self, owner: int, /) -> int: ...
    def split(self, message: int, bytes: int, out: int, /) -> list[int]: ...

def encode_again(
    codec: Codec,
    payloads: list[tuple[int, int]],
    weight: float,
    residual_in: int,
    residual_out: int,
    n: int,
    step: Step,
    scratch: int,
    out: int,
    /,
) -> Encoded: ...
def decode_sum(codec: Codec, payloads: list[tuple[int, int]], weight: float, out: int, n: int, /) -> None: ...
def mix_seed(seed: int, rank: int, step: int, segment: int) -> int: ...
def checksum(data: int, bytes: int, /) -> int: ...
def make_stand_in(rank: int, ranks: int, digest: int, /) -> list[float]: ...
def stand_in_factor(reduced: list[float], ranks: int, /) -> float: ...
def stand_in_agrees(reduced: list[float], factor: float, ranks: int, digest: int, /) -> bool: ...

HEADER_BYTES: int
ENTRY_BYTES: int

def write_entry(at: int, index: int, payload_bytes: int, /) -> None: ...
def finish_message(message: int, end: int, flags: int, digest: int, step: int, seconds: float, /) -> int: ...
def read_messages(data: int, bytes: int, ranks: int, /) -> list[tuple[int, int, int, float, dict[int, tuple[int, int]]]]: ...

class Counters:
    rounds: int
    grad_bytes: int
    gathered_bytes: int
    scattered_bytes: int
    reduced_bytes: int
    gathered: bool
    scattered: bool
    reduced: bool
    selected: int
    encode_s: float
    wait_s: float
    decode_s: float
    residual_sq: float
    payload_bytes: int
    encoded: int
    energy: float
    improved: float

class Session:
    seed: int
    def add_segment(self, codec: Codec, has_residual: bool, /) -> int: ...
    def add_group(self, segments: list[int], digest: int, /) -> int: ...
    def add_scattered_bucket(self, group: int, bucket: int, members: list[tuple[int, int]], /) -> None: ...
    def set_codec(self, segment: int, codec: Codec, has_residual: bool, /) -> None: ...
    def set_digest(self, group: int, digest: int, /) -> None: ...
    def measure(self, network: str, /) -> None: ...
    @property
    def meter(self) -> Meter: ...
    def fail(self, text: str, /) -> None: ...
    def warn(self, text: str, /) -> None: ...
    def on_warning(self, call: Callable[[str], None], /) -> None: ...
    def stats(self) -> tuple[int, list[Counters], list[Counters], list[int]]: ...

def make_session(seed: int, /) -> int: ...
def session(number: int, /) -> Session: ...

SESSION_VERSION: int
FIND_SESSION: int

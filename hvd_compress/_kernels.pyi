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

class DType(_Enum):
    float16: DType
    bfloat16: DType
    float32: DType
    float64: DType

class Coding(_Enum):
    fixed: Coding
    elias: Coding

class PayloadError(ValueError): ...

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
    ) -> None: ...
    def max_payload(self, n: int, /) -> int: ...
    def encode(
        self, grad: int, dtype: DType, residual_in: int, residual_out: int, n: int, seed: int, out: int, /
    ) -> tuple[int, int, float, bool]: ...
    def decode_add(self, payload: int, bytes: int, weight: float, out: int, n: int, /) -> None: ...

def mix_seed(seed: int, rank: int, step: int, segment: int) -> int: ...
def checksum(data: int, bytes: int, /) -> int: ...

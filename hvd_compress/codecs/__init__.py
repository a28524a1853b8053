"""The codecs, and their specs: ``parse("qsgd:bits=4,bucket=512")`` and ``str(codec)`` are inverse."""

from __future__ import annotations

import re
from typing import Any

from hvd_compress.codecs.adacomp import AdaComp
from hvd_compress.codecs.base import Codec, Encoded
from hvd_compress.codecs.casts import BF16, FP16, Identity
from hvd_compress.codecs.onebit import OneBit
from hvd_compress.codecs.quantizers import NUQSGD, QSGD, QSGDInf
from hvd_compress.codecs.sparsifiers import CAT, RandomK, TopK

__all__ = [
    "BF16",
    "CAT",
    "CODECS",
    "FP16",
    "NUQSGD",
    "QSGD",
    "AdaComp",
    "Codec",
    "Encoded",
    "Identity",
    "OneBit",
    "QSGDInf",
    "RandomK",
    "TopK",
    "make",
    "parse",
]

CODECS: dict[str, type[Codec]] = {
    c.name: c for c in (Identity, FP16, BF16, AdaComp, QSGD, QSGDInf, NUQSGD, OneBit, TopK, RandomK, CAT)
}
"""Every codec by the name that its spec begins with."""


def parse(spec: str | Codec) -> Codec:
    """The codec of a spec, ``name`` or ``name:key=value,...``; a codec is returned as it is.

    Raises:
        ValueError: The name or an option is unknown, or a value is not allowed. The text names it and says what is.
    """
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a spec is a string such as 'qsgd:bits=4', not {spec!r}")
    name, colon, rest = spec.partition(":")
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"spec {spec!r}: {item!r} is not of the form key=value")
        if key.strip() in options:
            raise ValueError(f"spec {spec!r}: option {key.strip()!r} is there twice")
        options[key.strip()] = _value(value.strip())
    return make(name.strip(), **options)


def make(name: str, **options: Any) -> Codec:
    """The codec of that name with those options.

    Raises:
        ValueError: As `parse`.
    """
    if name not in CODECS:
        raise ValueError(f"no codec is named {name!r}: there are {', '.join(CODECS)}")
    known = [field.name for field in CODECS[name].options()]
    for key in options:
        if key not in known:
            allowed = f"there are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{name}: unknown option {key!r}: {allowed}")
    return CODECS[name](**options)


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|nan|inf", text):
        return float(text)
    return text

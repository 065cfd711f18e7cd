"""Every element type a generation can hold: torch's name, bytes an element, safetensors' name.

A dtype that safetensors lacks is written there as bytes (U8, last dimension multiplied);
the part always carries torch's name. Source: the safetensors format description, and
`torch.dtype`. Knows nothing of tensors.
"""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """One element type."""

    itemsize: int
    safetensors: str | None


DTYPES: dict[str, Dtype] = {
    "complex128": Dtype(16, None),
    "float64": Dtype(8, "F64"),
    "int64": Dtype(8, "I64"),
    "uint64": Dtype(8, "U64"),
    "complex64": Dtype(8, None),
    "float32": Dtype(4, "F32"),
    "int32": Dtype(4, "I32"),
    "uint32": Dtype(4, "U32"),
    "complex32": Dtype(4, None),
    "float16": Dtype(2, "F16"),
    "bfloat16": Dtype(2, "BF16"),
    "int16": Dtype(2, "I16"),
    "uint16": Dtype(2, "U16"),
    "int8": Dtype(1, "I8"),
    "uint8": Dtype(1, "U8"),
    "bool": Dtype(1, "BOOL"),
    "float8_e4m3fn": Dtype(1, "F8_E4M3"),
    "float8_e5m2": Dtype(1, "F8_E5M2"),
    "float8_e4m3fnuz": Dtype(1, None),
    "float8_e5m2fnuz": Dtype(1, None),
    "float8_e8m0fnu": Dtype(1, None),
    "float4_e2m1fn_x2": Dtype(1, None),
}

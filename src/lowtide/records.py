"""The values that travel between the stages: frozen, free of behaviour beyond reading themselves."""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import BoundError, FormatVersionError, PayloadError

_MAGIC = b"LWTD"
_CONTAINER_VERSION = 1
ROOT = "(model)"  # how the model itself, whose module path is empty, is called in names and rules


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What unpack must give back: shape, strides, dtype and device, and nothing of the values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return _spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


_spec = lru_cache(maxsize=4096)(TensorSpec)  # every save asks for one, and a training step has few that differ


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor is saved: the module's path, the op whose backward reads it, the field of that op.

    ``call`` counts repeats of the same (path, op, field) within one forward, so a functional ReLU used twice in a block
    has two sites.
    """

    path: str
    op: str
    field: str
    call: int = 0
    module: str = ""
    name: str = dataclasses.field(init=False, repr=False, compare=False)
    digest: int = dataclasses.field(init=False, repr=False, compare=False)  # of the name, the same in every process

    def __post_init__(self) -> None:
        suffix = f"#{self.call}" if self.call else ""
        object.__setattr__(self, "name", f"{self.path or ROOT}:{self.op}.{self.field}{suffix}")
        object.__setattr__(self, "digest", zlib.crc32(self.name.encode()))


class Kind(enum.Enum):
    """How much of a saved tensor its backward reads (docs/dataflow.md, rule 4)."""

    METADATA = "metadata"
    MASK = "mask"
    WINDOW = "window"
    VALUES = "values"
    EXACT = "exact"


class Per(enum.Enum):
    """The granularity at which a bound on VALUES applies."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    SAMPLE_CHANNEL = "sample_channel"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class Membership:
    """An exact question about each element: ``test(x, *params)`` gives a class, ``values[class]`` stands for it.

    Backward, given the stand-in instead of the element, takes the same branch.
    """

    test: str
    params: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The geometry of a pooling window, from which an index into the plane becomes an index into the window."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    plane: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """What one op's backward reads of one of its saved tensors, and why.

    ``family`` groups needs that share an error budget: linear, norm, pointwise, attention, product, log_probability.
    ``row_dims`` is, for ``Per.ROW``, how many trailing dimensions make up a row. ``two_valued`` says that the values
    may be a mask (0 or one other value), worth a look. ``is_nonzero`` says that "is it zero?" answers the question.
    """

    kind: Kind
    why: str
    family: str = ""
    per: Per = Per.TENSOR
    row_dims: int = 1
    membership: Membership | None = None
    window: Window | None = None
    two_valued: bool = False
    is_nonzero: bool = False

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Axes along which the bound may vary, for a tensor of ``ndim`` dimensions."""
        if self.per is Per.TENSOR or ndim < 2:
            return ()
        if self.per is Per.CHANNEL:
            return (1,)
        if self.per is Per.SAMPLE_CHANNEL:
            return (0, 1) if ndim > 2 else (0,)
        return tuple(range(max(ndim - self.row_dims, 0)))


@dataclass(frozen=True, slots=True)
class Bound:
    """An absolute error bound: one number for the tensor, or one for each index along ``axes``.

    ``value`` has the sizes of ``axes`` as its shape. A value that came out of a statistic may be zero, for instance the
    standard deviation of a constant tensor: the codec then stores the elements it governs exactly. A value that a user
    wrote must be finite and positive.
    """

    value: Tensor
    axes: tuple[int, ...] = ()

    @classmethod
    def absolute(cls, value: float | Tensor, axes: tuple[int, ...] = ()) -> Bound:
        """A bound a user states; refuses what cannot be promised."""
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        if tensor.dim() != len(axes):
            raise BoundError(f"bound has shape {tuple(tensor.shape)} but {len(axes)} axes {axes}: one number per index")
        if not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
            raise BoundError(f"bound must be finite and greater than zero, got {_show(tensor)}")
        return cls(tensor, axes)

    def check_shape(self, spec: TensorSpec) -> None:
        """Refuse a bound that does not fit the tensor it is meant for."""
        if any(not 0 <= axis < len(spec.shape) for axis in self.axes):
            raise BoundError(f"bound axes {self.axes} do not exist in a tensor of shape {spec.shape}")
        expected = tuple(spec.shape[axis] for axis in self.axes)
        if tuple(self.value.shape) != expected:
            raise BoundError(
                f"bound of shape {tuple(self.value.shape)} along axes {self.axes} does not fit a tensor of shape "
                f"{spec.shape}: expected {expected}"
            )


@dataclass(frozen=True, slots=True)
class Encoded:
    """A self-describing payload: the codec and format version that wrote it, the tensor it stands for, the bytes."""

    codec: str
    version: int
    spec: TensorSpec
    meta: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    hint: Any = field(default=None, init=False, repr=False, compare=False)  # what its maker remembers; not copied

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that this payload keeps alive, each counted once."""
        if self.hint is not None:
            known: int = self.hint.nbytes
            return known
        storages = [tensor.untyped_storage() for tensor in self.tensors.values()]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def tensor(self, name: str, *, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        """A part of the payload, or an error that says which part is missing or has the wrong size."""
        part = self.tensors.get(name)
        if part is None:
            raise PayloadError(f"{self.codec} payload for shape {self.spec.shape} lacks its part {name!r}")
        if part.dtype != dtype or (numel is not None and part.numel() != numel):
            raise PayloadError(
                f"{self.codec} payload: part {name!r} is {part.numel()} x {part.dtype}, expected "
                f"{'any number' if numel is None else numel} x {dtype}: truncated or corrupted"
            )
        return part

    def require(self, codec: str, version: int) -> None:
        """Refuse a payload of another codec or of another version of this codec's format."""
        if self.codec != codec:
            raise PayloadError(f"payload was written by codec {self.codec!r}, not {codec!r}")
        if self.version != version:
            raise FormatVersionError(
                f"{codec} payload has format version {self.version}; this Lowtide reads version {version} only"
            )

    def to_bytes(self) -> bytes:
        """One byte string: magic, lengths, a JSON header, the parts, a CRC-32 of all before it."""
        parts = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
        header = {
            "codec": self.codec,
            "version": self.version,
            "shape": self.spec.shape,
            "stride": self.spec.stride,
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "device": str(self.spec.device),
            "meta": dict(self.meta),
            "parts": [[name, str(t.dtype).removeprefix("torch."), t.numel()] for name, t in parts.items()],
        }
        text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
        body = b"".join(bytes(t.view(torch.uint8).flatten().tolist()) if t.numel() else b"" for t in parts.values())
        blob = _MAGIC + struct.pack("<HI", _CONTAINER_VERSION, len(text)) + text + body
        return blob + struct.pack("<I", zlib.crc32(blob))

    @classmethod
    def from_bytes(cls, blob: bytes) -> Encoded:
        """The inverse of ``to_bytes``; truncated, corrupted or foreign bytes raise before anything is built."""
        if len(blob) < 14 or blob[:4] != _MAGIC:
            raise PayloadError("not a Lowtide payload: the first four bytes are not 'LWTD', or it is cut off")
        version, length = struct.unpack("<HI", blob[4:10])
        if version != _CONTAINER_VERSION:
            raise FormatVersionError(
                f"payload container has version {version}; this Lowtide reads {_CONTAINER_VERSION}"
            )
        if zlib.crc32(blob[:-4]) != struct.unpack("<I", blob[-4:])[0]:
            raise PayloadError(f"payload of {len(blob)} bytes fails its checksum: truncated or corrupted")
        try:
            return cls._from_parts(json.loads(blob[10 : 10 + length]), blob[10 + length : -4])
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
            raise PayloadError(f"payload of {len(blob)} bytes has a header that cannot be read: {error}") from error

    @classmethod
    def _from_parts(cls, header: dict[str, Any], body: bytes) -> Encoded:
        device = torch.device(header["device"])
        tensors: dict[str, Tensor] = {}
        at = 0
        for name, dtype_name, numel in header["parts"]:
            dtype = _dtype(dtype_name)
            nbytes = numel * dtype.itemsize
            chunk = torch.frombuffer(bytearray(body[at : at + nbytes]), dtype=torch.uint8) if nbytes else None
            at += nbytes
            tensors[name] = torch.empty(0, dtype=dtype) if chunk is None else chunk.view(dtype)
            tensors[name] = tensors[name].to(device)
        spec = TensorSpec(tuple(header["shape"]), tuple(header["stride"]), _dtype(header["dtype"]), device)
        return cls(header["codec"], header["version"], spec, _tuples(header["meta"]), tensors)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _tuples(value: Any) -> Any:
    """JSON has lists where a payload's metadata has tuples."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


def _show(tensor: Tensor) -> str:
    return f"{tensor.item()}" if tensor.dim() == 0 else f"values from {tensor.min().item()} to {tensor.max().item()}"

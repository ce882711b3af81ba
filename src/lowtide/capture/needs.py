"""The table of needs: what the backward of each op reads of each tensor it saved (docs/dataflow.md, rule 4).

Keys are the names of autograd nodes without their ``Backward0`` suffix, so functional calls, modules and operators all
count alike. An op that is not here is kept exact: a tensor is only ever coded because the table says it may be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch

from lowtide.records import Kind, Membership, Need, Per, TensorSpec, Window


class Node(Protocol):
    """The part of an autograd node that the table asks: its inputs' edges and, by ``getattr``, its saved scalars."""

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]: ...

    @property
    def _input_metadata(self) -> list[Any]: ...


class Saved(Protocol):
    """One saved tensor as the table sees it."""

    @property
    def spec(self) -> TensorSpec: ...

    @property
    def is_leaf(self) -> bool: ...


Fields = Mapping[str, Saved]
Reader = Callable[[Node, Fields], Mapping[str, Need]]

_LINEAR = Need(Kind.VALUES, "weight gradient is linear in the values", family="linear")
_PRODUCT = Need(Kind.VALUES, "gradient of the other factor is linear in the values", family="product")
_LEAF_FACTOR = Need(Kind.VALUES, "factor without gradient", family="product", two_valued=True)
_ATTENTION = Need(Kind.VALUES, "attention is rebuilt from the values", family="attention")
_POINTWISE = Need(Kind.VALUES, "values through a smooth function", family="pointwise")
_LOG_PROBABILITY = Need(Kind.VALUES, "log-probabilities, exponentiated in backward", family="log_probability")
_SHAPE_ONLY = Need(Kind.METADATA, "backward reads the shape only")
_TRUTH = Need(Kind.MASK, "booleans", membership=Membership("truth", (), (0.0, 1.0)))
_WEIGHT = Need(Kind.EXACT, "weight")
_STATISTIC = Need(Kind.EXACT, "statistic or factor that backward divides by or exponentiates")
_BROADCAST = Need(Kind.EXACT, "factor that is broadcast")
_RECURRENT = Need(Kind.EXACT, "recurrent op: read together with its exact workspace")
_COMPARED = Need(Kind.EXACT, "compared element by element in backward")
_PLACES = Need(Kind.EXACT, "places between values")
_TRAINED_WEIGHT = {"input": _LINEAR, "self": _LINEAR, "weight": _WEIGHT}
_FROZEN_WEIGHT = {"input": _SHAPE_ONLY, "self": _SHAPE_ONLY, "weight": _WEIGHT}


def _mask(test: str, params: tuple[float, ...], values: tuple[float, ...], why: str) -> Need:
    return Need(Kind.MASK, why, membership=Membership(test, params, values))


# The result of ReLU is zero or positive (or NaN), so "is it not zero?" answers the question.
_POSITIVE = replace(_mask("not_le", (0.0,), (0.0, 1.0), "sign only"), is_nonzero=True)


def of(op: str, node: Node, field: str, dtype: torch.dtype, fields: Fields) -> Need:
    """What the backward of ``node`` reads of its ``field``, a tensor of ``dtype``."""
    reader = TABLE.get(op)
    need = _lookup(reader, node, field, fields) if reader is not None else None
    if dtype == torch.bool:
        return _TRUTH
    if not dtype.is_floating_point:
        window = need is not None and need.kind is Kind.WINDOW and dtype == torch.int64
        return need if window and need is not None else Need(Kind.EXACT, "integers")
    if reader is None:
        return Need(Kind.EXACT, f"op {snake(op)} is not in the table of needs", family="unknown")
    return need if need is not None else Need(Kind.EXACT, f"statistic or state of {snake(op)}")


def _lookup(reader: Reader | Mapping[str, Need], node: Node, field: str, fields: Fields) -> Need | None:
    return (reader if isinstance(reader, Mapping) else reader(node, fields)).get(field)


@cache
def op_of(node_name: str) -> str:
    """``ConvolutionBackward0`` -> ``Convolution``.

    The node of a custom autograd function is named after its class and has no number: ``MulBackward`` ->
    ``custom.Mul``, which is never the row of a built-in op.
    """
    name = re.sub(r"Backward\d*$", "", node_name.rsplit("::", 1)[-1])
    return f"custom.{name}" if node_name.endswith("Backward") else name


@cache
def snake(op: str) -> str:
    """``NativeBatchNorm`` -> ``native_batch_norm``, ``MaxPool2DWithIndices`` -> ``max_pool2d_with_indices``."""
    op = re.sub(r"([0-9])D(?![a-z])", r"\1d", op)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op).lower()


def _requires_grad(node: Node, position: int) -> bool:
    edges = node.next_functions
    return position < len(edges) and edges[position][0] is not None


def _convolution(node: Node, fields: Fields) -> Mapping[str, Need]:
    """The input serves the weight gradient alone; with a frozen weight only its shape is read."""
    return _TRAINED_WEIGHT if _requires_grad(node, 1) else _FROZEN_WEIGHT


def _matmul(left: str, right: str, edge: int) -> Reader:
    """A 2-D product. ``F.linear`` hands its weight over as a transposed view, even where the weight is computed."""

    def read(node: Node, fields: Fields) -> Mapping[str, Need]:
        needs = {left: _LINEAR, right: _PRODUCT}
        if right in fields and _is_transposed(fields[right].spec, node, edge):
            needs[right] = _WEIGHT
        return needs

    return read


def _is_transposed(spec: TensorSpec, node: Node, edge: int) -> bool:
    if _requires_grad(node, edge):
        return type(node.next_functions[edge][0]).__name__ == "TBackward0"
    return len(spec.stride) == 2 and spec.stride[0] == 1 and spec.stride[1] == spec.shape[0]


def _linear(node: Node, fields: Fields) -> Mapping[str, Need]:
    return {"input": _LINEAR if _requires_grad(node, 1) else _SHAPE_ONLY, "self": _LINEAR, "weight": _WEIGHT}


def _grouped(node: Node, fields: Fields) -> Mapping[str, Need]:
    """A layer of experts: the rows of a matrix, each times one of several weights. Its other forms are kept."""
    dims = (len(getattr(node, f"_saved_{name}_sym_sizes", ())) for name in ("self", "mat2"))
    return {"self": _LINEAR, "mat2": _WEIGHT} if tuple(dims) == (2, 3) else {}


def _batch_norm(node: Node, fields: Fields) -> Mapping[str, Need]:
    """In evaluation with a frozen scale, backward is a fixed rescaling and never looks at the input."""
    if not getattr(node, "_saved_training", True) and not _requires_grad(node, 1):
        return {"input": _SHAPE_ONLY}
    return {"input": _BATCH_NORM}


def _row_norm(node: Node, fields: Fields) -> Mapping[str, Need]:
    rows = len(getattr(node, "_saved_normalized_shape", (0,)))
    why = "values, scaled by each row's spread"
    return {"input": Need(Kind.VALUES, why, family="norm", per=Per.ROW, row_dims=rows)}


_BATCH_NORM = Need(Kind.VALUES, "values, scaled by each channel's spread", family="norm", per=Per.CHANNEL)
_GROUP_NORM = Need(Kind.VALUES, "values, scaled by each group's spread", family="norm", per=Per.SAMPLE_CHANNEL)


def _max_pool(node: Node, fields: Fields) -> Mapping[str, Need]:
    kernel = tuple(getattr(node, "_saved_kernel_size", ()))
    indices = Need(Kind.WINDOW, "position in the window")
    if kernel and "self" in fields:
        window = Window(
            kernel,
            tuple(getattr(node, "_saved_stride", ())) or kernel,
            tuple(getattr(node, "_saved_padding", (0,) * len(kernel))),
            tuple(getattr(node, "_saved_dilation", (1,) * len(kernel))),
            fields["self"].spec.shape[-len(kernel) :],
        )
        indices = Need(Kind.WINDOW, "position in the window", window=window)
    return {"self": _SHAPE_ONLY, "result1": indices}


def _mul(node: Node, fields: Fields) -> Mapping[str, Need]:
    """A factor that was broadcast is small and often a statistic: kept. A leaf may be a dropout mask held as floats."""
    result = tuple(node._input_metadata[0].shape)
    needs = {}
    for name, saved in fields.items():
        if saved.spec.numel != math.prod(result):
            needs[name] = _BROADCAST
        else:
            needs[name] = _LEAF_FACTOR if saved.is_leaf and saved.spec.device.type == "cpu" else _PRODUCT
    return needs


def _pow(node: Node, fields: Fields) -> Mapping[str, Need]:
    exponent = getattr(node, "_saved_exponent", None)
    if isinstance(exponent, int | float) and exponent >= 2 and exponent == int(exponent):
        return {"self": _PRODUCT if exponent == 2 else _POINTWISE}
    return {"self": _STATISTIC}


def _vector_norm(node: Node, fields: Fields) -> Mapping[str, Need]:
    """Only the Euclidean norm has a gradient that is linear in the values."""
    return {"self": _PRODUCT if getattr(node, "_saved_ord", None) == 2 else _COMPARED, "result": _STATISTIC}


def _norm(node: Node, fields: Fields) -> Mapping[str, Need]:
    """The older op, with the same gradient."""
    return {"self": _PRODUCT if getattr(node, "_saved_p", None) == 2 else _COMPARED, "result": _STATISTIC}


def _reduced_by_index(node: Node, fields: Fields) -> Mapping[str, Need]:
    """Sums and means go back by their places; the largest and the smallest have to be found again."""
    need = _SHAPE_ONLY if getattr(node, "_saved_reduce", None) in ("sum", "mean") else _COMPARED
    return dict.fromkeys(("self", "src", "source", "result"), need)


def _grid_sampler(node: Node, fields: Fields) -> Mapping[str, Need]:
    """What was sampled serves the gradient of the places alone, as differences of neighbours."""
    return {"input": _PRODUCT if _requires_grad(node, 1) else _SHAPE_ONLY, "grid": _PLACES}


def _threshold(node: Node, fields: Fields) -> Mapping[str, Need]:
    limit = float(node._saved_threshold)  # type: ignore[attr-defined]
    return {"self": _mask("not_le", (limit,), (-math.inf, math.inf), "side of the threshold only")}


def _hardtanh(node: Node, fields: Fields) -> Mapping[str, Need]:
    low, high = float(node._saved_min_val), float(node._saved_max_val)  # type: ignore[attr-defined]
    return {"self": _mask("not_saturated", (low, high), (-math.inf, low / 2 + high / 2), "inside or outside only")}


def _clamp(node: Node, fields: Fields) -> Mapping[str, Need]:
    if "min" in fields or "max" in fields:
        return {}
    low = -math.inf if getattr(node, "_saved_min", None) is None else float(node._saved_min)  # type: ignore[attr-defined]
    high = math.inf if getattr(node, "_saved_max", None) is None else float(node._saved_max)  # type: ignore[attr-defined]
    outside = math.inf if math.isfinite(high) else -math.inf if math.isfinite(low) else math.nan
    inside = low if math.isfinite(low) else high if math.isfinite(high) else 0.0
    return {"self": _mask("inside_closed", (low, high), (outside, inside), "inside or outside only")}


def _shrink(node: Node, fields: Fields) -> Mapping[str, Need]:
    width = float(node._saved_lambd)  # type: ignore[attr-defined]
    return {"self": _mask("not_shrunk", (-width, width), (0.0, math.inf), "inside or outside only")}


def _recurrent(node: Node, fields: Fields) -> Mapping[str, Need]:
    return dict.fromkeys(fields, _RECURRENT)


_ATTENTION_FIELDS = dict.fromkeys(("query", "key", "value", "output"), _ATTENTION)
_POOL_BY_PLANE = {"self": _SHAPE_ONLY, "result1": Need(Kind.WINDOW, "position in the plane")}
_SLOPE = _mask("gt", (0.0,), (-1.0, 1.0), "sign only")


def _rows(ops: str, reader: Reader | Mapping[str, Need]) -> dict[str, Reader | Mapping[str, Need]]:
    """The same row for several ops, named in one string."""
    return dict.fromkeys(ops.split(), reader)


TABLE: dict[str, Reader | Mapping[str, Need]] = {
    **_rows("Convolution ConvolutionOverrideable CudnnConvolution CudnnConvolutionTranspose", _convolution),
    **_rows("ConvDepthwise2D ConvDepthwise3D MkldnnConvolution SlowConv2D SlowConv3D", _convolution),
    **_rows("SlowConvDilated2D SlowConvDilated3D SlowConvTranspose2D SlowConvTranspose3D", _convolution),
    "Addmm": _matmul("mat1", "mat2", 2),
    "Mm": _matmul("self", "mat2", 1),
    **_rows("Linear MkldnnLinear", _linear),
    "GroupedMm": _grouped,
    "Bmm": {"self": _PRODUCT, "mat2": _PRODUCT},
    "Baddbmm": {"batch1": _PRODUCT, "batch2": _PRODUCT},
    "Matmul": {"self": _PRODUCT, "other": _PRODUCT},
    **_rows("NativeBatchNorm NativeBatchNormLegit NativeBatchNormLegitNoTraining", _batch_norm),
    **_rows("CudnnBatchNorm MiopenBatchNorm BatchNormWithUpdate BatchNormNoUpdate", _batch_norm),
    **_rows("NativeLayerNorm FusedRmsNorm", _row_norm),
    "NativeGroupNorm": {"input": _GROUP_NORM},
    **_rows("ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention", _ATTENTION_FIELDS),
    **_rows("ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention", _ATTENTION_FIELDS),
    **_rows("FlashAttention EfficientAttention CudnnAttention", _ATTENTION_FIELDS),
    "Relu": {"result": _POSITIVE},
    "LeakyRelu": {"self": _SLOPE, "result": _SLOPE},
    "Threshold": _threshold,
    "Hardtanh": _hardtanh,
    "Hardsigmoid": {"self": _mask("inside_open", (-3.0, 3.0), (math.inf, 0.0), "inside or outside only")},
    **_rows("Clamp ClampMin ClampMax", _clamp),
    **_rows("Hardshrink Softshrink", _shrink),
    "Abs": {"self": _mask("sign", (), (0.0, 1.0, -1.0, math.nan), "sign only")},
    **_rows("MaxPool2DWithIndices MaxPool3DWithIndices", _max_pool),
    **_rows("AdaptiveMaxPool2D AdaptiveMaxPool3D FractionalMaxPool2D FractionalMaxPool3D", _POOL_BY_PLANE),
    **_rows("AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D", {"self": _SHAPE_ONLY}),
    **_rows("NllLoss NllLoss2D Gather MaskedSelect Take FftR2C", {"self": _SHAPE_ONLY}),
    **_rows("IndexAdd IndexCopy", {"source": _SHAPE_ONLY}),
    **_rows("ScatterReduce IndexReduce", _reduced_by_index),
    "Complex": {"real": _SHAPE_ONLY, "imag": _SHAPE_ONLY},
    **_rows("ReflectionPad1D ReflectionPad2D ReflectionPad3D", {"self": _SHAPE_ONLY}),
    **_rows("ReplicationPad1D ReplicationPad2D ReplicationPad3D", {"self": _SHAPE_ONLY}),
    **_rows("Gelu Silu Mish Softplus Hardswish Glu Erf Sin Cos", {"self": _POINTWISE}),
    **_rows("Elu Celu", {"self": _POINTWISE, "result": _POINTWISE}),
    "LogSigmoid": {"self": _POINTWISE, "buffer": _POINTWISE},
    **_rows("Tanh Sigmoid Softmax SafeSoftmax", {"result": _POINTWISE}),
    "LogSoftmax": {"result": _LOG_PROBABILITY},
    **_rows("Mul Addcmul Lerp", _mul),
    "Div": {"self": _PRODUCT, "other": _STATISTIC},
    "Pow": _pow,
    "Exp": {"result": _PRODUCT},
    **_rows("Var VarMean Std StdMean", {"self": _PRODUCT}),
    "MseLoss": {"self": _PRODUCT, "target": _PRODUCT},
    "LinalgVectorNorm": _vector_norm,
    "Norm": _norm,
    **_rows("GridSampler2D GridSampler3D CudnnGridSampler", _grid_sampler),
    **_rows("Sqrt Rsqrt Reciprocal", {"result": _STATISTIC}),
    **_rows("Maximum Minimum", {"self": _COMPARED, "other": _COMPARED}),
    **_rows("Amax Amin Max Min", {"self": _COMPARED, "result": _COMPARED}),
    "PreluKernel": {"self": _POINTWISE, "weight": _WEIGHT},
    **_rows("CudnnRnn MiopenRnn MkldnnRnnLayer ThnnFusedLstmCell ThnnFusedGruCell", _recurrent),
}

"""Every row of the table of needs, against the autograd node that it speaks about."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.capture import needs as table
from lowtide.capture.needs import TABLE

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")
aten, legacy = torch.ops.aten, torch._C._nn
BN = (torch.zeros(8), torch.ones(8))
LONG = {"dtype": torch.long}
ONE, THIRDS = torch.ones(1, **LONG), torch.arange(8).remainder(3)

# What a test expects of a site: kind of need, family, granularity, axes of the bound.
EXACT, METADATA, MASK, WINDOW = (("exact",), ("metadata",), ("mask",), ("window",))
LINEAR, PRODUCT = (("values", "linear", "tensor", ()), ("values", "product", "tensor", ()))
POINTWISE, ATTENTION = (("values", "pointwise", "tensor", ()), ("values", "attention", "tensor", ()))
LOG_PROBABILITY = ("values", "log_probability", "tensor", ())
CHANNEL, ROW = ("values", "norm", "channel", (1,)), ("values", "norm", "row", (0, 1, 2))
ROW_2, GROUP = ("values", "norm", "row", (0, 1)), ("values", "norm", "sample_channel", (0, 1))

POOL = {"self": METADATA, "result1": WINDOW}
NORM = {"input": CHANNEL, "result1": EXACT, "result2": EXACT}
SLOW = {"self": LINEAR, "weight": EXACT}

# By op: the call on an activation h of shape (2, 8, 8, 8) or, for an op of another rank, on a view of it; the weight w
# is an activation of shape (8, 8, 3, 3), so that it is saved and named. What is saved, by field.
CASES = {
    "Convolution": (lambda h, w: F.conv2d(h, w), {"input": LINEAR, "weight": EXACT}),
    "MkldnnConvolution": (lambda h, w: aten.mkldnn_convolution(h, w, None, (0, 0), (1, 1), (1, 1), 1), SLOW),
    "SlowConv2D": (lambda h, w: legacy.thnn_conv2d(h, w, (3, 3)), SLOW),
    "SlowConv3D": (lambda h, w: legacy.slow_conv3d(_3d(h), _kernel_3d(w), (3, 3, 3), None, 1, 1), SLOW),
    "SlowConvDilated2D": (lambda h, w: legacy.slow_conv_dilated2d(h, w, (3, 3), None, 1, 1, 2), SLOW),
    "SlowConvDilated3D": (
        lambda h, w: legacy.slow_conv_dilated3d(_3d(h), _kernel_3d(w), (3, 3, 3), None, (1,) * 3, (1,) * 3, (1,) * 3),
        SLOW,
    ),
    "SlowConvTranspose2D": (lambda h, w: legacy.slow_conv_transpose2d(h, w, (3, 3)), SLOW),
    "SlowConvTranspose3D": (lambda h, w: legacy.slow_conv_transpose3d(_3d(h), _kernel_3d(w), (3, 3, 3)), SLOW),
    "Addmm": (lambda h, w: F.linear(h.flatten(0, 2), h[0, 0], h[0, 0, 0]), {"mat1": LINEAR, "mat2": EXACT}),
    "Mm": (lambda h, w: h.flatten(0, 2) @ h[0, 0], {"self": LINEAR, "mat2": PRODUCT}),
    "GroupedMm": (
        lambda h, w: F.grouped_mm(h.flatten(0, 2), h[0, :2] * 1, offs=torch.tensor([50, 128], dtype=torch.int32)) * 1,
        {"self": LINEAR, "mat2": EXACT},
    ),
    "Bmm": (lambda h, w: h[0].bmm(h[1]), {"self": PRODUCT, "mat2": PRODUCT}),
    "Baddbmm": (lambda h, w: torch.baddbmm(h[0], h[0], h[1]), {"batch1": PRODUCT, "batch2": PRODUCT}),
    "NativeBatchNorm": (lambda h, w: F.batch_norm(h, None, None, training=True), NORM),
    "NativeBatchNormLegit": (
        lambda h, w: aten._native_batch_norm_legit(h, None, None, True, 0.1, 1e-5)[0],
        NORM,
    ),
    "NativeBatchNormLegitNoTraining": (
        lambda h, w: aten._native_batch_norm_legit_no_training(h, w[0, :, 0, 0], None, *BN, 0.1, 1e-5)[0],
        {**NORM, "weight": EXACT, "running_mean": EXACT, "running_var": EXACT},
    ),
    "BatchNormWithUpdate": (
        lambda h, w: aten._batch_norm_with_update(h, w[0, :, 0, 0], None, *_stats(), 0.1, 1e-5)[0],
        {**NORM, "weight": EXACT, "running_mean": EXACT, "running_var": EXACT},
    ),
    "BatchNormNoUpdate": (
        lambda h, w: aten._batch_norm_no_update(h, w[0, :, 0, 0], None, *BN, 0.1, 1e-5)[0],
        {**NORM, "weight": EXACT, "running_mean": EXACT, "running_var": EXACT},
    ),
    "NativeLayerNorm": (lambda h, w: F.layer_norm(h, (8,)), {"input": ROW, "result1": EXACT, "result2": EXACT}),
    "NativeGroupNorm": (lambda h, w: F.group_norm(h, 2), {"input": GROUP, "result1": EXACT, "result2": EXACT}),
    "ScaledDotProductFlashAttentionForCpu": (
        lambda h, w: F.scaled_dot_product_attention(h, h + 1, h + 2),
        {**dict.fromkeys(("query", "key", "value", "output"), ATTENTION), "logsumexp": EXACT},
    ),
    "Relu": (lambda h, w: h.relu(), {"result": MASK}),
    "LeakyRelu": (lambda h, w: F.leaky_relu(h), {"self": MASK}),
    "Threshold": (lambda h, w: F.threshold(h, 0.1, 0.0), {"self": MASK}),
    "Hardtanh": (lambda h, w: F.relu6(h), {"self": MASK}),
    "Hardsigmoid": (lambda h, w: F.hardsigmoid(h), {"self": MASK}),
    "Clamp": (lambda h, w: h.clamp(-0.5, 0.5), {"self": MASK}),
    "ClampMin": (lambda h, w: h.clamp_min(0.1), {"self": MASK}),
    "ClampMax": (lambda h, w: h.clamp_max(0.1), {"self": MASK}),
    "Hardshrink": (lambda h, w: F.hardshrink(h), {"self": MASK}),
    "Softshrink": (lambda h, w: F.softshrink(h), {"self": MASK}),
    "Abs": (lambda h, w: h.abs(), {"self": MASK}),
    "MaxPool2DWithIndices": (lambda h, w: F.max_pool2d(h, 3, 2, 1), POOL),
    "MaxPool3DWithIndices": (lambda h, w: F.max_pool3d(h, 3, 2, 1), POOL),
    "AdaptiveMaxPool2D": (lambda h, w: F.adaptive_max_pool2d(h, 3), POOL),
    "AdaptiveMaxPool3D": (lambda h, w: F.adaptive_max_pool3d(h, 3), POOL),
    "FractionalMaxPool2D": (lambda h, w: F.fractional_max_pool2d(h, 2, output_size=3), POOL),
    "FractionalMaxPool3D": (lambda h, w: F.fractional_max_pool3d(h, 2, output_size=3), POOL),
    "AvgPool2D": (lambda h, w: F.avg_pool2d(h, 2), {"self": METADATA}),
    "AvgPool3D": (lambda h, w: F.avg_pool3d(h, 2), {"self": METADATA}),
    "AdaptiveAvgPool2D": (lambda h, w: F.adaptive_avg_pool2d(h, 3), {"self": METADATA}),
    "AdaptiveAvgPool3D": (lambda h, w: F.adaptive_avg_pool3d(h, 3), {"self": METADATA}),
    "NllLoss": (
        lambda h, w: F.nll_loss(h.flatten(1), torch.zeros(2, **LONG)),
        {"self": METADATA, "target": EXACT, "total_weight": EXACT},
    ),
    "NllLoss2D": (
        lambda h, w: F.nll_loss(h, torch.zeros(2, 8, 8, **LONG)),
        {"self": METADATA, "target": EXACT, "total_weight": EXACT},
    ),
    "Gather": (lambda h, w: h.gather(1, torch.zeros(2, 3, 8, 8, **LONG)), {"self": METADATA, "index": EXACT}),
    "Take": (lambda h, w: h.take(torch.zeros(3, 4, **LONG)), {"self": METADATA, "index": EXACT}),
    "FftR2C": (lambda h, w: torch.view_as_real(torch.fft.rfft2(h)), {"self": METADATA}),
    "IndexAdd": (
        lambda h, w: torch.zeros(2, 4, 8, 8).index_add(1, torch.arange(8) // 2, h),
        {"source": METADATA, "index": EXACT},
    ),
    "IndexCopy": (lambda h, w: (h * 1).index_copy(1, ONE, h[:, :1] + 1), {"source": METADATA, "index": EXACT}),
    "ScatterReduce": (
        lambda h, w: (h[:, :3] * 1).scatter_reduce(1, THIRDS.view(1, 8, 1, 1).repeat(2, 1, 8, 8), h, "mean"),
        {"self": METADATA, "src": METADATA, "result": METADATA, "index": EXACT},
    ),
    "IndexReduce": (
        lambda h, w: (h[:, :3] * 1).index_reduce(1, THIRDS, h, "mean"),
        {"self": METADATA, "source": METADATA, "result": METADATA, "index": EXACT},
    ),
    "Complex": (lambda h, w: torch.view_as_real(torch.complex(h, h + 1)), {"real": METADATA, "imag": METADATA}),
    "MaskedSelect": (lambda h, w: h.masked_select(h > 0), {"self": METADATA, "mask": MASK}),
    "ReflectionPad1D": (lambda h, w: F.pad(h[0], (1, 1), mode="reflect"), {"self": METADATA}),
    "ReflectionPad2D": (lambda h, w: F.pad(h, (1,) * 4, mode="reflect"), {"self": METADATA}),
    "ReflectionPad3D": (lambda h, w: F.pad(_3d(h), (1,) * 6, mode="reflect"), {"self": METADATA}),
    "ReplicationPad1D": (lambda h, w: F.pad(h[0], (1, 1), mode="replicate"), {"self": METADATA}),
    "ReplicationPad2D": (lambda h, w: F.pad(h, (1,) * 4, mode="replicate"), {"self": METADATA}),
    "ReplicationPad3D": (lambda h, w: F.pad(_3d(h), (1,) * 6, mode="replicate"), {"self": METADATA}),
    "Gelu": (lambda h, w: F.gelu(h), {"self": POINTWISE}),
    "Silu": (lambda h, w: F.silu(h), {"self": POINTWISE}),
    "Mish": (lambda h, w: F.mish(h), {"self": POINTWISE}),
    "Softplus": (lambda h, w: F.softplus(h), {"self": POINTWISE}),
    "Hardswish": (lambda h, w: F.hardswish(h), {"self": POINTWISE}),
    "Glu": (lambda h, w: F.glu(h), {"self": POINTWISE}),
    "Erf": (lambda h, w: h.erf(), {"self": POINTWISE}),
    "Sin": (lambda h, w: h.sin(), {"self": POINTWISE}),
    "Cos": (lambda h, w: h.cos(), {"self": POINTWISE}),
    "Elu": (lambda h, w: F.elu(h), {"self": POINTWISE}),
    "Celu": (lambda h, w: F.celu(h), {"self": POINTWISE}),
    "LogSigmoid": (lambda h, w: F.logsigmoid(h), {"self": POINTWISE, "buffer": POINTWISE}),
    "Tanh": (lambda h, w: h.tanh(), {"result": POINTWISE}),
    "Sigmoid": (lambda h, w: h.sigmoid(), {"result": POINTWISE}),
    "Softmax": (lambda h, w: h.softmax(-1), {"result": POINTWISE}),
    "SafeSoftmax": (lambda h, w: torch._safe_softmax(h, -1), {"result": POINTWISE}),
    "LogSoftmax": (lambda h, w: h.log_softmax(-1), {"result": LOG_PROBABILITY}),
    "Mul": (lambda h, w: h * (h + 1), {"self": PRODUCT, "other": PRODUCT}),
    "Addcmul": (lambda h, w: torch.addcmul(h, h, h + 1), {"tensor1": PRODUCT, "tensor2": PRODUCT}),
    "Lerp": (lambda h, w: torch.lerp(h, h + 1, h + 2), {"self": PRODUCT, "end": PRODUCT, "weight": PRODUCT}),
    "Div": (lambda h, w: h / (h + 9), {"self": PRODUCT, "other": EXACT}),
    "Pow": (lambda h, w: h**2, {"self": PRODUCT}),
    "Exp": (lambda h, w: h.exp(), {"result": PRODUCT}),
    "Var": (lambda h, w: h.var(), {"self": PRODUCT}),
    "VarMean": (lambda h, w: torch.var_mean(h)[0], {"self": PRODUCT}),
    "Std": (lambda h, w: h.std(1), {"self": PRODUCT, "result": EXACT}),
    "StdMean": (lambda h, w: torch.std_mean(h, 1)[0], {"self": PRODUCT, "result0": EXACT}),
    "MseLoss": (lambda h, w: F.mse_loss(h, h + 1), {"self": PRODUCT, "target": PRODUCT}),
    "LinalgVectorNorm": (lambda h, w: torch.linalg.vector_norm(h, dim=1), {"self": PRODUCT, "result": EXACT}),
    "Norm": (lambda h, w: aten.norm(h, 2.0, [1]), {"self": PRODUCT, "result": EXACT}),
    "GridSampler2D": (lambda h, w: F.grid_sample(h, _places(h), align_corners=True), {"input": PRODUCT, "grid": EXACT}),
    "GridSampler3D": (
        lambda h, w: F.grid_sample(_3d(h), h[:, :4, :4, :3].unsqueeze(1).tanh(), align_corners=False),
        {"input": PRODUCT, "grid": EXACT},
    ),
    "Sqrt": (lambda h, w: (h + 9).sqrt(), {"result": EXACT}),
    "Rsqrt": (lambda h, w: (h + 9).rsqrt(), {"result": EXACT}),
    "Reciprocal": (lambda h, w: (h + 9).reciprocal(), {"result": EXACT}),
    "Maximum": (lambda h, w: torch.maximum(h, h + w[0, 0, 0, 0]), {"self": EXACT, "other": EXACT}),
    "Minimum": (lambda h, w: torch.minimum(h, h + w[0, 0, 0, 0]), {"self": EXACT, "other": EXACT}),
    "Amax": (lambda h, w: h.amax(1), {"self": EXACT, "result": EXACT}),
    "Amin": (lambda h, w: h.amin(1), {"self": EXACT, "result": EXACT}),
    "Max": (lambda h, w: h.max(), {"self": EXACT, "result": EXACT}),
    "Min": (lambda h, w: h.min(), {"self": EXACT, "result": EXACT}),
    "PreluKernel": (lambda h, w: F.prelu(h, w[0, :, 0, 0]), {"self": POINTWISE, "weight": EXACT}),
}

# Rows that no call on a dense CPU tensor reaches, by what would.
ELSEWHERE = {
    "cuda": "CudnnConvolution CudnnConvolutionTranspose ConvDepthwise2D ConvDepthwise3D CudnnBatchNorm FusedRmsNorm "
    "CudnnGridSampler "
    "ScaledDotProductFlashAttention ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention FlashAttention "
    "EfficientAttention CudnnAttention CudnnRnn ThnnFusedLstmCell ThnnFusedGruCell",
    "rocm": "MiopenBatchNorm MiopenRnn",
    "another backend": "ConvolutionOverrideable Linear Matmul",
    "tensors in a layout that passes through": "MkldnnLinear",
    "test_recurrent_layers": "MkldnnRnnLayer",
}


def _3d(h):
    return h.view(2, 4, 2, 8, 8)[..., :4, :4].repeat(1, 2, 2, 1, 1)


def _kernel_3d(w):
    return w.unsqueeze(2).repeat(1, 1, 3, 1, 1)


def _places(h):
    return h[:, 0, :, :2].unsqueeze(1).tanh()


def _stats():
    return torch.zeros(8), torch.ones(8)


@pytest.fixture
def model(build, request):
    """The op of a case between a shift, which makes its input an activation, and nothing."""
    call, _ = CASES[request.param]
    model = build(lambda self, x: call(x + self.shift, self.kernel + 0))
    model.shift = nn.Parameter(torch.zeros(8, 8, 8))
    model.kernel = nn.Parameter(torch.randn(8, 8, 3, 3))
    return model


@pytest.mark.parametrize(("model", "op"), [(op, op) for op in CASES], indirect=["model"], ids=list(CASES))
def test_sites_and_needs(model, op, needs):
    prefix = f"(model):{table.snake(op)}."
    seen = needs(model, torch.randn(2, 8, 8, 8))
    found = {name.removeprefix(prefix): item.summary() for name, item in seen.items() if name.startswith(prefix)}
    assert found == CASES[op][1]


@pytest.mark.parametrize("model", CASES, indirect=True)
def test_the_exact_method_is_bit_equal(model, gradients, assert_same):
    """With check, tensors of which only the shape is read come back full of NaN: that it is not read is proved here."""
    x = torch.randn(2, 8, 8, 8)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0, check="full")
    assert_same(plain, gradients(model, x))


@pytest.mark.parametrize("model", [op for op, case in CASES.items() if METADATA in case[1].values()], indirect=True)
def test_a_double_backward_reads_no_more(model):
    x = torch.randn(2, 8, 8, 8, requires_grad=True)

    def second_order():
        torch.manual_seed(1)
        y = model(x)
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    plain = second_order()
    assert plain.isfinite().all()
    lowtide.attach(model, "exact", min_size=0, check="full")
    assert torch.equal(plain, second_order())


def test_every_row_is_covered():
    listed = [op for ops in ELSEWHERE.values() for op in ops.split()]
    assert sorted([*CASES, *listed]) == sorted(TABLE)


@pytest.mark.parametrize("op", TABLE)
def test_rows_name_nodes_and_fields_that_exist(op):
    """A misspelt row would never be found, and its tensors would silently stay as they are."""
    nodes = [getattr(torch._C._functions, f"{op}Backward{n}", None) for n in range(4)]
    fields = {name.removeprefix("_raw_saved_") for node in nodes if node is not None for name in dir(node)}
    row = TABLE[op]
    assert any(nodes), f"torch has no {op}Backward0"
    if isinstance(row, dict):
        known = {field for field in row if field in fields}
        # rows shared by several ops may name fields that only some of them have
        assert known, f"{op} saves {sorted(fields)}, the row speaks of {sorted(row)}"

"""A model in training: which one, on what data, in which precision. Nothing is downloaded.

The data are synthetic, but there is something to learn in them. Images are smooth: a coarse pattern for each class plus
as much noise, enlarged eightfold. Pixels are classified by the brightness of such an image. Texts tell their class by
the remainders of their tokens. Streams of tokens count upwards in steps of 1 to 7.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.app import zoo
from lowtide.app.shared.specs import UsageError
from lowtide.app.zoo.tasks import classification_loss, sample_images
from lowtide.errors import UnknownNameError
from lowtide.session import Session

PRECISIONS = ("fp32", "tf32", "bf16")
_TORCHVISION = "torchvision:"
_UNITS = {"image": "images", "segmentation": "images", "tokens": "tokens", "text": "texts"}
_COARSE = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """A named model with the shapes of its data. ``classes`` is the number of classes, or of tokens."""

    name: str
    kind: str
    classes: int
    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    score: Callable[[Tensor, Tensor], Tensor]

    @property
    def unit(self) -> str:
        return _UNITS[self.kind]


def find_workload(name: str, options: Mapping[str, Any], *, tiny: bool = False) -> Workload:
    """A zoo model, or ``torchvision:NAME``; options go to the model, to its data, or to both."""
    if name.startswith(_TORCHVISION):
        if tiny:
            raise UsageError("--tiny is for models of the zoo; torchvision's have one size")
        return _from_torchvision(name, dict(options))
    entry = zoo.describe(name)
    given = {**(entry.tiny if tiny else {}), **options}
    try:
        entry.example(1, **given)
    except TypeError as error:
        raise UsageError(f"--set: {error}") from None
    build = {key: value for key, value in given.items() if key in entry.options}
    known = {**entry.options, **given}
    return Workload(
        name=name,
        kind=entry.kind,
        classes=int(known["vocab_size"] if entry.kind == "tokens" else known["num_classes"]),
        build=partial(entry.build, **build),
        sample=lambda batch, generator: entry.example(batch, generator=generator, **given),
        score=entry.loss,
    )


def _from_torchvision(name: str, options: dict[str, Any]) -> Workload:
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise UsageError(f"{name} needs torchvision, which cannot be imported here ({error})") from None
    known = models.list_models(module=models)
    if name.removeprefix(_TORCHVISION) not in known:
        raise UnknownNameError("torchvision model", name.removeprefix(_TORCHVISION), known)
    size, classes = int(options.pop("image_size", 224)), int(options.get("num_classes", 1000))
    return Workload(
        name=name,
        kind="image",
        classes=classes,
        build=partial(models.get_model, name.removeprefix(_TORCHVISION), weights=None, **options),
        sample=partial(sample_images, num_classes=classes, image_size=size),
        score=classification_loss,
    )


class Data:
    """Batches of a workload on a device: always new ones, the same ones for the same seed."""

    def __init__(self, workload: Workload, device: torch.device, seed: int) -> None:
        self._workload = workload
        self._generator = torch.Generator(device).manual_seed(seed)
        self._patterns: Tensor | None = None

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        inputs, target = self._workload.sample(count, self._generator)
        classes = self._workload.classes
        if self._workload.kind == "image":
            return self._smooth(inputs, target), target
        if self._workload.kind == "segmentation":
            images = self._smooth(inputs, None)
            return images, _by_brightness(images, classes)
        if self._workload.kind == "text":
            return torch.minimum(inputs // classes * classes + target.unsqueeze(1), inputs.amax()), target
        return self._count_upwards(inputs, classes)

    def _smooth(self, images: Tensor, labels: Tensor | None) -> Tensor:
        _, channels, height, width = images.shape
        coarse = (channels, -(-height // _COARSE), -(-width // _COARSE))
        noise = self._normal(len(images), *coarse)
        if labels is not None:
            if self._patterns is None:
                self._patterns = self._normal(self._workload.classes, *coarse)
            noise = noise + self._patterns[labels]
        return F.interpolate(noise, size=(height, width), mode="bicubic")

    def _count_upwards(self, inputs: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        stride = torch.randint(1, 8, (len(inputs), 1), generator=self._generator, device=inputs.device)
        position = torch.arange(inputs.shape[1] + 1, device=inputs.device)
        stream = (inputs[:, :1] + stride * position) % vocabulary
        return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._generator.device)


def _by_brightness(images: Tensor, classes: int) -> Tensor:
    """Equal shares of the pixels to each class, if brightness were normally distributed."""
    brightness = images.mean(1)
    share = torch.special.ndtr((brightness - brightness.mean()) / brightness.std())
    return (share * classes).long().clamp(max=classes - 1)


class Task:
    """A model, its optimizer and one batch that stays on the device.

    SGD with momentum 0.9, or AdamW for models with layer norms. ``bf16`` is autocast; conv nets (models with more
    than one 2-d convolution) are channels_last in bf16, and elsewhere if asked for.
    """

    def __init__(
        self,
        workload: Workload,
        precision: str,
        *,
        batch: int,
        device: torch.device,
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.precision, self.score = device, precision, workload.score
        self.model = workload.build().to(device).train()
        convolutions = sum(isinstance(module, nn.Conv2d) for module in self.model.modules())
        self.channels_last = convolutions > 1 and (channels_last or precision == "bf16")
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data, self.batch = Data(workload, device, seed + 1), batch
        self.inputs, self.target = self.draw()
        self.items = self.inputs.numel() if workload.kind == "tokens" else batch
        self.optimizer = _make_optimizer(self.model)
        self.call: Callable[[Tensor], Tensor] = self.model
        self.session: Session | None = None  # attached to the model: it records the loss, too
        self.graphed: Callable[[Tensor, Tensor], Tensor] | None = None  # in place of pass_through

    def draw(self) -> tuple[Tensor, Tensor]:
        """A batch that has not been seen before, in the layout of the model."""
        inputs, target = self.data.batch(self.batch)
        return inputs.contiguous(memory_format=torch.channels_last) if self.channels_last else inputs, target

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.call(self.inputs if inputs is None else inputs)

    def loss(self) -> Tensor:
        """Forward and loss over the batch at hand."""
        return self._loss_of(self.inputs, self.target)

    def _loss_of(self, inputs: Tensor, target: Tensor) -> Tensor:
        with self.session.recording() if self.session is not None else contextlib.nullcontext():
            return self.score(self.forward(inputs).float(), target)

    def step(self) -> Tensor:
        """One training step, all of it; the loss, which nobody has to wait for."""
        self.optimizer.zero_grad(set_to_none=True)
        run = self.graphed if self.graphed is not None else self.pass_through
        loss = run(self.inputs, self.target)
        self.optimizer.step()
        return loss.detach()

    def pass_through(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Forward and backward over a batch; the loss."""
        loss = self._loss_of(inputs, target)
        loss.backward()
        return loss


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if any(isinstance(module, nn.LayerNorm | nn.Embedding) for module in model.modules()):
        return torch.optim.AdamW(model.parameters(), 3e-4)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


@contextlib.contextmanager
def applied(precision: str) -> Iterator[None]:
    """TF32 in matrix products and convolutions, or not: ``fp32`` has none; in ``bf16`` it serves what stays float32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before

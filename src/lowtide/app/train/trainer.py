"""One step, one evaluation, and the state between steps.

Everything random is a function of the seed and the step (``seeds.py``), and the rate of a step is one of its number, so
the state of a run is that of the model, the optimizer, the loss scaler and Lowtide, and the number of steps done.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.app.data import DataSet
from lowtide.app.models import count_channels
from lowtide.app.shared.specs import UsageError
from lowtide.app.timeline import Timeline
from lowtide.app.train.augment import Pictures
from lowtide.app.train.batches import Batches
from lowtide.app.train.checkpoints import CheckpointError
from lowtide.app.train.config import PLAIN, Config, Method, Train
from lowtide.app.train.memory import Meter
from lowtide.app.train.optimizers import make_optimizer
from lowtide.app.train.schedules import make_schedule
from lowtide.app.train.seeds import STEP, seed_everything
from lowtide.errors import LowtideError
from lowtide.graphs.step import GraphStep, graph_plainly
from lowtide.growth import is_out_of_memory
from lowtide.session import Session, attach

_WARMUP = 12  # eager steps before forward and backward are captured
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """A model in training on a device."""

    def __init__(self, config: Config, data: DataSet, model: nn.Module, device: torch.device) -> None:
        self.config, self.device, self.kind = config, device, data.kind
        train = config.train
        if train.graph:
            _check_graph(train, device)
        if train.compile:
            _check_compile(config.method)
        self.batches = Batches(data, batch=train.batch, device=device, seed=train.seed)
        self.steps_per_epoch = self.batches.steps
        self.steps = train.epochs * self.steps_per_epoch
        self.pictures = self._make_pictures(data, model) if data.kind == "image" else None
        self.model = model.to(device)
        if train.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(config.optimizer, self.model)
        assert config.optimizer.lr is not None and config.schedule.warmup is not None, "a resolved configuration"
        self.rate = make_schedule(
            config.schedule.name, lr=config.optimizer.lr, steps=self.steps, warmup=config.schedule.warmup
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "fp16")
        self.session = self._attach()
        self._run = torch.compile(self.model) if train.compile and self.session is None else self.model
        self.meter = Meter(self.model, self.session, device)
        self._graphed = self._graph() if train.graph else None

    def step(self, number: int, timeline: Timeline | None = None) -> Tensor:
        """One step, all of it; the loss, which nobody has to wait for. A timeline follows its memory."""
        seed_everything(self.config.train.seed, STEP, number)
        rate = self.rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = self.batches.training(number)
        if self.pictures is not None:
            inputs = self.pictures.training(inputs, number)
        self.optimizer.zero_grad(set_to_none=True)
        if self._graphed is not None and timeline is None:
            loss = self._graphed(inputs, targets)
        else:
            loss = self._pass(inputs, targets, timeline)
        if self.session is not None:
            self.session.watch(loss)
        self._update()
        return loss

    def _pass(self, inputs: Tensor, targets: Tensor, timeline: Timeline | None = None) -> Tensor:
        """Forward and backward."""
        with contextlib.ExitStack() as stack:
            if timeline is not None:
                stack.enter_context(timeline.following())
            with self._recording(), self.meter.forward(inputs):
                with self._autocast():
                    output = self._run(inputs)
                loss = self.score(output, targets, smoothing=self.config.train.label_smoothing)
                del output
            self.meter.after_forward()
            if timeline is not None:
                stack.enter_context(timeline.backward())
            self.scaler.scale(loss).backward()
        return loss.detach()

    def _recording(self) -> contextlib.AbstractContextManager[None]:
        """Around forward and loss: Lowtide holds what both save."""
        return contextlib.nullcontext() if self.session is None else self.session.recording()

    def evaluate(self) -> tuple[float, float]:
        """Accuracy and mean loss over the test split."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        with torch.no_grad():
            for inputs, targets in self.batches.testing():
                logits = self._predict(inputs)
                right += (logits.argmax(-1) == targets).sum()
                total += self.score(logits, targets) * targets.numel()
                count += targets.numel()
        self.model.train()
        return right.item() / count, total.item() / count

    def score(self, output: Any, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Mean cross-entropy, in float32, of classes or of next tokens."""
        logits = as_logits(output).float()
        if self.kind == "tokens":
            logits, targets = logits.flatten(0, 1), targets.flatten()
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "session": None if self.session is None else self.session.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            if self.session is not None:
                self.session.load_state_dict(state["session"])
        except (KeyError, ValueError, RuntimeError, TypeError, LowtideError) as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(f"the checkpoint does not belong to this run: {error}") from error

    def close(self) -> None:
        self.batches.close()
        if self.session is not None:
            self.session.detach()

    def _attach(self) -> Session | None:
        method = self.config.method
        if method.name == PLAIN:
            return None
        options = {"optimizer": self.optimizer, "seed": self.config.train.seed, **method.options}
        session = attach(self.model, method.name, **options)
        if self.config.train.compile:
            session.compile()
        return session

    def _graph(self) -> GraphStep:
        make = partial(graph_plainly, self.model) if self.session is None else self.session.graph
        return make(self._pass, warmup=_WARMUP)

    def _make_pictures(self, data: DataSet, model: nn.Module) -> Pictures:
        return Pictures(
            self.config.augment,
            scale=data.scale,
            shape=data.shape,
            channels=count_channels(model),
            device=self.device,
            channels_last=self.config.train.channels_last,
            seed=self.config.train.seed,
        )

    def _autocast(self) -> torch.autocast:
        dtype = _AUTOCAST.get(self.config.train.precision)
        return torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)

    def _predict(self, inputs: Tensor) -> Tensor:
        """Logits of a batch of the test split, in float32."""
        given = inputs if self.pictures is None else self.pictures.testing(inputs)
        with self._autocast():
            logits = as_logits(self._run(given)).float()
            if self.config.augment.test_mirror:  # one after the other: both at once would need twice the memory
                logits = (logits + as_logits(self._run(given.flip(-1))).float()) / 2
        return logits

    def _update(self) -> None:
        if self.config.train.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _check_graph(train: Train, device: torch.device) -> None:
    if device.type != "cuda":
        raise UsageError(f"train.graph needs an NVIDIA GPU; this run is on {device}")
    if train.precision == "fp16":
        raise UsageError("train.graph is for fp32, tf32 and bf16: in fp16 the scale of the loss changes between steps")
    if train.deterministic:
        raise UsageError("train.graph and train.deterministic exclude each other: a replay has dither of its own")


def _check_compile(method: Method) -> None:
    if method.name == "recompute":
        raise UsageError("train.compile and recompute exclude each other")


def as_logits(output: Any) -> Tensor:
    """Models with auxiliary outputs return them behind or beside the logits."""
    for found in (output, getattr(output, "logits", None), output[0] if isinstance(output, tuple | list) else None):
        if isinstance(found, Tensor):
            return found
    raise LowtideError(f"the model returned {type(output).__name__}; a tensor of logits was expected")


@contextlib.contextmanager
def settings(config: Config, device: torch.device) -> Iterator[None]:
    """Global settings of torch for a run: TF32, the choice of algorithms; as they were, afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
    matmul.allow_tf32 = cudnn.allow_tf32 = config.train.precision != "fp32"
    cudnn.benchmark = device.type == "cuda" and not config.train.deterministic
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not; read when it is first used
    # Only a warning where an op has no such algorithm, as max pooling on a GPU: the user can then judge it.
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before[:3]
        torch.use_deterministic_algorithms(before[3])

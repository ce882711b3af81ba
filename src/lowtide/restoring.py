"""How backward gets a tensor that was not kept as it is: from a payload, or from the ops that make it again."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide import gates
from lowtide.ambient import Plainly
from lowtide.capture.handles import Handle
from lowtide.capture.makers import Maker
from lowtide.coding import layout, probabilities
from lowtide.errors import PayloadError
from lowtide.payloads import Payload, stream_of
from lowtide.records import TensorSpec

__all__ = ["Coded", "Remade"]


class Coded:
    """A save that waits as a payload; ``mask`` if its backward asks only where the tensor is not zero.

    ``gates`` if that is ReLU's backward, which need not see the mask; ``logs`` if the payload has their exponentials.
    """

    __slots__ = ("_gates", "_lent", "_logs", "_mask", "payload")

    def __init__(self, payload: Payload, *, mask: bool = False, gates: bool = False, logs: bool = False) -> None:
        self.payload, self._mask, self._logs = payload, mask, logs
        self._gates = gates and hasattr(payload.codec, "gate")
        self._lent: tuple[int, Tensor] | None = None

    def lend(self, tensor: Tensor) -> None:
        """It has been decoded for somebody else: whoever asks next, on the same stream, gets it once more."""
        self._lent = stream_of(tensor.device), tensor

    def restore(self, handle: Handle) -> Tensor:
        if self._gates and gates.may_stand_in():
            return gates.Gate(handle.spec, self.payload.gate, lambda: self._restore(handle))
        return self._restore(handle)

    def _restore(self, handle: Handle) -> Tensor:
        spec = handle.spec
        if self._lent is not None:
            lent, self._lent = self._lent, None
            if lent[0] == stream_of(spec.device):
                return lent[1]
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():  # neither, as a rule, in backward
            with Plainly(spec.device.type):
                tensor = self._decode(handle)
        else:
            tensor = self._decode(handle)
        if tensor.dtype is not spec.dtype or tensor.device != spec.device:
            raise _unlike(handle, tensor)
        if tensor.shape == spec.shape and tensor.stride() == spec.stride:
            return tensor
        if tensor.numel() != spec.numel:
            raise _unlike(handle, tensor)
        return tensor.as_strided(spec.shape, spec.stride, 0)

    def _decode(self, handle: Handle) -> Tensor:
        tensor = self.payload.nonzero() if self._mask else self.payload.decode(handle.name)
        return probabilities.to_logs(tensor, handle.spec.dtype) if self._logs else tensor


class Remade:
    """A save that is made again by the ops that made it, from what these have saved themselves.

    What attention made is read twice in a row: by the layer behind it, and by attention's own backward. The second one
    gets it from the first. ``saves`` is how many share this.
    """

    __slots__ = ("_left", "_lent", "_maker", "_saves")

    def __init__(self, maker: Maker, saves: int) -> None:
        self._maker, self._saves = maker, saves if maker.formula.attention is not None else 1
        self._left = 0  # asked for that often again, as a rule
        self._lent: tuple[int, Tensor] | None = None

    @property
    def is_lent(self) -> bool:
        """Whether what was given last will be given to somebody else, too."""
        return self._lent is not None

    def restore(self, handle: Handle) -> Tensor:
        return layout.restore(self._make(handle.spec), handle.spec)  # another save may have it transposed

    def _make(self, spec: TensorSpec) -> Tensor:
        stream, lent = stream_of(spec.device), self._lent
        if lent is not None and lent[0] == stream:
            self._left -= 1
            self._lent = lent if self._left else None
            return lent[1]
        tensor = self._run(spec)
        self._left = self._saves - 1
        self._lent = (stream, tensor) if self._left else None
        return tensor

    def _run(self, spec: TensorSpec) -> Tensor:
        maker = self._maker
        sources = [source.restore() for source in maker.sources]
        with Plainly(spec.device.type):
            tensor = maker.run(sources, spec.dtype)
        for source, restored in zip(maker.sources, sources, strict=True):
            if type(source.kept) is Coded:
                source.kept.lend(restored)  # backward of the op that made this is next, as a rule
        return tensor


def _unlike(handle: Handle, tensor: Tensor) -> PayloadError:
    spec = handle.spec
    return PayloadError(
        f"{handle.name}: decoded a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
        f"saved was {spec.dtype}, {spec.shape} on {spec.device}"
    )

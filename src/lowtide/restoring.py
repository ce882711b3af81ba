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
    gets it from the first. ``saves`` is how many share this. What a source was made of goes to the next who asks for
    it, likewise: as a rule that is backward of the op that made it.
    """

    __slots__ = ("_left", "_lent", "_saves", "maker")

    def __init__(self, maker: Maker, saves: int) -> None:
        self.maker, self._saves = maker, saves if maker.formula.attention is not None else 1
        self._left = 0  # asked for that often again, as a rule
        self._lent: tuple[int, Tensor] | None = None
        if maker.shared is not None:
            maker.shared.users += 1

    @property
    def is_lent(self) -> bool:
        """Whether what was given last will be given to somebody else, too."""
        return self._lent is not None

    def lend(self, tensor: Tensor) -> None:
        """As for a payload."""
        self._lent, self._left = (stream_of(tensor.device), tensor), 1

    def restore(self, handle: Handle) -> Tensor:
        spec, lent = handle.spec, self._lent
        if lent is not None and lent[0] == stream_of(spec.device):
            self._left -= 1
            self._lent = lent if self._left else None
            return _as_saved(lent[1], spec)
        tensor = self._run(spec)
        self._left = self._saves - 1
        self._lent = (stream_of(spec.device), tensor) if self._left else None
        return tensor

    def _run(self, spec: TensorSpec) -> Tensor:
        maker, device = self.maker, spec.device
        first = maker.shared.take(stream_of(device)) if maker.shared is not None else None
        sources = [source.restore() for source in maker.sources] if first is None else []
        with Plainly(device.type):
            if maker.shared is None or maker.spec is None:
                tensor = layout.restore(maker.run(sources, spec.dtype), spec)  # another save may have it transposed
            else:
                first = maker.begin(sources) if first is None else first
                tensor = _as_saved(_laid_out(maker.follow(first, spec.dtype), maker.spec), spec)
        if sources and torch._C._current_graph_task_id() != -1:  # backward of what made the sources is next, as a rule
            if maker.shared is not None and first is not None:
                maker.shared.lend(stream_of(device), first)
            for source, restored in zip(maker.sources, sources, strict=True):
                if type(source.kept) is Coded or type(source.kept) is Remade:
                    source.kept.lend(restored)
        return tensor


def _laid_out(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor with its values in memory as they were; a view with gaps may be any other."""
    if tensor.stride() == spec.stride or not layout.is_dense(spec.shape, spec.stride):
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(tensor)


def _as_saved(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The same memory in the geometry of another save."""
    if tensor.shape == spec.shape and (tensor.stride() == spec.stride or not layout.is_dense(spec.shape, spec.stride)):
        return tensor
    return tensor.as_strided(spec.shape, spec.stride, tensor.storage_offset())


def _unlike(handle: Handle, tensor: Tensor) -> PayloadError:
    spec = handle.spec
    return PayloadError(
        f"{handle.name}: decoded a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
        f"saved was {spec.dtype}, {spec.shape} on {spec.device}"
    )

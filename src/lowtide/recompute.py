"""Chosen modules are run again in backward: of what they save nothing is held, only their inputs, compressed.

Selective activation checkpointing (Chen et al. 2016), without a change to the model: while a chosen module runs, each
of its saves is replaced by a slot, which knows no more than its number. When backward asks a slot for its tensor the
module is run once more, from its inputs, and the slots get what is saved this time. The inputs are held as all other
values are: under a bound, by the method's codec, in its store; or exactly.

What a second run must find as the first one did is put in its place for as long as it lasts: the random generators,
autocast, and the buffers, of which it gets copies, so that the running statistics of a batch norm count once. Where the
second run saves other tensors than the first one, as data-dependent control flow may, that is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide.capture.handles import Handle, StorageRecord
from lowtide.capture.hooks import Capture
from lowtide.capture.scopes import Scope
from lowtide.codecs import Codec
from lowtide.errors import ModifiedError, PolicyError, RecomputeError
from lowtide.ledger import Ledger
from lowtide.policies.rules import Rule
from lowtide.records import Kind, Need
from lowtide.surroundings import Begin, Surroundings, copied_buffers, parameters_of, parts_of, rewind

OP = "recompute"  # under which the inputs of such modules appear in rules and reports
# A second run from inputs that are a little off takes other branches at a ReLU here and there. That harms the gradient
# more than the error itself and is in proportion to it, and a finer bound costs few bits.
BOUNDARY = "0.02 std"
_LOSSLESS = ("identity", "lossless")
_VALUES = Need(Kind.VALUES, "input of a module that is run again in backward", family="pointwise")
_EXACT = Need(Kind.EXACT, "input of a module that is run again in backward, kept exactly")


class Regions:
    """The chosen modules of one session; a region is one run of one of them."""

    def __init__(
        self, model: nn.Module, modules: bool | str | Iterable[str], capture: Capture, ledger: Ledger, *, exact: bool
    ) -> None:
        self.paths = {module: path for path, module in choose(model, modules).items()}
        self._capture, self._ledger, self._exact = capture, ledger, exact
        self._begin: Begin = rewind

    def enter(self, scope: Scope, module: nn.Module, inputs: tuple[Any, Any]) -> None:
        """A module is about to run: if it is a chosen one, and not inside of another, a region begins."""
        if module not in self.paths or scope.region is not None or not self._capture.is_innermost():
            return
        leaves, structure = _flatten(inputs)
        held = [self._hold(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        path, parts = self.paths[module], parts_of(module)
        device = _device_of(leaves, parts)
        surroundings = Surroundings(device, self._begin(path, device))
        scope.region = Region(module, path, held, structure, surroundings, parameters_of(parts))

    def exit(self, scope: Scope, module: nn.Module) -> None:
        region = scope.region
        if region is not None and region.module is module:
            assert isinstance(region, Region), "no other regions are entered here"
            scope.region = None
            region.end(self._ledger)

    @contextlib.contextmanager
    def drawing(self, begin: Begin) -> Iterator[None]:
        """What modules draw on their device is repeated in a way of its own for a while."""
        self._begin = begin
        try:
            yield
        finally:
            self._begin = rewind

    def _hold(self, tensor: Tensor) -> Input:
        need = _EXACT if self._exact or not tensor.is_floating_point() else _VALUES
        return Input(self._capture.hold(tensor, OP, "input", need), tensor.requires_grad)


class Input:
    """A tensor that a module was given, held until it is run again."""

    __slots__ = ("_handle", "_requires_grad")

    def __init__(self, handle: Handle, requires_grad: bool) -> None:
        self._handle, self._requires_grad = handle, requires_grad

    def restore(self) -> Tensor:
        return self._handle.restore().detach().requires_grad_(self._requires_grad)


class Region:
    """One run of a module: what it takes to run it again, and what it saves when that is done."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        inputs: Sequence[Any],
        structure: Any,
        surroundings: Surroundings,
        parameters: Sequence[tuple[nn.Parameter, int]],
    ) -> None:
        self.module, self.path = module, path
        self._inputs, self._structure = inputs, structure
        self._surroundings, self._parameters = surroundings, parameters
        self._slots: list[tuple[Any, ...]] = []  # shape, dtype and device of what was saved
        self._saved: list[tuple[Tensor, int] | None] = []
        self._raw = 0  # bytes that plain training would hold
        self._lock = threading.Lock()

    def pack(self, tensor: Tensor, record: StorageRecord | None) -> Slot:
        """A slot in place of a saved tensor; ``record`` counts the bytes that plain training would hold."""
        number = len(self._slots)
        self._slots.append(_kind_of(tensor))
        if record is not None:
            self._raw += record.claim()
        return Slot(self, number, record)

    def end(self, ledger: Ledger) -> None:
        """The module has run, or raised."""
        self._surroundings.draws.end()
        if self._slots:
            name, kind = f"{self.path}:{OP}.inside", type(self.module).__name__
            ledger.record(name, kind, "recomputed", "recomputed", "saved again by a second run", "", self._raw, 0)
            ledger.sites[name].saves += len(self._slots) - 1  # one has been counted

    def take(self, number: int) -> Tensor:
        """What slot ``number`` stands for. It is handed over: who asks again later has the module run again."""
        with self._lock:
            if not self._saved or self._saved[number] is None:
                self._saved = []
                self._saved = self._run_again()
            found = self._saved[number]
            assert found is not None
            self._saved[number] = None
        tensor, version = found
        if tensor._version != version:
            raise ModifiedError(
                f"{self.path}: a tensor of shape {tuple(tensor.shape)} that the module saved was modified in place "
                "afterwards, so its gradient cannot be computed. Hint: clone it before the change"
            )
        return tensor

    def _run_again(self) -> list[tuple[Tensor, int] | None]:
        parts = parts_of(self.module)
        if any(parameter._version != version for parameter, version in self._parameters):
            raise ModifiedError(
                f"{self.path}: a parameter has changed since forward, so the module cannot be run again. Run backward "
                "before the optimizer's step"
            )
        inputs = [leaf.restore() if isinstance(leaf, Input) else leaf for leaf in self._inputs]
        args, kwargs = _unflatten(inputs, self._structure)
        del inputs
        again = _SecondRun(self.path, self._slots)
        with self._surroundings.restored(), copied_buffers(parts), again:
            self.module(*args, **kwargs)
        return again.result()


class Slot:
    """What the graph owns instead of a tensor that a chosen module saved."""

    __slots__ = ("_given", "_number", "_record", "_region")

    def __init__(self, region: Region, number: int, record: StorageRecord | None) -> None:
        self._region, self._number, self._record = region, number, record
        self._given: weakref.ref[Tensor] | None = None

    def restore(self) -> Tensor:
        """May be asked for twice in a row, as a function does that reads its saved tensors twice."""
        tensor = self._given() if self._given is not None else None
        if tensor is None:
            tensor = self._region.take(self._number)
            self._given = weakref.ref(tensor)
        return tensor


class _Enough(Exception):
    """All slots are filled: what is left of the second run would compute nothing that anybody reads."""


class _SecondRun:
    """Collects what a module saves while it runs again, and ends the run when that is all."""

    def __init__(self, path: str, slots: Sequence[tuple[Any, ...]]) -> None:
        self._path, self._slots = path, slots
        self._saved: list[tuple[Tensor, int] | None] = []
        self._enough = _Enough()

    def __enter__(self) -> None:
        self._grad = torch.enable_grad()
        self._grad.__enter__()
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, _as_it_is)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: Any) -> bool:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._grad.__exit__(kind, error, *rest)
        self._enough.__traceback__ = None  # it has the frames of the module, and they have its tensors
        return error is self._enough

    def result(self) -> list[tuple[Tensor, int] | None]:
        if len(self._saved) != len(self._slots):
            raise self._differs(f"it saved {len(self._saved)} tensors")
        return self._saved

    def _pack(self, tensor: Tensor) -> Tensor:
        number = len(self._saved)
        if number == len(self._slots):  # the module has caught what was to end it
            raise self._enough
        if _kind_of(tensor) != self._slots[number]:
            raise self._differs(f"tensor {number} is now {_show(_kind_of(tensor))}, was {_show(self._slots[number])}")
        kept = tensor.detach()
        self._saved.append((kept, kept._version))
        if len(self._saved) == len(self._slots):
            raise self._enough
        return kept

    def _differs(self, difference: str) -> RecomputeError:
        return RecomputeError(
            f"{self._path}: run again in backward, the module saved other tensors than the {len(self._slots)} that it "
            f"saved in forward: {difference}. If what it does depends on values, keep its inputs exactly "
            "(boundary='exact'); if it grows a cache with every run, turn that off (use_cache=False); if it depends on "
            "anything else, do not recompute it"
        )


def boundary_rules(boundary: Any, values: Codec | None) -> tuple[Rule, ...]:
    """How the inputs of chosen modules are held: as asked for, or under ``BOUNDARY`` unless the method is exact."""
    if boundary is None and values is not None and values.name not in _LOSSLESS:
        boundary = BOUNDARY
    return (Rule(op=OP, bound=boundary),) if boundary not in (None, "exact") else ()


def choose(model: nn.Module, modules: bool | str | Iterable[str]) -> dict[str, nn.Module]:
    """The modules to run again, by path: those that match a pattern, or every block; never one inside of another.

    A block is a module with children that stands in an ``nn.Sequential`` or ``nn.ModuleList`` and is no such chain of
    blocks itself: a residual block, a layer of a transformer. Lists and dicts of modules do not run, so a pattern that
    matches them means what is in them. Of a model without blocks the parts that it is made of are taken.
    """
    if isinstance(modules, bool):
        found = dict(blocks(model)) or dict(_parts(model))
        if not found:
            raise PolicyError("recompute=True: this model has no parts that could be run again one by one")
        return found
    patterns = [modules] if isinstance(modules, str) else list(modules)
    found = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        runs = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if path and runs and not inside and any(fnmatchcase(path, pattern) for pattern in patterns):
            found[path] = module
    if not found:
        paths = [path for path, _ in model.named_modules() if path]
        raise PolicyError(
            f"recompute={modules!r} matches no module. Module paths here: {', '.join(paths[:8])}"
            f"{', ...' if len(paths) > 8 else ''}"
        )
    return found


def blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a model, by path, in the order in which they stand in it."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if _is_chain(module) and _has_children(child) and not _is_chain_of_blocks(child):
            yield below, child
        else:
            yield from blocks(child, below)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and next(child.parameters(), None) is not None:
            yield name, child


def _is_chain_of_blocks(module: nn.Module) -> bool:
    return _is_chain(module) and any(_has_children(child) for child in module.children())


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _flatten(inputs: tuple[Any, Any]) -> tuple[Sequence[Any], Any]:
    """The leaves of what a module was given, and what it takes to put them together again."""
    args, kwargs = inputs
    if not kwargs and all(isinstance(item, Tensor) for item in args):  # as a rule
        return args, None
    return pytree.tree_flatten(inputs)


def _unflatten(leaves: Sequence[Any], structure: Any) -> tuple[Any, Any]:
    if structure is None:
        return leaves, {}
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


def _device_of(inputs: Iterable[Any], parts: Iterable[nn.Module]) -> torch.device:
    """Where a module runs: where its first parameter is, or, if it has none, its first input."""
    parameters = (item for part in parts for item in part._parameters.values() if item is not None)
    tensors = (item for item in inputs if isinstance(item, Tensor))
    first = next(itertools.chain(parameters, tensors), None)
    return first.device if first is not None else torch.device("cpu")


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _show(kind: tuple[Any, ...]) -> str:
    shape, dtype, _ = kind
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor

"""When to record: which modules are running in this thread, and from when to when our saved-tensor hooks are on.

Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.capture import graph, identity
from lowtide.capture.handles import Entry, Handle, StorageRecord
from lowtide.capture.outputs import Watch
from lowtide.errors import AttachError, LowtideWarning

_RUN_AGAIN = ("torch.utils.checkpoint", "lowtide.recompute")  # hooks under which a module runs again, or will


class Region(Protocol):
    """One run of a module whose saves are not held, because it will be run again in backward."""

    @property
    def module(self) -> nn.Module: ...

    def pack(self, tensor: Tensor, record: StorageRecord | None) -> Any:
        """What the graph owns instead of ``tensor``; ``record`` if plain training would hold its storage."""
        ...


class Regions(Protocol):
    """Told of every module that is entered and left inside of a scope."""

    def enter(self, scope: Scope, module: nn.Module, inputs: Any) -> None: ...

    def exit(self, scope: Scope, module: nn.Module) -> None: ...


class Scope:
    """One stretch of recording: a forward of the attached model, or a block."""

    def __init__(self) -> None:
        self.walker = graph.Walker()
        self.unresolved: dict[int, weakref.ref[Handle]] = {}  # by number
        self._unresolved_limit = 64
        self._newest = self._first = 0  # the node that is being built, and the first save that waits for it
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.inputs: dict[int, StorageWeakRef] = {}
        self.buffers: set[int] | None = None
        self.ready: list[Entry] = []  # named, to be settled together
        self.ready_nbytes = 0
        self.saved_in: dict[str, int] = {}  # by module path
        self.packed = 0
        self.is_new = True  # nothing was saved yet in this forward
        self.has_run = False  # a forward in a block, of which the loss may be still to come
        self.is_pushed = False
        self.region: Region | None = None  # a module at work that will be run again in backward

    def wait_for(self, number: int, handle: weakref.ref[Handle]) -> None:
        """Note a handle whose op is not known yet; those that died waiting are swept out now and then."""
        if len(self.unresolved) >= self._unresolved_limit:
            self.unresolved = {number: ref for number, ref in self.unresolved.items() if ref() is not None}
            self._unresolved_limit = 2 * len(self.unresolved) + 64
        self.unresolved[number] = handle
        newest = graph.next_sequence_nr()
        if newest != self._newest:
            self._newest, self._first = newest, number

    @property
    def may_resolve(self) -> bool:
        """Whether a save waits whose node may be complete: those of the node that is being built cannot be found."""
        oldest = next(iter(self.unresolved), None)
        return oldest is not None and (oldest < self._first or graph.next_sequence_nr() != self._newest)

    def waits_for(self, handle: Handle) -> bool:
        ref = self.unresolved.get(handle.number)
        return ref is not None and ref() is handle  # a handle of another scope may have the same number


class _Running:
    """The modules being run, innermost last, and the scope they record into."""

    __slots__ = ("below", "block", "scope", "stack", "watch")

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, str, FrameType]] = []
        self.scope: Scope | None = None
        self.block: Scope | None = None
        self.watch: Watch | None = None  # on, outside of modules in a block
        self.below: int | None = None  # function modes that it was on top of


class _Threads(threading.local):
    """What runs in each thread, looked up once: an attribute of a thread's own costs more than one of an object."""

    def __init__(self) -> None:
        self.running = _Running()


class Scopes:
    """Opens a scope when the outermost module is entered, closes it when that module is left, however it is left.

    ``look(scope, output)`` is called when the outermost module, or an op outside of modules in a block, has returned
    ``output``; ``settle(scope)`` when a forward has ended or backward is about to begin, and ``close(scope)`` when a
    scope has ended. At the end of a scope our hooks are off already: whatever they raise, no hooks are left on.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        look: Callable[[Scope, Any], None],
        settle: Callable[[Scope], None],
        close: Callable[[Scope], None],
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._look, self._settle, self._close = look, settle, close
        self._threads = _Threads()
        self._warned: set[str] = set()
        self._calls: dict[str, int] = {}  # how deep below a call of a module, by its path, the surrounding one runs
        self._saves: dict[str, int] = {}  # and how deep below a save the module runs that saves it
        self.on_forward: Callable[[Scope], None] = lambda scope: None
        self.regions: Regions | None = None

    def enter(self, module: nn.Module, path: str, inputs: Any, frame: FrameType) -> None:
        """A module is about to run; the outermost one opens a scope [2]."""
        local = self._threads.running
        stack = local.stack
        if stack:
            outer = stack[-1][2]
            try:
                is_known = sys._getframe(self._calls.get(path, 0)) is outer
            except ValueError:  # the stack is not that deep
                is_known = False
            if not is_known and not _is_below(sys._getframe(), outer, self._calls, path):
                self._drop_dead_frames(frame)
        if not stack:
            if not self._may_record():
                return
            self._pause_watch()
            if local.block is not None and self._is_innermost():
                self._begin_forward(local.block, inputs)
            else:
                self._open(inputs)
        stack.append((module, path, frame))
        if self.regions is not None and local.scope is not None:
            self.regions.enter(local.scope, module, inputs)

    def exit(self, module: nn.Module, output: Any) -> None:
        """A module has run, or raised (then ``output`` is None)."""
        local = self._threads.running
        stack = local.stack
        if not stack or (stack[-1][0] is not module and not self.is_running(module)):
            return
        if self.regions is not None and local.scope is not None:
            self.regions.exit(local.scope, module)
        while stack.pop()[0] is not module:
            pass
        if stack or local.scope is None:
            return
        scope, local.scope = local.scope, None
        is_block = scope is local.block
        if not is_block:
            self._pop(scope)
        if output is not None:
            self._look(scope, output)
            self._settle(scope)
        if is_block:
            scope.has_run = output is not None
        else:
            self._close(scope)
            if output is not None:
                self.on_forward(scope)
        self._watch()

    def is_running(self, module: nn.Module) -> bool:
        stack = self._threads.running.stack
        if stack and stack[-1][0] is module:  # as a rule
            return True
        return any(entry[0] is module for entry in stack)

    def abandon(self) -> None:
        """Stop recording in this thread, in the middle of a forward if need be; a block goes on."""
        local = self._threads.running
        scope, local.scope = local.scope, None
        local.stack.clear()
        if local.block is not None:
            local.block.region = None
        try:
            if scope is not None and scope is not local.block:
                self._pop(scope)
                self._close(scope)
        finally:
            self._watch()

    def begin_block(self) -> Scope | None:
        """Open a scope that lasts until ``end_block``, whatever runs inside. None if there is no need for one [2]."""
        if torch.compiler.is_compiling():
            raise AttachError("torch.compile met a block that Lowtide records, which cannot be compiled; leave it out")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise AttachError(
                "a torch.func transform forbids saved-tensor hooks, so nothing can be recorded inside of it; put the "
                "block around code that the transform does not run, or leave it out"
            )
        local = self._threads.running
        if local.stack:
            self._drop_dead_frames(sys._getframe(1))
        if local.block is not None or local.scope is not None or self._runs_again():
            return None
        self._warn_nested(torch._C._autograd._top_saved_tensors_default_hooks(False))
        scope = Scope()
        self._push(scope)
        local.block, local.below = scope, None
        self._watch()
        return scope

    def end_block(self, block: Scope | None = None) -> None:
        """Close the block, unless it is another thread's; without one, whatever this thread has open."""
        local = self._threads.running
        if block is not None and local.block is not block:
            return
        try:
            self.abandon()
        finally:
            block, local.block = local.block, None
            if block is not None:
                if local.watch is not None:
                    local.watch.off()
                    local.watch = None
                self._pop(block)
        if block is not None:
            self._close(block)
            self._end_forward(block)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Record nothing for a while in this thread, in a block too: what runs inside takes care of its own saves."""
        local = self._threads.running
        scope = local.scope or local.block
        self._pause_watch()
        was_on = scope is not None and scope.is_pushed
        if scope is not None:
            self._pop(scope)
        try:
            yield
        finally:
            if scope is not None and was_on:
                self._push(scope)
            self._watch()

    def current(self) -> tuple[Scope | None, nn.Module | None, str]:
        """The scope to record into, and the innermost module being run, for the code that calls this."""
        local = self._threads.running
        stack = local.stack
        if stack:
            module, path, frame = stack[-1]
            try:
                is_known = sys._getframe(self._saves.get(path, 0)) is frame
            except ValueError:
                is_known = False
            if is_known or _is_below(sys._getframe(), frame, self._saves, path):
                return local.scope or local.block, module, path
            self._drop_dead_frames(sys._getframe(1))
        inner, path, _ = stack[-1] if stack else (None, "", None)
        return local.scope or local.block, inner, path

    def _drop_dead_frames(self, frame: FrameType | None) -> None:
        """Unwind modules that were left without their exit hook, as KeyboardInterrupt does [10]."""
        stack, running = self._threads.running.stack, set()
        while frame is not None:
            running.add(frame)
            frame = frame.f_back
        while stack and stack[-1][2] not in running:
            stack.pop()
        scope = self._threads.running.scope
        if not stack:
            self.abandon()
        elif scope is not None and scope.region is not None and not self.is_running(scope.region.module):
            scope.region = None

    def _may_record(self) -> bool:
        """Whether a run is recorded, or must be left alone [9]."""
        if not torch.is_grad_enabled() or self._runs_again():
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._warn(
                "func",
                "a torch.func transform or torch.compile is tracing the model, which forbids saved-tensor hooks: "
                "nothing is compressed there. To compile the model, call compile() of the session",
            )
            return False
        return True

    @staticmethod
    def _runs_again() -> bool:
        """Whether this is inside of backward, or in a checkpoint, whose own hooks must see all saves."""
        if torch._C._current_graph_task_id() != -1:
            return True
        other = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return other is not None and getattr(other[0], "__module__", None) in _RUN_AGAIN

    def _is_innermost(self) -> bool:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] == self._pack

    def _open(self, inputs: Any) -> None:
        """Open a scope for one run of the outermost module."""
        self._warn_nested(torch._C._autograd._top_saved_tensors_default_hooks(False))
        scope = self._threads.running.scope = Scope()
        scope.inputs = identity.storages(inputs)
        self._push(scope)

    def _begin_forward(self, block: Scope, inputs: Any) -> None:
        """A forward inside of a block: names and numbers start anew."""
        self._end_forward(block)
        self._threads.running.scope = block
        block.inputs = identity.storages(inputs)
        block.calls.clear()
        block.saved_in.clear()
        block.region = block.buffers = None
        block.is_new = True

    def _end_forward(self, block: Scope) -> None:
        """A forward in a block ends with its loss: where the next one begins, or the block ends."""
        if block.has_run:
            block.has_run = False
            self.on_forward(block)

    def _watch(self) -> None:
        """In a block, look at what ops outside of modules return."""
        local = self._threads.running
        if local.block is not None and local.watch is None:
            local.watch = Watch(self._before_backward, self._after_op)
            local.watch.on(local.below)

    def _pause_watch(self) -> None:
        """Not while a module runs, which would take time; left on if it lies below a mode of somebody else."""
        local = self._threads.running
        if local.watch is not None and local.watch.is_top():
            local.watch.off()
            local.watch, local.below = None, torch._C._len_torch_function_stack()

    def _before_backward(self) -> None:
        local = self._threads.running
        if local.block is not None and not local.stack:
            self._settle(local.block)

    def _after_op(self, output: Any) -> None:
        local = self._threads.running
        if local.block is not None and local.block.unresolved and not local.stack:
            self._look(local.block, output)

    def _push(self, scope: Scope) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        scope.is_pushed = True

    def _pop(self, scope: Scope) -> None:
        """Take our hooks off, also from under those that were put on after an interrupted forward [10]."""
        if not scope.is_pushed:
            return
        scope.is_pushed = False
        above = []
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if top[0] == self._pack:
                break
            above.append(top)
        for pair in reversed(above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)

    def _warn_nested(self, other: Any) -> None:
        if other is not None:
            self._warn(
                "nested",
                "other saved-tensor hooks (save_on_cpu, another Lowtide session, ...) are active here. Only the "
                "innermost hooks apply, so until they end Lowtide's replace them",
            )

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(text, LowtideWarning, stacklevel=5)


def _is_below(running: FrameType, frame: FrameType, depths: dict[str, int], path: str) -> bool:
    """Whether ``frame`` is still on the stack, at or below ``running``; notes how deep.

    Callers look first where it was found the last time, in ``depths``: to walk there costs an object for each call on
    the way, at every save.
    """
    depth = 0
    while running is not frame:
        if running.f_back is None:
            return False
        depth, running = depth + 1, running.f_back
    depths[path] = depth
    return True

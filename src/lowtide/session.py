"""attach, compress, Session: the one file that knows all the parts."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import methods
from lowtide.capture.gradients import Collector
from lowtide.capture.hooks import Capture
from lowtide.capture.modules import EnterHook, LeaveHook, hook, refuse_unsuitable, unhook
from lowtide.capture.scopes import Scope
from lowtide.errors import AttachError, GraphError, LowtideWarning, StateError, UnknownNameError
from lowtide.garbage import Tidiness
from lowtide.graphs.machine import Cuda
from lowtide.graphs.step import GraphStep
from lowtide.kernels._workspaces import Cell
from lowtide.ledger import Ledger
from lowtide.pipeline import Pipeline
from lowtide.policies.rules import Policy, load_rules
from lowtide.recompute import Regions, boundary_rules
from lowtide.records import ROOT
from lowtide.registry import METHODS, STORES
from lowtide.reports import Report
from lowtide.stores import Store
from lowtide.stores.device import Device

if TYPE_CHECKING:
    from lowtide.compiled.calls import Calls

STATE_VERSION = 3
DEFAULT_METHOD = "budget"
MIN_SIZE = 16384  # bytes; what is smaller costs more to handle than it takes
_CHECKS = (False, True, "full")
_MOST_RESTARTS = 64  # of gradients within a step: a gradient scaler that looks for its factor skips fewer
_MOST_FORWARDS = 1 << 12  # within a step that is measured


class Session:
    """Lowtide at work on one model. Made by ``attach`` or ``compress``; ``detach`` ends it and leaves no trace."""

    def __init__(
        self,
        model: nn.Module | None,
        method: str = DEFAULT_METHOD,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        rules: Any = None,
        store: str | Store | None = None,
        recompute: bool | str | Iterable[str] | None = None,
        boundary: Any = None,
        check: bool | str = False,
        min_size: int = MIN_SIZE,
        recast: bool = True,
        remake: bool | str | None = None,
        refresh: int = 64,
        seed: int = 0,
        compile: bool | Mapping[str, Any] = False,
        **options: Any,
    ) -> None:
        if check not in _CHECKS:
            raise UnknownNameError("value of check", str(check), map(str, _CHECKS))
        if not isinstance(refresh, int) or refresh < 1:
            raise AttachError(f"refresh is a number of saves, 1 or more; got {refresh!r}")
        chosen = methods.create(method, **options)
        products = _check_remake(remake, method, chosen)
        self.method = method
        self.ledger = Ledger()
        self.controller = chosen.controller()
        again = _find_regions(model, recompute, boundary, chosen)
        given, values = load_rules(rules), chosen.values()
        own = boundary_rules(boundary, values) if again else ()
        policy = Policy(self.controller, values, given + own, poison=bool(check), given=len(given))
        remakes = getattr(chosen, "remakes", False) if remake is None else bool(remake)
        wanted = getattr(chosen, "joins", None)
        joins = remakes and (bool(remake) if wanted is None else wanted)
        self._pipeline = pipeline = Pipeline(
            policy, _find_store(store, chosen), self.ledger, seed=seed, check=check, refresh=refresh,
            waits=getattr(self.controller, "follows_sizes", False), joins=joins,
        )  # fmt: skip
        self._capture = capture = Capture(
            model, self.ledger, pipeline.settle, pipeline.left, pipeline.settle_rest, min_size=min_size, recast=recast,
            remake=remakes, products=products, joins=joins,
        )  # fmt: skip
        self._scopes = capture.scopes
        self._scopes.on_forward = self._after_forward
        self._regions: Regions | None = None
        if again and model is not None:
            self._regions = Regions(model, again, capture, self.ledger, exact=boundary == "exact")
            self._scopes.regions = self._regions
        self._modules: list[nn.Module] = []
        self._is_detached = False
        self._collector = Collector(optimizer, pipeline.has_bound)
        self._tidiness = Tidiness()
        self._step_handle: Any = None
        self._warned_idle = False
        self._optimizer, self._moves = optimizer, 0
        self._graphs: weakref.WeakSet[GraphStep] = weakref.WeakSet()
        self._calls: Calls | None = None  # of a compiled model
        if model is not None:
            refuse_unsuitable(model)
            for path, module in model.named_modules():
                hook(module, EnterHook(self._scopes, path), LeaveHook(self._scopes))
                self._modules.append(module)
        if optimizer is not None:
            self._step_handle = optimizer.register_step_post_hook(_StepHook(self))
        self._begin_step()
        if compile:
            try:
                self.compile(**(compile if isinstance(compile, Mapping) else {}))
            except BaseException:
                self.detach()
                raise

    def detach(self) -> None:
        """Take all hooks off. Graphs that are already built keep their payloads until their backward."""
        for module in self._modules:
            unhook(module)
        if self._calls is not None and self._modules:
            self._modules[0]._compiled_call_impl = None
        self._modules.clear()
        if self._step_handle is not None:
            self._step_handle.remove()
        self._is_detached = True
        self._scopes.end_block()
        self._capture.on_named = None
        self._collector.close()
        self._tidiness.close()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold what is saved in this ``with`` block outside of the model, by a loss above all, like the model's saves.

            with tide.recording():
                loss = F.cross_entropy(model(x), y)
            loss.backward()

        ``attach`` alone records the forward of the model. Backward may run inside of the block or after it, several
        forwards may be in it, and blocks may be nested: the outermost counts. It is for the thread that enters it, does
        nothing once the session is detached, and is refused inside of ``torch.func`` transforms and ``torch.compile``;
        the transforms that differentiate (``grad``, ``vjp``) cannot be used inside of it.
        A target, or whatever else is no function of parameters, is kept as it is: its owner holds it anyway.
        """
        block = None if self._is_detached else self._scopes.begin_block()
        try:
            yield
        finally:
            if block is not None:
                self._scopes.end_block(block)

    def step(self, loss: Tensor | float | None = None) -> None:
        """A training step has ended: bounds may change now. Called by the optimizer's hook if one was given.

        ``loss``, if it is given, is watched: see ``watch``.
        """
        if loss is not None:
            self.watch(loss)
        number = self._pipeline.step
        arrived = self._collector.deliver()
        if self._collector.has_measured:
            arrived = self._capture.agreement.merge(arrived)
        self._collector.finish(number)
        moved = self.controller.step(number, arrived, self.ledger)
        self._moves += bool(moved)
        self._pipeline.end_step(moved=moved)
        self.ledger.end_step()
        self._begin_step()
        if not self._is_detached:
            self._tidiness.end_step()

    def watch(self, loss: Tensor | float) -> None:
        """The loss of the step at hand: if it jumps or is no number, adaptive methods return to exact storage."""
        self._collector.watch(torch.as_tensor(loss))

    def _begin_step(self) -> None:
        """Have what the controller asks for measured in the step that begins now; as a rule that is nothing."""
        self._forwards = 0
        wish = self._collector.reduce(self.controller.wants(self._pipeline.step))
        if wish is not None:
            self._collector.begin(wish)
        self._capture.on_named = self._collector.observe if wish is not None else None

    def report(self) -> Report:
        """What is held instead of what, site by site, and what was left alone and why."""
        self._pipeline.let_go()
        events = [*self.controller.events(), *(graph.describe() for graph in self._graphs if graph.calls)]
        if self._calls is not None:
            events.append(self._calls.describe())
        return Report.of(self.ledger, self.method, self.controller.noise_by_site(), events)

    def graph(
        self,
        step: Callable[..., Any],
        *,
        warmup: int = 12,
        refresh: int = 256,
        slack: float = 1 / 16,
        beside: bool = False,
    ) -> GraphStep:
        """A function that does what ``step`` does as a CUDA graph: on the host it costs one launch.

        ``step(*batch)`` runs forward and backward and returns the loss, or whatever is made of tensors; the optimizer
        is not part of it. Some calls still run eagerly: docs/graphs.md says which, and what a step may do.

        Args:
            warmup: eager calls before the first capture, 3 or more.
            refresh: replays at most before bounds and tables are measured anew, and another graph captured if need be.
            slack: room for payloads beyond what they took last, as a share of that, in the first graph; 1 at most.
                Those of ``rans`` have twice as much, in common; those of ``blocks`` each its own. Later graphs have
                what was needed, and little where that was little.
            beside: encode and decode beside the step's own kernels, each tensor of backward one ahead. That takes
                memory for two or three tensors more.
        """
        if not self._modules:
            raise GraphError("graph() needs a model that Lowtide is attached to")
        model = self._modules[0]
        if self._pipeline.check:
            raise GraphError("check compares tensors on the host; a session with CUDA graphs has to do without it")
        if not isinstance(self._pipeline.store, Device):
            raise GraphError("payloads on the host cannot be captured in a CUDA graph; use store='device'")
        device = next((item.device for item in model.parameters()), torch.device("cpu"))
        if device.type != "cuda":
            raise GraphError(f"CUDA graphs need a model on an NVIDIA GPU; this one is on {device}")
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        parameters = [*model.parameters(), *(item for group in groups for item in group["params"])]
        made = GraphStep(
            step, model, parameters, self._pipeline, Cuda(device), Cell(device), warmup=warmup, refresh=refresh,
            slack=slack, is_measured=lambda: self._capture.on_named is not None, moves=lambda: self._moves,
            beside=beside, regions=self._regions,
        )  # fmt: skip
        self._graphs.add(made)
        return made

    def compile(self, *, backend: str = "inductor", **options: Any) -> None:
        """Compile the model in place, as ``model.compile()`` does, with what Lowtide holds inside of the graphs.

        Steps that a controller wants measured run eagerly: with ``budget`` 0, 2, 4, 6, 8, 12, ... and then one in 400.
        What is held is what an eager forward would hold, in the same form: docs/compile.md. ``detach`` undoes it.

        Args:
            backend: ``"inductor"``, or ``"aot_eager"``, which traces and divides the graphs without compiling them.
            options: of ``torch.compile``: ``fullgraph``, ``dynamic``, ``options``, ``mode`` (without CUDA graphs).
        """
        from lowtide.compiled.start import refuse, start

        refuse(self._modules, self._calls, self._regions, self._graphs, products=self._capture.products)
        self._calls = start(
            self._modules[0], self._pipeline, self._capture, self._aside, backend=backend, options=options
        )

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Our hooks off for a while, of modules and of autograd."""
        hooks = [(module, unhook(module)) for module in self._modules]
        try:
            with self._scopes.aside():
                yield
        finally:
            for module, taken in hooks:
                if taken is not None:
                    hook(module, *taken)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to continue as if it had never stopped."""
        return {
            "version": STATE_VERSION,
            "method": self.method,
            "seed": self._pipeline.seed,
            "step": self._pipeline.step,
            "controller": self.controller.state_dict(),
            "sites": self._pipeline.sites.state_dict(),
            "statistics": self._collector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken; refuses the state of another method or another version."""
        expected = set(self.state_dict())
        if set(state) != expected:
            raise StateError(f"a session's state has the keys {sorted(expected)}, this one has {sorted(state)}")
        if state["version"] != STATE_VERSION:
            raise StateError(f"state has version {state['version']}, this Lowtide reads version {STATE_VERSION}")
        if state["method"] != self.method:
            raise StateError(f"state belongs to method {state['method']!r}, this session runs {self.method!r}")
        self.controller.load_state_dict(state["controller"])
        self._pipeline.sites.load_state_dict(state["sites"])
        self._pipeline.resume(int(state["seed"]), int(state["step"]))
        self.ledger.step = int(state["step"])
        self._collector.load_state_dict(state["statistics"])
        self._moves += 1  # graphs hold what was in force before
        self._begin_step()

    def _after_forward(self, scope: Scope) -> None:
        self._pipeline.let_go()
        self._pipeline.policy.warn_unmatched(path or ROOT for path, _, _ in scope.calls)
        self._forwards += 1
        if self._capture.agreement.is_needed and getattr(self.controller, "follows_sizes", False):
            raise AttachError(
                "memory= has bounds follow from the sizes of payloads, which differ on ranks that have parts of a "
                "tensor (DTensor), and copies of parameters would drift apart. Use noise= there"
            )
        if self._collector.restarts >= _MOST_RESTARTS or self._forwards >= _MOST_FORWARDS:
            self._give_up_measuring()
        policy = self._pipeline.policy
        idle = scope.packed and not self._pipeline.coded and policy.values is not None and not policy.is_waiting
        if idle and self._regions is None and not self._warned_idle:
            self._warned_idle = True
            reasons = sorted({entry.reason for entry in self.ledger.sites.values()})
            warnings.warn(
                "this forward saved tensors for backward and Lowtide compressed none of them "
                f"({'; '.join(reasons[:4]) or 'all are parameters, buffers or inputs'}). See session.report()",
                LowtideWarning,
                stacklevel=2,
            )

    def _give_up_measuring(self) -> None:
        """Steps go by that nobody counts: what is measured in one would pile up, and slow down every forward."""
        if self._capture.on_named is None:
            return
        self._capture.on_named = None
        self._collector.close()
        warnings.warn(
            f"method {self.method!r} sets bounds when a step ends, and none has ended in {self._forwards} forwards; "
            "bounds stay as they are. Give attach the optimizer that steps, or call session.step() after each step",
            LowtideWarning,
            stacklevel=3,
        )


def attach(model: nn.Module, method: str = DEFAULT_METHOD, **options: Any) -> Session:
    """Hold what ``model`` saves for backward compressed, from now until ``detach``.

    Args:
        model: any eager module; it is not changed or wrapped, and its state dict and results stay as they are.
        method: a named method; by default ``"budget"``, whose bounds follow from the gradient noise that you allow.
            ``"fixed"`` takes your bounds, ``"exact"`` is bit-equal to plain training.
        optimizer: steps are then counted by its post-step hook; otherwise call ``session.step()``.
        rules: ordered rules (objects, dicts, or the path of a TOML file) that override the method site by site.
        store: where payloads wait for backward: ``"device"`` or ``"host"`` (pinned memory), or a store with options of
            its own, as ``lowtide.stores.host.Host(staging="2GiB")``; by default the method's own, as a rule the device.
        recompute: modules to run again in backward instead of holding what they save: a pattern of module paths or
            several (``"layer3.*"``), or True for every block.
        boundary: how the inputs of those modules are held: a bound, or ``"exact"``; by default within 0.02 standard
            deviations, and exactly with a method that is exact.
        check: compare what backward gets with what was saved: True samples, ``"full"`` keeps all (for debugging).
        min_size: tensors of fewer bytes are passed through.
        recast: make autocast's copies of parameters again in backward instead of keeping them.
        remake: make what GELU, SiLU and layer norms have made again in backward, from what they have read, instead of
            holding both; and hold what a batch norm has read and what ReLU made of its output as one payload. With
            methods budget (by default; its option ``pairs`` is for the latter), fixed and exact. ``"linear"`` (method
            budget): run linear layers again, too, so that queries, keys and values and what GELU or a gate reads are
            not held: as a rule 1.3 to 2.5 times fewer bytes of a transformer than by default, for a ninth to a fifth
            of a step's products once more. docs/methods/budget.md
        refresh: bounds given as multiples of a statistic, and the tables of coders, are measured again every so many
            saves of a place in the model (and at its saves 1, 2, 4, 8, 16 and 32); 1 measures at every save.
        seed: of the dither; the global RNG is never touched.
        compile: True, or options of ``torch.compile``: have the model compiled, as ``session.compile()`` does.
        options: of the method (``noise=0.01`` or ``memory="8GiB"`` of method ``budget``); one that it does not have is
            refused, and the methods that have it are named.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach wants an nn.Module, got {type(model).__name__}")
    return Session(model, method, **options)


@contextlib.contextmanager
def compress(model: nn.Module | None = None, method: str = DEFAULT_METHOD, **options: Any) -> Iterator[Session]:
    """The same for a ``with`` block, what a loss saves outside of the model included. Without a model, saves are named
    by their op alone. Methods that set their own bounds learn from step to step: a block of one step has their first
    ones.
    """
    session = Session(model, method, **options)
    try:
        with session.recording():
            yield session
    finally:
        session.detach()


def _check_remake(remake: bool | str | None, name: str, method: methods.Method) -> bool:
    """Whether linear layers are to be run again; refuses what the method does not do."""
    if remake is not None and remake not in (False, True, "linear"):
        raise UnknownNameError("value of remake", str(remake), ("False", "True", "linear"))
    attribute = "remakes_products" if remake == "linear" else "remakes"
    if remake and not hasattr(method, attribute):
        able = [each for each in METHODS.names() if hasattr(METHODS.load(each), attribute)]
        if remake == "linear" and hasattr(method, "remakes"):
            raise AttachError(
                f"remake='linear' goes with the method {', '.join(able)}, which bounds inputs of layers by what is "
                f"made of them; {name!r} does not"
            )
        raise AttachError(f"remake goes with the methods {', '.join(able)}; {name!r} holds what it was made for")
    return remake == "linear"


def _find_store(store: str | Store | None, method: methods.Method) -> Store:
    """The store that was asked for, or the method's own, or the device."""
    if store is None:
        bring = getattr(method, "store", None)
        found: Store = bring() if bring is not None else STORES.create("device")
        return found
    return STORES.create(store) if isinstance(store, str) else store


def _find_regions(
    model: nn.Module | None, recompute: bool | str | Iterable[str] | None, boundary: Any, method: methods.Method
) -> bool | str | Iterable[str]:
    """The modules to run again that were asked for, or the method's own."""
    if recompute and model is None:
        raise AttachError("recompute runs modules again, so it needs a model; got None")
    if recompute is None and hasattr(method, "regions"):
        recompute = method.regions()
    if boundary is not None and not recompute:
        raise AttachError("boundary says how the inputs of recomputed modules are held; say recompute=... too")
    return recompute or False


class _StepHook:
    """Counts the optimizer's steps for a session without keeping it alive, and stays behind when copied."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        session = self._session()
        if session is not None:
            session.step()

    def __deepcopy__(self, memo: dict[int, Any]) -> _StepHook:
        return copy.copy(self)

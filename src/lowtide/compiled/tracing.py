"""Name every save while AOTAutograd traces forward and backward of a graph together.

It traces by running both, with tensors that have no memory. Hooks that are on while forward runs see each save, and the
metadata of the node at work says in which module; and when backward asks for the tensor, autograd says which of its own
nodes is at work: the op, the field and the scalars, as they are for an eager model. Each tensor goes back into backward
through an op that only marks it (``lowtide::saved``), for ``rewrite`` to find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._C import _autograd
from torch._ops import HigherOrderOperator
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from lowtide.capture import graph, identity, makers, needs, pairs
from lowtide.capture.formulas import Formula
from lowtide.capture.habits import site_of
from lowtide.compiled.holding import Desk, Save
from lowtide.compiled.ops import SAVED
from lowtide.errors import ModifiedError
from lowtide.records import ROOT, Kind, Need, Site, TensorSpec

# What a compiled graph calls by another name than eager autograd does.
_EAGER_NAMES = {
    "native_batch_norm_legit": "native_batch_norm",
    "native_batch_norm_legit_no_training": "native_batch_norm",
}


class Made(NamedTuple):
    """The op that made a tensor, by what it has saved: see ``lowtide.compiled.holding.Origin``."""

    formula: Formula | None  # None: with what it may share a payload
    sources: tuple[int, ...]  # numbers of saves
    beside: tuple[Tensor, ...]


class Traced:
    """What the graph that is traced owns instead of a saved tensor."""

    __slots__ = ("is_leaf", "made", "module", "number", "path", "tensor", "version")

    def __init__(self, tensor: Tensor, path: str, module: str, number: int, made: Made | None) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        self.is_leaf = tensor.grad_fn is None
        self.path, self.module, self.number, self.made = path, module, number, made

    @property
    def spec(self) -> TensorSpec:
        tensor = self.tensor
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


class _Input(NamedTuple):
    """A parameter that no op saves, as the graph is given it."""

    tensor: Tensor


class _Walk(makers.Walk):
    """As through a graph that eager autograd has made, but that parameters are inputs."""

    def __init__(self, inputs: Mapping[Any, Tensor]) -> None:
        super().__init__(_is_traced, lambda data: type(data) in (Traced, _Input), _is_intact)
        self._inputs = inputs

    def leaf(self, node: Any, dtype: torch.dtype | None) -> _Input | None:
        tensor = self._inputs.get(node) if dtype is None else None
        return None if tensor is None else _Input(tensor.detach())


class Tracer:
    """The saves of one graph. ``root``: the module whose forward it is."""

    def __init__(self, places: Places, root: str, desk: Desk) -> None:
        self._places, self._root, self._desk = places, root, desk
        self._known = frozenset(desk.ledger.sites)  # names that eager forwards have had
        self._saves: dict[int, Save] = {}
        self.made: dict[int, Made] = {}  # by the number of a save
        self._packed: list[Traced] = []
        self._prior: list[bool] = []
        self._inputs: dict[Any, Tensor] = {}  # by the node that autograd has for them

    def begin(self, inputs: Sequence[Any]) -> None:
        """Forward begins to be traced: AOTAutograd has turned hooks off, ours are to see this."""
        self._packed, self._saves, self.made = [], {}, {}
        self._inputs = {value.grad_fn: value for value in inputs if isinstance(value, Tensor) and value.requires_grad}
        self.go_on()

    def go_on(self) -> None:
        self._prior.append(_autograd._saved_tensors_hooks_set_tracing(False))
        _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def pause(self) -> None:
        _autograd._pop_saved_tensors_default_hooks()
        _autograd._saved_tensors_hooks_set_tracing(self._prior.pop())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While a graph is compiled: what ``begin_trace`` and its like in it refer to."""
        token = _tracer.set(self)
        try:
            yield
        finally:
            _tracer.reset(token)
            while self._prior:  # the trace has failed in between
                self.pause()

    def place(self, meta: Mapping[str, Any]) -> tuple[str, str]:
        """Path and type of the module that a node of the graph comes from."""
        return self._places.of(meta, self._root)

    def _pack(self, tensor: Tensor) -> Traced:
        path, module = self.place(traceback.get_current_meta())
        saved = Traced(tensor, path, module, len(self._packed), self._made(tensor))
        self._packed.append(saved)
        return saved

    def _unpack(self, saved: Traced) -> Tensor:
        tensor = saved.tensor
        if tensor._version != saved.version:
            raise ModifiedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"tensor of shape {tuple(tensor.shape)} saved in {saved.path or ROOT}. Hint: clone it before the change"
            )
        node = torch._C._current_autograd_node()
        if node is None or self._is_unfit(tensor):
            return tensor
        fields = {field: data for field, data in graph.saved_by(node) if type(data) is Traced}
        field = next((name for name, data in fields.items() if data is saved), None)
        if field is None:
            return tensor
        op = needs.op_of(type(node).__name__)
        need = needs.of(op, node, field, tensor.dtype, fields)
        self._saves[saved.number] = Save(Site(saved.path, needs.snake(op), field, 0, saved.module), need)
        if (need.kind is Kind.EXACT and need.family != "unknown") or _is_symbolic(need):
            return tensor
        if saved.made is not None:
            self.made[saved.number] = saved.made
        marked: Tensor = SAVED(tensor, saved.number, list(saved.made.beside) if saved.made is not None else [])
        return marked

    def _made(self, tensor: Tensor) -> Made | None:
        """Of what a tensor can be made again, or with what it may share a payload [18]."""
        if self._desk.remakes:
            walk = _Walk(self._inputs)
            formula = walk.behind(tensor.grad_fn)
            if formula is not None:
                sources = tuple(source.number for source in walk.sources)
                return Made(formula, sources, tuple(part.tensor for part in walk.parts))
        norm = pairs.norm_behind(tensor) if self._desk.joins else None
        bias = self._inputs.get(norm.next_functions[2][0]) if norm is not None else None  # which no norm saves
        saved = [getattr(norm, f"_raw_saved_{field}").data for field in pairs.FIELDS] if norm is not None else []
        if bias is None or not all(map(_is_traced, saved)) or pairs.is_rounded(saved[2].tensor.dtype):
            return None
        return Made(None, (saved[0].number,), (*(part.tensor for part in saved[1:]), bias.detach()))

    def _is_unfit(self, tensor: Tensor) -> bool:
        """What no codec takes; where a size is not known yet, whether it is worth while is asked when it is."""
        if (
            type(tensor) is not FunctionalTensor
            or tensor.dtype not in identity.DTYPES
            or tensor.layout is not torch.strided
        ):
            return True
        if free_unbacked_symbols(tensor) or any(type(stride) is int and stride == 0 for stride in tensor.stride()):
            return True
        nbytes = tensor.numel() * tensor.dtype.itemsize
        return type(nbytes) is int and nbytes < self._desk.min_size

    def named(self) -> dict[int, Save]:
        """All saves, exact ones too, with the names that they have in eager forwards: repeats are counted."""
        calls: dict[tuple[str, str, str], int] = {}
        named = {}
        for number, save in sorted(self._saves.items()):
            site = save.site
            op = self._eager_op(site)
            key = (site.path, op, site.field)
            call = calls[key] = calls.get(key, -1) + 1
            named[number] = Save(site_of(*key, call, site.module), save.need)
        return named

    def _eager_op(self, site: Site) -> str:
        """How eager autograd calls the op of a site: batch norms go by other names on other devices."""
        name = _EAGER_NAMES.get(site.op, site.op)
        if name == site.op or f"{site.path or ROOT}:{name}.{site.field}" in self._known:
            return name
        others = {entry.rsplit(":", 1)[-1].split(".", 1)[0] for entry in self._known if _is_beside(entry, site)}
        others = {op for op in others if op.endswith("batch_norm")}
        return others.pop() if len(others) == 1 else name


_tracer: ContextVar[Tracer | None] = ContextVar("lowtide.tracer", default=None)


def begin_trace(*inputs: Any) -> None:
    """Put first into a graph that is to be traced, with the graph's inputs; whoever runs it otherwise sees nothing."""
    if (tracer := _tracer.get()) is not None:
        tracer.begin(inputs)


def pause_trace() -> None:
    """Put last, and before what is not ours to look into."""
    if (tracer := _tracer.get()) is not None:
        tracer.pause()


def go_on_with_trace() -> None:
    """Put after it."""
    if (tracer := _tracer.get()) is not None:
        tracer.go_on()


for _function in (begin_trace, pause_trace, go_on_with_trace):
    fx.node.has_side_effect(_function)


def surround(module: fx.GraphModule) -> None:
    """Have hooks go on when ``module`` begins to run, and off at its end.

    Ops with graphs of their own are passed over: what a checkpoint saves will be made again, and the compiler knows.
    """
    graph = module.graph
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    for node in list(graph.nodes):
        if isinstance(node.target, HigherOrderOperator):
            with graph.inserting_before(node):
                graph.call_function(pause_trace)
            with graph.inserting_after(node):
                graph.call_function(go_on_with_trace)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        graph.call_function(begin_trace, inputs)
    with graph.inserting_before(next(node for node in reversed(graph.nodes) if node.op == "output")):
        graph.call_function(pause_trace)
    module.recompile()


class Places:
    """Where nodes of a graph come from, in the words of an eager capture: path and type of a module."""

    def __init__(self, model: nn.Module) -> None:
        self._by_path = {path: type(module).__name__ for path, module in model.named_modules()}
        self._by_id = {id(module): path for path, module in model.named_modules()}
        self._parameters = {id(part): (name, part) for name, part in model.named_parameters()}

    @property
    def paths(self) -> Iterable[str]:
        return (path or ROOT for path in self._by_path)

    def of(self, node: Mapping[str, Any], root: str = "") -> tuple[str, str]:
        """By a node's metadata; ``root`` is the module whose forward the graph is."""
        path = next(self._known(node), (root, ""))[0]
        return path, self._by_path.get(path, "")

    def parameter(self, value: Any) -> str | None:
        """The name of one of the model's parameters; None of anything else."""
        found = self._parameters.get(id(value))
        return found[0] if found is not None and found[1] is value else None

    def root_of(self, graph: fx.Graph) -> str:
        """The module whose forward is the graph: that of the model, or of a part where the graph begins there.

        Metadata names a module by its way from that one, and paths by that from the model.
        """
        for node in graph.nodes:
            for path, way in self._known(node.meta):
                known, parts = path.split("."), way.rpartition("]")[2].split(".")
                while known and parts and known[-1] == parts[-1]:
                    known.pop(), parts.pop()
                return ".".join(known)
        return ""

    def _known(self, meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Modules at work, the innermost first: path, and the way to it in the words of the compiler."""
        stack = meta.get("nn_module_stack") or {}
        for key in reversed(stack):
            number = str(key).split("@", 1)[0]
            if number.isdigit() and int(number) in self._by_id:
                yield self._by_id[int(number)], str(stack[key][0])


def _is_traced(data: Any) -> bool:
    return type(data) is Traced


def _is_intact(data: Any) -> bool:
    return type(data) is not Traced or not data.version


def _is_beside(name: str, site: Site) -> bool:
    return name.startswith(f"{site.path or ROOT}:") and name.endswith(f".{site.field}")


def _is_symbolic(need: Need) -> bool:
    """Whether a need has sizes in it that are not known before the graph runs."""
    return need.window is not None and not all(type(size) is int for size in need.window.plane)


def is_marked(node: Any) -> bool:
    return node.op == "call_function" and node.target is SAVED

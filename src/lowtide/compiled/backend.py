"""The backend that torch.compile is given: traces with names, divides with what is held, and hands on to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as aot_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from lowtide.compiled import tracing
from lowtide.compiled.holding import Desk, Exact, Group
from lowtide.compiled.rewrite import Given, divide
from lowtide.compiled.tracing import Places, Tracer

_COUNTED = "lowtide.counted"
BACKENDS = ("inductor", "aot_eager")

# A graph's memory is not to be written to once more while an encoder may still want to read it, nor that of a tensor
# that was decoded: another backward may ask for the same.
_INDUCTOR = {"allow_buffer_reuse": False, "inplace_buffers": False, "triton.cudagraphs": False}
_AOT = {"enable_autograd_cache": False}  # which knows graphs by what they are before they are traced


class Backend:
    """Compiles the graphs of one model."""

    def __init__(self, model: nn.Module, desk: Desk, name: str, options: dict[str, Any]) -> None:
        self.name, self.desk = name, desk
        self._options = options
        self.places = Places(model)
        self.graphs = 0
        self.ran = 0  # graphs, counted again each time
        self.held = 0  # tensors, in all graphs

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        root = self.places.root_of(module.graph)
        tracer = Tracer(self.places, root, self.desk)
        compiled = _Compiled(self, root, inputs)
        partition = _Partition(compiled, tracer, [_given(value) for value in inputs])
        tracing.surround(module)
        with tracer.active(), aot_config.patch(_AOT):
            if self.name == "inductor":
                patches = {**self._options, **_INDUCTOR, "custom_partitioner_fn": partition}
                run: Any = compile_fx(module, list(inputs), config_patches=patches)
            else:
                compiler = aot_autograd(
                    fw_compiler=boxed_nop,
                    bw_compiler=boxed_nop,
                    partition_fn=partition,
                    keep_inference_input_mutations=True,
                )
                run = compiler(module, inputs)
        self.graphs += 1
        self.held += len(compiled.groups)
        compiled.run = run
        return compiled


class _Compiled:
    """A compiled graph and what its ops refer to, which live as long as each other."""

    def __init__(self, backend: Backend, root: str, inputs: Sequence[Any]) -> None:
        self.backend = backend
        self._root, self._anchor = root, _first_parameter(inputs, backend.places)
        self.run: Callable[..., Any] | None = None
        self.groups: list[Group] = []
        self.exact: tuple[Exact, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        assert self.run is not None
        desk = self.backend.desk
        self.backend.ran += 1
        desk.moved = self._moved(arguments)
        try:
            results = self.run(*arguments)
        finally:
            desk.moved = None
        if self.exact:
            self._count(results)
        return results

    def _moved(self, arguments: Sequence[Any]) -> tuple[str, str] | None:
        """Where the graph was traced and where it runs, by one of its parameters: blocks that are alike share one."""
        if self._anchor is None:
            return None
        place, name = self._anchor
        now = self.backend.places.parameter(arguments[place])
        inner = name.removeprefix(self._root).removeprefix(".")
        if now is None or now == name or not now.endswith(inner):
            return None
        return self._root, now.removesuffix(inner).removesuffix(".")

    def _count(self, results: Any) -> None:
        """What the compiler keeps goes when backward has run, or the graph is let go."""
        node: Any = next((item.grad_fn for item in results if isinstance(item, Tensor) and item.grad_fn), None)
        if node is not None:
            node.metadata[_COUNTED] = self.backend.desk.count(self.exact)
            node.register_hook(partial(_forget, node.metadata))


class _Partition(CustomPartitionerFn):
    def __init__(self, compiled: _Compiled, tracer: Tracer, given: list[Given]) -> None:
        self._compiled, self._tracer, self._given = compiled, tracer, given

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward, self._compiled.groups, self._compiled.exact = divide(
            gm, joint_inputs, self._tracer, self._compiled.backend.desk, min_cut_rematerialization_partition,
            given=self._given, **kwargs,
        )  # fmt: skip
        return forward, backward

    def __deepcopy__(self, memo: dict[int, Any]) -> _Partition:
        return self  # the compiler copies its settings, of which this is one

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # it is in the key under which a compiled graph is stored

    def uuid(self) -> str:
        """Graphs are stored as they are when they have been divided, so that this has no part in them."""
        return "lowtide"


def _first_parameter(inputs: Sequence[Any], places: Places) -> tuple[int, str] | None:
    """Its place among the inputs, and its name."""
    names = ((place, places.parameter(value)) for place, value in enumerate(inputs))
    return next(((place, name) for place, name in names if name is not None), None)


def _forget(metadata: dict[str, Any], *gradients: Any) -> None:
    metadata.pop(_COUNTED, None)


def _given(value: Any) -> Given:
    if not isinstance(value, Tensor) or value.is_leaf:
        return Given.PARAMETER if isinstance(value, nn.Parameter) else Given.HELD
    return Given.MADE

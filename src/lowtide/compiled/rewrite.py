"""Change a traced graph so that backward reads what Lowtide holds, then let the compiler's own partitioner divide it.

Before it is divided, ``hold`` stands right after the tensor is made, and ``restore`` where backward read the tensor. Of
all that passes between them the token is the cheapest, so that is where the partitioner cuts. What it hands over
besides is what it would have handed over without us: exact tensors, parameters, small statistics.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as aot_config
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from lowtide.compiled.holding import Desk, Exact, Group, Origin, Save
from lowtide.compiled.ops import GATE, HOLD, RESTORE
from lowtide.compiled.tracing import Made, Tracer, is_marked
from lowtide.records import ROOT, TensorSpec


class Given(enum.Enum):
    """What an input of a graph is."""

    PARAMETER = "parameter"
    HELD = "held by somebody else: a buffer, the model's input"
    MADE = "made by an earlier graph of the model, and held by nobody else as a rule"


Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

_aten = torch.ops.aten
_THRESHOLD = _aten.threshold_backward.default
_SAME = frozenset((_aten.detach.default, _aten.alias.default))
_VIEWS = _SAME | {
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.t.default, _aten.transpose.int,
    _aten.permute.default, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
}  # fmt: skip
_PARTS = frozenset((_aten.expand.default, _aten.slice.Tensor))  # views, where they are of the whole
_CASTS = frozenset((torch.ops.prims.convert_element_type.default, _aten._to_copy.default))
# The compiler turns these into writes to the memory of what they read, if nobody else reads it afterwards.
_WRITES_TO_FIRST = ("index_put", "scatter")
_WRITES = ("auto_functionalized", "triton_kernel_wrapper", "all_reduce")
_RUN_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def divide(
    module: fx.GraphModule,
    joint_inputs: Any,
    tracer: Tracer,
    desk: Desk,
    partition: Partition,
    *,
    given: Sequence[Given],
    num_fwd_outputs: int,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule, list[Group], tuple[Exact, ...]]:
    """Forward and backward, the groups of saves that they hold, and what the compiler hands over besides.

    ``given``: what the graph's inputs are.
    """
    if aot_config.cse:
        module.graph = fx_graph_cse(module.graph)  # before casts are written twice, on purpose
    inputs = dict(zip((node for node in module.graph.nodes if node.op == "placeholder"), given, strict=False))
    groups = _replace_marks(module, tracer.named(), tracer.made, desk, inputs)
    if desk.recasts:
        _cast_again(module.graph, inputs)
    module.graph.lint()
    module.recompile()
    with aot_config.patch(cse=False):
        forward, backward = partition(module, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
    dropped = _undo_late_holds(backward)
    groups = [group for group in groups if group.key not in dropped]
    return forward, backward, groups, _exact_saves(forward, num_fwd_outputs, tracer)


def _replace_marks(
    module: fx.GraphModule,
    saves: Mapping[int, Save],
    made: Mapping[int, Made],
    desk: Desk,
    inputs: Mapping[fx.Node, Given],
) -> list[Group]:
    graph = module.graph
    gathered: dict[fx.Node, list[fx.Node]] = {}
    for node in [node for node in graph.nodes if is_marked(node)]:
        source = _behind(node.args[0], _VIEWS)
        save = saves.get(_number(node))
        if save is None or not _may_be_held(node, source, save, desk, inputs):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            gathered.setdefault(source, []).append(node)
    groups = [_put_in(graph, marks, saves, made, desk) for marks in _join(gathered, made)]
    return [group for group in groups if group is not None]


def _join(gathered: Mapping[fx.Node, list[fx.Node]], made: Mapping[int, Made]) -> list[list[fx.Node]]:
    """Marks of one tensor, and of those that are made of it, in the order in which the tensors are made."""
    holder = {_number(mark): source for source, marks in gathered.items() for mark in marks}  # by number
    joined: dict[fx.Node, list[fx.Node]] = {}
    first: dict[fx.Node, fx.Node] = {}  # by tensor: the one that its group goes by
    for source in sorted(gathered):
        marks = sorted(gathered[source], key=_number)  # as they were saved: the first one names the payload
        origins = (made.get(_number(mark)) for mark in marks)
        before = next((made.sources for made in origins if made and all(each in holder for each in made.sources)), ())
        leaders = sorted({first[holder[number]] for number in before if holder[number] in first}) or [source]
        for other in leaders[1:]:  # what is made of two joins the groups of both
            joined[leaders[0]] += joined.pop(other)
            first.update({tensor: leaders[0] for tensor, leader in first.items() if leader is other})
        first[source] = leaders[0]
        joined.setdefault(leaders[0], []).extend(marks)
    places = {source: place for place, source in enumerate(sorted(gathered))}
    return [sorted(marks, key=lambda mark: (places[holder[_number(mark)]], _number(mark))) for marks in joined.values()]


def _may_be_held(
    mark: fx.Node,
    source: fx.Node,
    save: Save,
    desk: Desk,
    inputs: Mapping[fx.Node, Given],
) -> bool:
    root = _behind(source, _VIEWS | _CASTS)
    if root.op == "placeholder":
        given = inputs.get(root, Given.HELD)
        if given is Given.PARAMETER or (given is Given.HELD and root is source):
            return False  # a parameter, its view or cast, a buffer, the model's input: somebody else holds it
    if source.op == "get_attr" or source.meta.get("recompute") in _RUN_AGAIN:
        return False
    if _may_be_written(source):
        return False
    value = mark.meta["val"]
    spec = TensorSpec((), (), value.dtype, value.device)
    with _disable_current_modes():  # codecs try themselves on real numbers
        decision = desk.pipeline.policy.decide(save.site, save.need, spec)
    return decision.codec is not None or decision.is_for_now


def _cast_again(graph: fx.Graph, inputs: Mapping[fx.Node, Given]) -> None:
    """Have backward make casts of parameters for itself, as autocast made them, instead of being handed them [3]."""
    behind: set[fx.Node] = set()  # what depends on gradients
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                behind.add(node)
            continue
        if behind.isdisjoint(node.all_input_nodes) and node.meta.get("partitioner_tag") != "must_be_in_backward":
            continue
        if node.op == "output":
            break
        behind.add(node)
        for argument in node.all_input_nodes:
            if argument not in behind and _is_cast(argument, inputs):
                node.replace_input_with(argument, _again(graph, argument, node))


def _is_cast(node: fx.Node, inputs: Mapping[fx.Node, Given]) -> bool:
    cast_node = _behind(node, _VIEWS)
    root = _behind(cast_node, _VIEWS | _CASTS)
    return cast_node is not root and root.op == "placeholder" and inputs.get(root) is Given.PARAMETER


def _again(graph: fx.Graph, node: fx.Node, user: fx.Node) -> fx.Node:
    """The node once more, for backward, with all that is between it and the parameter."""
    if node.op == "placeholder":
        return node
    source = _again(graph, cast(fx.Node, node.args[0]), user)
    with graph.inserting_before(user):
        copy = graph.node_copy(node, lambda argument: source if argument is node.args[0] else argument)
    copy.meta["partitioner_tag"] = "must_be_in_backward"
    return copy


def _put_in(
    graph: fx.Graph,
    marks: Sequence[fx.Node],
    saves: Mapping[int, Save],
    made: Mapping[int, Made],
    desk: Desk,
) -> Group | None:
    """One ``hold`` for all saves of a group, and a ``restore`` in place of each mark."""
    tensors: list[fx.Node] = [_early(graph, mark.args[0]) for mark in marks]
    numbers = {_number(mark): index for index, mark in enumerate(marks)}
    beside: list[fx.Node] = []
    origins: dict[int, Origin] = {}
    for index, mark in enumerate(marks):
        origin = made.get(_number(mark))
        if origin is not None and all(numbers.get(source, index) < index for source in origin.sources):
            places = tuple(range(len(beside), len(beside) + len(origin.beside)))
            beside += [_early(graph, node) for node in mark.args[2]]  # type: ignore[union-attr]
            origins[index] = Origin(origin.formula, tuple(numbers[source] for source in origin.sources), places)
    last = max([*tensors, *beside])
    while _next_is_part(last):  # an op of several results, and the results, stay together
        last = last.next
    if last > min(marks):  # a size that only backward asks for
        for mark in marks:
            mark.replace_all_uses_with(cast(fx.Node, mark.args[0]))
            graph.erase_node(mark)
        return None
    held = [saves[_number(mark)] for mark in marks]
    group = Group(desk, held, origins)
    with graph.inserting_after(last):
        token = graph.call_function(HOLD, ([*tensors, *beside], group.key))
    value = marks[0].meta["val"]
    with value.fake_mode:
        token.meta["val"] = HOLD([tensor.meta["val"] for tensor in tensors], group.key)
    token.meta["partitioner_tag"] = "is_forward"
    for index, (mark, tensor) in enumerate(zip(marks, tensors, strict=True)):
        value = mark.meta["val"]
        size = _sizes(graph, tensor, token, value)
        with graph.inserting_before(mark):
            arguments = (token, index, size, _order_of(value), value.dtype, value.device)
            restored = graph.call_function(RESTORE, arguments)
        restored.meta |= {**mark.meta, "partitioner_tag": "must_be_in_backward"}
        mark.replace_all_uses_with(restored)
        graph.erase_node(mark)
        if held[index].need.is_nonzero:
            _let_through(graph, restored)
    return group


def _let_through(graph: fx.Graph, result: fx.Node) -> None:
    """Have gradients pass through what is held of ReLU's result, instead of a mask that is made of it [7]."""
    token, index = result.args[:2]
    for user in _readers(result):
        if user.target is not _THRESHOLD or user.args[2] != 0 or _behind(user.args[0], _SAME) is result:
            continue
        gradient = cast(fx.Node, user.args[0])
        value, expected = user.meta["val"], torch.empty_like(gradient.meta["val"])
        if value.dtype != expected.dtype or value.stride() != expected.stride():
            continue
        with graph.inserting_before(user):
            gate = graph.call_function(GATE, (gradient, token, index))
        gate.meta |= {**user.meta, "partitioner_tag": "must_be_in_backward"}
        user.replace_all_uses_with(gate)
        mask = user.args[1]
        graph.erase_node(user)
        _erase_unused(graph, mask)


def _erase_unused(graph: fx.Graph, node: Any) -> None:
    """The node, if nobody reads it, and what it only names anew."""
    while not node.users:
        before = node.args[0] if node.target in _SAME else None
        graph.erase_node(node)
        if before is None:
            return
        node = before


def _readers(node: fx.Node) -> list[fx.Node]:
    """Ops that read the tensor, under whatever name."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if user.target in _SAME else [user]
    return found


def _number(mark: fx.Node) -> int:
    """Of the save that is marked, in the order of saving."""
    return cast(int, mark.args[1])


def _early(graph: fx.Graph, node: Any) -> fx.Node:
    """The same tensor, as it can be had in forward: a trace writes views where they are read, in backward too."""
    node = _behind(node, _SAME)
    if node.target not in _VIEWS and not _is_whole(node):
        return cast(fx.Node, node)
    source = _early(graph, node.args[0])
    others = [argument for argument in node.all_input_nodes if argument is not node.args[0]]  # sizes
    with graph.inserting_after(max([source, *others])):
        return graph.node_copy(node, lambda argument: source if argument is node.args[0] else argument)


def _sizes(graph: fx.Graph, tensor: fx.Node, token: fx.Node, value: torch.Tensor) -> list[Any]:
    """The sizes of a tensor: numbers, or what asks for them in forward where they are not known yet."""
    sizes: list[Any] = []
    for axis, size in enumerate(value.shape):
        if type(size) is int:
            sizes.append(size)
            continue
        with graph.inserting_before(token):
            asked = graph.call_function(_aten.sym_size.int, (tensor, axis))
        asked.meta["val"] = size
        asked.meta["partitioner_tag"] = "is_forward"
        sizes.append(asked)
    return sizes


def _order_of(value: torch.Tensor) -> list[int]:
    """Axes as they lie in memory, the outermost first."""
    strides = [_hint(stride) for stride in value.stride()]
    return sorted(range(value.dim()), key=lambda axis: (-strides[axis], axis))


def _hint(size: Any) -> int:
    return size if type(size) is int else int(size.node.hint)


def _next_is_part(node: fx.Node) -> bool:
    return (node.op == "placeholder" and node.next.op == "placeholder") or node.next.target is operator.getitem


def _behind(node: Any, ops: frozenset[Any] | set[Any]) -> fx.Node:
    """What ``node`` is made of, through ``ops`` alone."""
    while node.op == "call_function" and (node.target in ops or (ops >= _VIEWS and _is_whole(node))):
        node = node.args[0]
    found: fx.Node = node
    return found


def _is_whole(node: fx.Node) -> bool:
    """Whether a view that could be of a part, or of copies, is of the whole tensor and of each value once."""
    if node.target not in _PARTS:
        return False
    before, after = cast(fx.Node, node.args[0]).meta["val"].shape, node.meta["val"].shape
    return len(before) == len(after) and all(map(_are_equal, before, after))


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal, with no new condition on either."""
    return bool(statically_known_true(one == other))


def _may_be_written(node: fx.Node) -> bool:
    """Whether an op may be turned into one that writes its result into the memory of the tensor."""
    for user in node.users:
        name = str(user.target)
        if any(part in name for part in _WRITES_TO_FIRST) and user.args and user.args[0] is node:
            return True
        if any(part in name for part in _WRITES) or (user.target in _VIEWS | _PARTS and _may_be_written(user)):
            return True
    return False


def _undo_late_holds(backward: fx.GraphModule) -> set[str]:
    """Where backward has the tensor itself, because somebody else reads all of it, there is nothing to hold."""
    graph, dropped = backward.graph, set()
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target is HOLD]:
        tensors, key = node.args
        for user in list(node.users):
            if user.target is GATE:
                gradient, _, index = user.args
                with graph.inserting_before(user):
                    tensor = graph.call_function(_THRESHOLD, (gradient, tensors[index], 0))
                tensor.meta |= user.meta
            else:
                tensor = tensors[user.args[1]]
            user.replace_all_uses_with(tensor)
            graph.erase_node(user)
        graph.erase_node(node)
        dropped.add(key)
    if dropped:
        backward.recompile()
    return dropped


def _exact_saves(forward: fx.GraphModule, num_fwd_outputs: int, tracer: Tracer) -> tuple[Exact, ...]:
    """What else passes from forward to backward and is not held by somebody anyway."""
    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    results = [_behind(node, _VIEWS) for node in output.args[0] if isinstance(node, fx.Node)]
    given, handed = set(results[:num_fwd_outputs]), dict.fromkeys(results[num_fwd_outputs:])
    exact = []
    for node in handed:
        value = node.meta.get("val")
        if node.op == "placeholder" or node in given or node.target is HOLD or not isinstance(value, torch.Tensor):
            continue
        if free_unbacked_symbols(value):
            continue
        nbytes = value.dtype.itemsize
        for size in value.shape:
            nbytes *= _hint(size)
        path, module = tracer.place(node.meta)
        op = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        exact.append(Exact(f"{path or ROOT}:{op}", module, nbytes))
    return tuple(exact)

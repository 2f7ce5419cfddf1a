"""Cuts the graph of a torch.export program into stages.

Nodes are matched by name, or by module if the plan was made from another export of the module. A stage becomes a GraphModule
from received to sent tensors. torch's pipeline only sends tensors to the next stage, so tensors for later stages pass through
all stages between. The stages share parameters and buffers with the graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch
import torch.utils.checkpoint
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


class SplitError(ValueError):
    """The model is not the one that was planned, or does not run with its micro-batch size."""


@dataclass
class Wire:
    """A tensor received or sent by a stage."""

    name: str
    shape: Tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def example(self) -> torch.Tensor:
        """A tensor of the same shape and type, without values."""
        return torch.empty(self.shape, dtype=self.dtype, requires_grad=self.requires_grad, device="meta")


@dataclass
class Stage:
    """A stage: its module, inputs and outputs."""

    module: fx.GraphModule
    inputs: List[Wire]
    outputs: List[Wire]


class Whole(torch.autograd.Function):
    """A contiguous copy of a tensor, with a contiguous gradient: gloo only sends contiguous tensors."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that enters a stage or passes through it."""
    copied: torch.Tensor = Whole.apply(tensor)
    return copied


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy of a stage output: a split backward detaches it in place, which fails for views and saved tensors."""
    return tensor.clone(memory_format=torch.contiguous_format)


class Recorder(fx.Interpreter):
    """Runs a graph once and records the numbers and tensor shapes of its nodes."""

    def __init__(self, module: fx.GraphModule, mode: Optional[FakeTensorMode] = None) -> None:
        super().__init__(module)
        self.mode = mode
        self.numbers: Dict[str, Any] = {}
        self.wires: Dict[str, Wire] = {}

    def fake(self, value: Any) -> Any:
        """The value, without its data if the run is without data."""
        if self.mode is None or not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            # Modules on the meta device are exported as on the CPU.
            with self.mode:
                return torch.empty_like(value, device="cpu").requires_grad_(value.requires_grad)
        return self.mode.from_tensor(value, static_shapes=True)

    def fetch_attr(self, target: str) -> Any:
        return self.fake(super().fetch_attr(target))

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.wires[n.name] = Wire(n.name, tuple(value.shape), value.dtype, value.requires_grad)
        elif isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            kinds: Dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
            self.numbers[n.name] = kinds.get(type(value), type(value))(value)
        elif n.op == "placeholder":
            self.numbers[n.name] = value
        return value


def record(graph_module: fx.GraphModule, example: Sequence[Any], context: Callable[[], ContextManager[Any]]) -> Recorder:
    """Runs the graph without data, or with data if it computes numbers from the values of tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(graph_module, mode)
    try:
        with context(), mode:
            recorder.run(*[recorder.fake(value) for value in example])
        return recorder
    except AssertionError:
        raise
    except Exception:
        recorder = Recorder(copy.deepcopy(graph_module))
        with context():
            recorder.run(*example)
        return recorder


def split(
    graph_module: fx.GraphModule,
    plan: Mapping[str, Any],
    example: Sequence[Any],
    device: Optional[torch.device] = None,
    context: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
) -> List[Stage]:
    """The stages of a model, for micro-batches of the sizes of `example`.

    `device` replaces the devices that the graph names. `context` is the context in which the stages will run.
    """
    graph = graph_module.graph
    try:
        recorder = record(graph_module, example, context)
    except AssertionError as fault:
        raise SplitError(
            f"the model does not accept micro-batches of {plan['micro_batch']} of this data: {str(fault).splitlines()[0]}\n"
            "export with torch.export.export(model, inputs, dynamic_shapes=...) for any batch size"
        ) from None
    follow_changes(graph)
    nodes = [node for node in graph.nodes if node.op != "output" and not is_guard(node)]
    nodes = [node for node in nodes if node.name not in recorder.numbers]
    stages = assign(nodes, plan)
    count = len(plan["stages"])
    results = [value for value in result_leaves(graph) if isinstance(value, fx.Node)]
    last_reader: Dict[fx.Node, int] = {}
    for node in nodes:
        for read in node.all_input_nodes:
            if node in stages:
                last_reader[read] = max(last_reader.get(read, 0), stages[node])
    for node in results:
        last_reader[node] = count - 1

    def crossing(border: int) -> List[fx.Node]:
        return [node for node in nodes if node in stages and stages[node] <= border < last_reader.get(node, 0)]

    made = []
    for at in range(count):
        inputs = [node for node in nodes if node.op == "placeholder"] if at == 0 else crossing(at - 1)
        outputs = results if at == count - 1 else crossing(at)
        built = stage(graph_module, nodes, stages, at, inputs, outputs, recorder, device)
        if plan["stages"][at].get("recompute"):
            built.module.forward = functools.partial(torch.utils.checkpoint.checkpoint, built.module.forward, use_reentrant=False)
        made.append(built)
    return made


def result_leaves(graph: fx.Graph) -> List[Any]:
    """The leaves of what a graph returns: nodes, and constants such as None."""
    (result,) = [node for node in graph.nodes if node.op == "output"]
    return flat(result.args[0])


def is_guard(node: fx.Node) -> bool:
    """True if a node only checks sizes, which are fixed here."""
    target = str(node.target)
    return (node.op == "call_module" and target == "_guards_fn") or "_assert" in target or "sym_constrain" in target


def flat(value: Any) -> List[Any]:
    """The leaves of nested lists."""
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flat(part)]
    return list(value.values()) if isinstance(value, dict) else [value]


def changes_its_input(node: fx.Node) -> bool:
    """True if an operator writes to its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    first = schema.arguments[0].alias_info if schema.arguments else None
    return first is not None and first.is_write


def follow_changes(graph: fx.Graph) -> None:
    """Makes readers of a tensor after an in-place change read its result, as the tensor may be in another stage."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        changed: Any = node.args[0] if node.args else None
        schema: Any = getattr(node.target, "_schema", None)
        if changes_its_input(node) and changed.op != "get_attr" and len(schema.returns) == 1:
            later = [user for user in changed.users if place[user] > place[node]]
            for user in later:
                user.replace_input_with(changed, node)


def assign(nodes: Sequence[fx.Node], plan: Mapping[str, Any]) -> Dict[fx.Node, int]:
    """The stage of every node that depends on an input. A node that the plan does not name joins its last input."""
    by_name: Dict[str, int] = {}
    by_module: Dict[str, Set[int]] = {}
    for at, planned in enumerate(plan["stages"]):
        for name in planned["nodes"]:
            by_name.setdefault(name, at)
        for name in planned["modules"]:
            by_module.setdefault(name, set()).add(at)
    names = {node.name for node in nodes}
    missing = [name for name in by_name if name not in names]
    if missing and not by_module:
        raise SplitError(f"the model has no nodes {missing[:3]}: the plan is for another model")
    cut = sorted(name for name, held in by_module.items() if len(held) > 1)
    if missing and cut:
        raise SplitError(
            f"the model has no nodes {missing[:3]}, and modules {cut[:3]} are in several stages: plan from a file "
            "of torch.export.save to match nodes, or with --target torchtitan to keep modules whole"
        )
    if missing:
        found = {module_stage(node, by_module) for node in nodes}
        for at, planned in enumerate(plan["stages"]):
            if planned["modules"] and at not in found:
                raise SplitError(f"the model has none of the modules {planned['modules'][:3]} of stage {at}: the plan is for another model")
    stages: Dict[fx.Node, int] = {}
    waiting: List[fx.Node] = []
    for node in nodes:
        if node.op == "get_attr":
            continue
        after = max((stages[read] for read in node.all_input_nodes if read in stages), default=None)
        own = module_stage(node, by_module) if missing else by_name.get(node.name)
        if node.op == "placeholder":
            stages[node] = 0
        elif changes_its_input(node) and node.all_input_nodes[0].op == "get_attr" and after is None:
            # A batch counter belongs to the next layer.
            waiting.append(node)
        elif own is not None or after is not None or is_random(node):
            # A node whose ops are in several stages belongs to the first of them, with its weights.
            stages[node] = max(own or 0, after or 0)
            while waiting:
                stages[waiting.pop()] = stages[node]
    for node in waiting:
        stages[node] = len(plan["stages"]) - 1
    return stages


def module_stage(node: fx.Node, by_module: Mapping[str, Set[int]]) -> Optional[int]:
    """The stage of the innermost module that a node comes from."""
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        path = path.removeprefix("L['self'].").removeprefix("L__self__.")
        if path in by_module:
            return min(by_module[path])
    return None


def is_random(node: fx.Node) -> bool:
    """True if an operator is random."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def stage(
    graph_module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    stages: Mapping[fx.Node, int],
    at: int,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    recorder: Recorder,
    device: Optional[torch.device],
) -> Stage:
    """Builds the module of one stage."""
    graph = fx.Graph()
    held: Dict[str, Any] = {}
    placed: Dict[fx.Node, fx.Node] = {}
    numbers = recorder.numbers

    def value(node: fx.Node) -> Any:
        if node.name in numbers:
            return numbers[node.name]
        if node not in placed:
            # A node that depends on no input is copied into every stage that reads it.
            copied(node)
        return placed[node]

    def copied(node: fx.Node) -> None:
        open_nodes = [node]
        while open_nodes:
            top = open_nodes[-1]
            unmade = [n for n in top.all_input_nodes if n not in placed and n.name not in numbers and n not in stages]
            if unmade:
                open_nodes.extend(unmade)
                continue
            open_nodes.pop()
            if top not in placed:
                if top.op in ("get_attr", "call_module"):
                    held[str(top.target)] = attribute(graph_module, str(top.target))
                placed[top] = moved(graph.node_copy(top, value), device)

    for node in inputs:
        arrived = graph.placeholder("in_" + node.name)
        wire = recorder.wires[node.name]
        floats = wire.dtype.is_floating_point and at > 0
        placed[node] = graph.call_function(whole, (arrived,)) if floats else arrived
    for node in nodes:
        if stages.get(node) == at and node.op != "placeholder":
            copied(node)
    through = set(inputs)
    leaving = []
    for node in outputs:
        left = value(node)
        leaving.append(graph.call_function(whole if node in through else in_order, (left,)))
    graph.output(leaving[0] if len(leaving) == 1 else tuple(leaving))
    module = fx.GraphModule(held, graph, class_name=f"Stage{at}")
    return Stage(module, [recorder.wires[node.name] for node in inputs], [recorder.wires[node.name] for node in outputs])


def moved(node: fx.Node, device: Optional[torch.device]) -> fx.Node:
    """The node with `device` in place of a device that it names."""
    if device is not None:
        node.args = tuple(device if isinstance(value, torch.device) else value for value in node.args)
        node.kwargs = {name: device if isinstance(value, torch.device) else value for name, value in node.kwargs.items()}
    return node


def attribute(module: fx.GraphModule, path: str) -> Any:
    """Resolves a dotted path."""
    return operator.attrgetter(path)(module) if "." in path else getattr(module, path)

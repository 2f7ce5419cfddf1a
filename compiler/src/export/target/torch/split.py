"""Cuts a model into the stages of stages.json, from the folder of this file.

A model is a torch.export program: a file of torch.export.save, or the module and example inputs that `package.module:function`
returns. Nodes are matched by name, or by module if the plan was made from another export of the module. A stage becomes a
GraphModule from received to sent tensors. torch's pipeline only sends tensors to the next stage, so tensors for later stages
pass through all stages between.

torch.export.load can execute code from the file: only load files that you trust.
"""

import copy
import importlib
import json
import operator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

HERE = Path(__file__).resolve().parent


@dataclass
class Wire:
    """A tensor received or sent by a stage."""

    name: str
    shape: tuple
    dtype: torch.dtype
    requires_grad: bool

    def example(self):
        """An empty tensor of the same shape and type."""
        return torch.empty(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)


@dataclass
class Stage:
    """A stage: its module, inputs and outputs."""

    module: fx.GraphModule
    inputs: list
    outputs: list


class Whole(torch.autograd.Function):
    """A contiguous copy of a tensor, with a contiguous gradient: gloo only sends contiguous tensors."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.contiguous().clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()


def whole(tensor):
    """A copy of a tensor that enters a stage or passes through it."""
    return Whole.apply(tensor)


def in_order(tensor):
    """A private copy of a stage output: a split backward detaches it in place, which fails for views and saved tensors."""
    return tensor.clone(memory_format=torch.contiguous_format)


def read_plan(path=HERE / "stages.json"):
    """Reads stages.json."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def imported(name):
    """Imports `package.module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load(file=None, module=None):
    """The model as a graph, from a file or from a function that returns a module and its example inputs."""
    if file is not None:
        return torch.export.load(file).module()
    built, example = imported(module)()
    return torch.export.export(built, tuple(example)).module()


class Recorder(fx.Interpreter):
    """Runs a graph once and records the numbers and tensor shapes of its nodes."""

    def __init__(self, module):
        super().__init__(module)
        self.numbers = {}
        self.wires = {}

    def run_node(self, node):
        value = super().run_node(node)
        if isinstance(value, torch.Tensor):
            self.wires[node.name] = Wire(node.name, tuple(value.shape), value.dtype, value.requires_grad)
        elif isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
            self.numbers[node.name] = kinds.get(type(value), type(value))(value)
        return value


def split(graph_module, plan, example):
    """The stages of a model, for micro-batches of the sizes of `example`."""
    graph = graph_module.graph
    recorder = Recorder(copy.deepcopy(graph_module))
    try:
        recorder.run(*example)
    except AssertionError as fault:
        raise SystemExit(
            f"the model does not accept micro-batches of {plan['micro_batch']} of this data: {str(fault).splitlines()[0]}\n"
            "export with torch.export.export(model, inputs, dynamic_shapes=...) for any batch size"
        ) from None
    follow_changes(graph)
    nodes = [node for node in graph.nodes if node.op != "output" and not is_guard(node)]
    nodes = [node for node in nodes if node.name not in recorder.numbers]
    stages = assign(nodes, plan)
    count = len(plan["stages"])
    (result,) = [node for node in graph.nodes if node.op == "output"]
    results = [value for value in flat(result.args[0]) if isinstance(value, fx.Node)]
    last_reader = {}
    for node in nodes:
        for read in node.all_input_nodes:
            if node in stages:
                last_reader[read] = max(last_reader.get(read, 0), stages[node])
    for node in results:
        last_reader[node] = count - 1
    crossing = lambda border: [
        node for node in nodes if node in stages and stages[node] <= border < last_reader.get(node, 0)
    ]
    made = []
    for at in range(count):
        inputs = [node for node in nodes if node.op == "placeholder"] if at == 0 else crossing(at - 1)
        outputs = results if at == count - 1 else crossing(at)
        made.append(stage(graph_module, nodes, stages, at, inputs, outputs, recorder))
    return made


def is_guard(node):
    """True if a node only checks sizes, which are fixed here."""
    target = str(node.target)
    return (node.op == "call_module" and target == "_guards_fn") or "_assert" in target or "sym_constrain" in target


def flat(value):
    """The leaves of nested lists."""
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flat(part)]
    return list(value.values()) if isinstance(value, dict) else [value]


def changes_its_input(node):
    """True if an operator writes to its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    first = schema.arguments[0].alias_info if schema.arguments else None
    return first is not None and first.is_write


def follow_changes(graph):
    """Makes readers of a tensor after an in-place change read its result, as the tensor may be in another stage."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if changes_its_input(node) and node.args[0].op != "get_attr" and len(node.target._schema.returns) == 1:
            changed = node.args[0]
            later = [user for user in changed.users if place[user] > place[node]]
            for user in later:
                user.replace_input_with(changed, node)


def assign(nodes, plan):
    """The stage of every node that depends on an input. A node that the plan does not name joins its last input."""
    by_name, by_module = {}, {}
    for at, planned in enumerate(plan["stages"]):
        for name in planned["nodes"]:
            by_name.setdefault(name, at)
        for name in planned["modules"]:
            by_module.setdefault(name, set()).add(at)
    names = {node.name for node in nodes}
    missing = [name for name in by_name if name not in names]
    if missing and not by_module:
        raise SystemExit(f"the model has no nodes {missing[:3]}: the plan is for another model")
    cut = sorted(name for name, held in by_module.items() if len(held) > 1)
    if missing and cut:
        raise SystemExit(
            f"the model has no nodes {missing[:3]}, and modules {cut[:3]} are in several stages: plan from a file "
            "of torch.export.save to match nodes, or with --target torchtitan to keep modules whole"
        )
    if missing:
        found = {module_stage(node, by_module) for node in nodes}
        for at, planned in enumerate(plan["stages"]):
            if planned["modules"] and at not in found:
                raise SystemExit(f"the model has none of the modules {planned['modules'][:3]} of stage {at}: the plan is for another model")
    stages, waiting = {}, []
    for node in nodes:
        if node.op == "get_attr":
            continue
        after = max((stages[read] for read in node.all_input_nodes if read in stages), default=None)
        own = module_stage(node, by_module) if missing else by_name.get(node.name)
        if node.op == "placeholder":
            stages[node] = 0
        elif changes_its_input(node) and node.args[0].op == "get_attr" and after is None:
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


def module_stage(node, by_module):
    """The stage of the innermost module that a node comes from."""
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        path = path.removeprefix("L['self'].").removeprefix("L__self__.")
        if path in by_module:
            return min(by_module[path])
    return None


def is_random(node):
    """True if an operator is random."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def stage(graph_module, nodes, stages, at, inputs, outputs, recorder):
    """Builds the module of one stage."""
    graph = fx.Graph()
    held, placed = {}, {}
    numbers = recorder.numbers

    def value(node):
        if node.name in numbers:
            return numbers[node.name]
        if node not in placed:
            # A node that depends on no input is copied into every stage that reads it.
            copied(node)
        return placed[node]

    def copied(node):
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
                    held[top.target] = attribute(graph_module, top.target)
                placed[top] = graph.node_copy(top, value)

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
    wires = lambda names: [recorder.wires[node.name] for node in names]
    return Stage(module, wires(inputs), wires(outputs))


def attribute(module, path):
    """Resolves a dotted path."""
    return operator.attrgetter(path)(module) if "." in path else getattr(module, path)

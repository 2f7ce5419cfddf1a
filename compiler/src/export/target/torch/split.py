"""Cuts a model into the stages of stages.json, which lies beside this file.

A model is a program of torch.export: a file that torch.export.save wrote, or what `package.module:function` returns, a pair of a module
and its example inputs. Its nodes are found by their names; where the plan was made from another export of the module, by the modules
that they come from. A stage becomes a GraphModule that takes what earlier stages send and returns what later ones need: torch's
pipeline hands tensors to the next stage only, so that a tensor for a stage further on goes through all stages between.

Loading a file with torch.export.load trusts it as much as any program: load no file that you would not run.
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
    """A tensor that goes into a stage or out of it."""

    name: str
    shape: tuple
    dtype: torch.dtype
    requires_grad: bool

    def example(self):
        """An empty tensor like it, from which torch takes shapes and types."""
        return torch.empty(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)


@dataclass
class Stage:
    """A stage: its module, what comes in and what goes out."""

    module: fx.GraphModule
    inputs: list
    outputs: list


class Whole(torch.autograd.Function):
    """The same tensor in memory of its own, and so its gradient: torch's pipeline sends gradients as they lie, and gloo takes only
    those that lie in order."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.contiguous().clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()


def whole(tensor):
    """A tensor that comes into a stage or only goes through it."""
    return Whole.apply(tensor)


def in_order(tensor):
    """A tensor that leaves a stage, for nobody else to read: half a backward detaches it in place, which neither views allow nor
    tensors that another operator has saved."""
    return tensor.clone(memory_format=torch.contiguous_format)


def read_plan(path=HERE / "stages.json"):
    """The stages."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def imported(name):
    """What `package.module:name` is."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load(file=None, module=None):
    """The model as a graph, from a file or from a function that returns a module and its example inputs."""
    if file is not None:
        return torch.export.load(file).module()
    built, example = imported(module)()
    return torch.export.export(built, tuple(example)).module()


class Recorder(fx.Interpreter):
    """Runs a graph once and keeps what every node gives: numbers, or shapes of tensors."""

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
    """The stages of a model, for inputs of the sizes of `example`: those of one micro-batch."""
    graph = graph_module.graph
    recorder = Recorder(copy.deepcopy(graph_module))
    try:
        recorder.run(*example)
    except AssertionError as fault:
        raise SystemExit(
            f"the model does not take micro-batches of {plan['micro_batch']} of this data: {str(fault).splitlines()[0]}\n"
            "torch.export.export(model, inputs, dynamic_shapes=...) makes one that takes any batch"
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
    """Whether a node only checks sizes, which are fixed here."""
    target = str(node.target)
    return (node.op == "call_module" and target == "_guards_fn") or "_assert" in target or "sym_constrain" in target


def flat(value):
    """The leaves of nested lists."""
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flat(part)]
    return list(value.values()) if isinstance(value, dict) else [value]


def changes_its_input(node):
    """Whether an operator writes into its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    first = schema.arguments[0].alias_info if schema.arguments else None
    return first is not None and first.is_write


def follow_changes(graph):
    """Whoever reads a tensor after it was changed in place reads the result of that change: the tensor may be in another stage."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if changes_its_input(node) and node.args[0].op != "get_attr" and len(node.target._schema.returns) == 1:
            changed = node.args[0]
            later = [user for user in changed.users if place[user] > place[node]]
            for user in later:
                user.replace_input_with(changed, node)


def assign(nodes, plan):
    """The stage of every node that depends on an input. What the plan does not name stands with what it reads."""
    by_name, by_module = {}, {}
    for at, told in enumerate(plan["stages"]):
        for name in told["nodes"]:
            by_name.setdefault(name, at)
        for name in told["modules"]:
            by_module.setdefault(name, set()).add(at)
    names = {node.name for node in nodes}
    missing = [name for name in by_name if name not in names]
    if missing and not by_module:
        raise SystemExit(f"the model has no nodes {missing[:3]}: it is not the model of the plan")
    cut = sorted(name for name, held in by_module.items() if len(held) > 1)
    if missing and cut:
        raise SystemExit(
            f"the model has no nodes {missing[:3]}, and modules {cut[:3]} are in several stages: a plan from a file of "
            "torch.export.save goes by nodes, and one with --target torchtitan keeps modules whole"
        )
    if missing:
        found = {module_stage(node, by_module) for node in nodes}
        for at, told in enumerate(plan["stages"]):
            if told["modules"] and at not in found:
                raise SystemExit(f"the model has none of the modules {told['modules'][:3]} of stage {at}: it is not the model of the plan")
    stages, waiting = {}, []
    for node in nodes:
        if node.op == "get_attr":
            continue
        after = max((stages[read] for read in node.all_input_nodes if read in stages), default=None)
        own = module_stage(node, by_module) if missing else by_name.get(node.name)
        if node.op == "placeholder":
            stages[node] = 0
        elif changes_its_input(node) and node.args[0].op == "get_attr" and after is None:
            # A counter of batches: it belongs to the layer that comes next.
            waiting.append(node)
        elif own is not None or after is not None or is_random(node):
            # A node whose ops are in several stages stands with the first of them, as its weights do.
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
    """Whether an operator gives other numbers each time."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def stage(graph_module, nodes, stages, at, inputs, outputs, recorder):
    """One stage as a module of its own."""
    graph = fx.Graph()
    held, placed = {}, {}
    numbers = recorder.numbers

    def value(node):
        if node.name in numbers:
            return numbers[node.name]
        if node not in placed:
            # What depends on no input is made by every stage that reads it.
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
    """What a dotted path leads to."""
    return operator.attrgetter(path)(module) if "." in path else getattr(module, path)

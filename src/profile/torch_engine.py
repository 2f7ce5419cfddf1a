"""Measures the nodes of an exported program with PyTorch's kernels. pipec runs it; see src/profile/torch_engine.rs.

Reads a request as JSON from standard input and writes one JSON object per line to standard output:

    {"device": {"name", "driver", "memory_bytes", "threads"}, "torch": version}
    {"node": name, "fwd_us", "bwd_us", "weight_grad_us", "spread", "is_view"}      in the order of the graph
    {"loss": {"fwd_us", "bwd_us"}}       of the loss that the request adds
    {"update": {"us", "bytes"}}          one SGD step with momentum over all parameters
    {"whole": {"fwd_us", "bwd_us"}}      the graph in eager mode, with the loss
    {"compiled": {"fwd_us", "bwd_us"}}   the same under torch.compile, if requested
    {"peak_bytes": bytes}                peak memory of the eager graph, on GPUs
    {"error": text, "help": text}        the reason why nothing can be measured
"""

import json
import operator
import statistics
import sys
import time
import zipfile


def say(**line):
    print(json.dumps(line), flush=True)


def fail(error, help=""):
    say(error=error, help=help)
    sys.exit(0)


def main():
    request = json.load(sys.stdin)
    try:
        import torch
    except ImportError as error:
        fail(f"{sys.executable} cannot import torch: {error}", "install torch there, or name another Python with `--python`")
    device = torch.device(request["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        fail("torch finds no CUDA device", "`--device cpu` measures on this machine's processor")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail(f"torch finds {torch.cuda.device_count()} CUDA devices, not `{device}`")
    torch.manual_seed(request["seed"])
    if device.type == "cpu":
        # A worker of a pipeline has one core.
        torch.set_num_threads(1)
    describe(torch, device)
    try:
        with zipfile.ZipFile(request["model"]) as archive:
            stand_in(torch, structures(archive))
        program = torch.export.load(request["model"])
    except Exception as error:
        fail(f"torch {torch.__version__} cannot load the model: {first_line(error)}", "export it with this version of torch")
    Profiler(torch, device, program, request).run()


def describe(torch, device):
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
        say(device={"name": properties.name, "driver": driver, "memory_bytes": properties.total_memory}, torch=torch.__version__)
    else:
        say(device={"name": "", "driver": "", "memory_bytes": 0}, torch=torch.__version__)


def structures(archive):
    """The types in the structure of inputs and outputs, such as the outputs of the transformers library."""
    found, open_values = set(), []
    for name in archive.namelist():
        if name.endswith(".json"):
            open_values.append(json.loads(archive.read(name)))
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            open_values.extend(value.values())
            specs = [value.get(name) for name in ("in_spec", "out_spec")]
            open_values.extend(json.loads(spec) for spec in specs if isinstance(spec, str) and spec)
            if "children_spec" in value and isinstance(value.get("type"), str):
                found.add(value["type"])
        elif isinstance(value, list):
            open_values.extend(value)
    return sorted(found)


def stand_in(torch, names):
    """Registers a stand-in for each type that torch does not know, so that no package of the model is imported."""
    pytree = torch.utils._pytree
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    for name in names:
        if name not in known:
            made = type("StandIn", (tuple,), {})
            pytree.register_pytree_node(
                made,
                lambda value: (list(value), None),
                lambda values, context, made=made: made(values),
                serialized_type_name=name,
                to_dumpable_context=lambda context: context,
                from_dumpable_context=lambda context: context,
            )


def first_line(error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class Profiler:
    def __init__(self, torch, device, program, request):
        self.torch, self.device, self.request = torch, device, request
        self.warmup, self.runs = request["warmup"], request["runs"]
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
        self.dtype = dtypes.get(request["precision"], None)
        if request["precision"] == "tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
        program = with_values(torch, program)
        if self.dtype is not None:
            program = program_in(torch, program, self.dtype)
        self.program = program
        self.inputs = self.user_inputs()
        self.has_loss = False

    def run(self):
        torch = self.torch
        values = [value for _, value in self.flat_inputs()]
        # A CPU is measured in whole steps: a node alone finds its data in the cache, and its memory mapped.
        inside = Steps(self, values).measure() if self.device.type == "cpu" else {}
        Nodes(self, values, inside).measure()
        self.update()
        self.whole()

    # Inputs

    def user_inputs(self):
        """The example inputs of the export, with the batch of the request."""
        torch, program = self.torch, self.program
        if program.example_inputs is None:
            fail("the exported program has no example inputs", "export it with torch.export.export and save it again")
        leaves, tree = torch.utils._pytree.tree_flatten(program.example_inputs)
        shapes = {one["name"]: one["shape"] for one in self.request["inputs"]}
        names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT" and hasattr(spec.arg, "name")]
        tensors = iter(names)
        resized = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = self.resized(leaf, shapes.get(next(tensors, None)))
            resized.append(leaf)
        return torch.utils._pytree.tree_unflatten(resized, tree)

    def resized(self, value, shape):
        value = value.detach()
        if value.is_meta:
            value = self.torch.zeros(value.shape, dtype=value.dtype)
        if shape is not None and list(value.shape) != list(shape):
            for axis, size in enumerate(shape):
                if value.shape[axis] != size:
                    times = -(-size // max(value.shape[axis], 1))
                    value = self.torch.cat([value] * times, axis).narrow(axis, 0, size)
        value = value.contiguous().to(self.device)
        if self.dtype is not None and value.is_floating_point():
            value = value.to(self.dtype)
        return value

    def flat_inputs(self):
        """Name and value of every input of the graph: parameters, buffers, constants and user inputs."""
        torch, program = self.torch, self.program
        leaves = iter(torch.utils._pytree.tree_leaves(self.inputs))
        flat, self.learned = [], set()
        for spec in program.graph_signature.input_specs:
            kind = spec.kind.name
            name = getattr(spec.arg, "name", None)
            if kind == "USER_INPUT":
                value = next(leaves, None)
            elif spec.target in program.state_dict:
                value = program.state_dict[spec.target]
            else:
                value = program.constants.get(spec.target)
            if isinstance(value, torch.Tensor):
                value = value.detach().to(self.device)
            if kind == "PARAMETER":
                self.learned.add(name)
            flat.append((name, value))
        self.parameters = [value for name, value in flat if name in self.learned]
        return flat

    # Times

    def synchronize(self):
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def time(self, call):
        """Median microseconds of a call, and the spread of its runs as a fraction of it."""
        for _ in range(self.warmup):
            call()
        times = []
        if self.device.type == "cuda":
            events = [[self.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.runs)]
            for begin, end in events:
                begin.record()
                call()
                end.record()
            self.synchronize()
            times = [begin.elapsed_time(end) * 1e3 for begin, end in events]
        else:
            # There is one thread, so its CPU time is the time without other programs.
            for _ in range(self.runs):
                begin = time.thread_time()
                call()
                times.append((time.thread_time() - begin) * 1e6)
        return statistics.median(times), spread_of(times)

    def update(self):
        if not self.parameters:
            return
        sums = [value.detach().float().clone() for value in self.parameters]
        for value in sums:
            value.grad = self.torch.zeros_like(value)
        optimizer = self.torch.optim.SGD(sums, lr=1e-9, momentum=0.9)
        us, _ = self.time(optimizer.step)
        say(update={"us": us, "bytes": sum(value.numel() * value.element_size() for value in sums)})

    def loss(self, outputs):
        """The loss that pipec adds to the first output, or the sum of the float outputs."""
        torch = self.torch
        floats = [value for value in torch.utils._pytree.tree_leaves(outputs) if is_float(torch, value)]
        kind = self.request["loss"]
        if kind == "cross-entropy":
            axis = self.request["class_axis"]
            predictions = floats[0].movedim(axis, -1) if axis is not None else floats[0]
            rows = predictions.reshape(-1, predictions.shape[-1])
            return torch.nn.functional.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device))
        if kind == "mse":
            return torch.nn.functional.mse_loss(floats[0], torch.zeros_like(floats[0]))
        if kind == "bce":
            return torch.nn.functional.binary_cross_entropy_with_logits(floats[0], torch.zeros_like(floats[0]))
        scalars = [value for value in floats if value.dim() == 0]
        return scalars[0] if scalars else sum(value.sum() for value in floats if value.requires_grad)

    def of_loss(self, module):
        """The loss alone, on detached outputs."""
        if self.has_loss or self.request["loss"] not in ("cross-entropy", "mse", "bce"):
            return
        torch, (arguments, keywords) = self.torch, self.inputs
        try:
            with torch.no_grad():
                outputs = torch.utils._pytree.tree_leaves(module(*arguments, **keywords))
            outputs = [value.detach().requires_grad_(True) if is_float(torch, value) else value for value in outputs]
            fwd, _ = self.time(lambda: self.loss(outputs))
            loss, first = self.loss(outputs), next(value for value in outputs if is_float(torch, value))
            bwd, _ = self.time(lambda: torch.autograd.grad(loss, [first], retain_graph=True))
            say(loss={"fwd_us": fwd, "bwd_us": bwd})
        except Exception as error:
            say(note=f"the loss is not measured: {first_line(error)}")

    def whole(self):
        torch = self.torch
        module = self.program.module().to(self.device)
        arguments, keywords = self.inputs
        self.of_loss(module)

        def forward(of):
            return lambda: self.loss(of(*arguments, **keywords))

        def both(of):
            call = forward(of)
            def run():
                loss = call()
                if loss.requires_grad:
                    loss.backward()
                for value in module.parameters():
                    value.grad = None
            return run

        try:
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            fwd, _ = self.time(forward(module))
            all, _ = self.time(both(module))
            say(whole={"fwd_us": fwd, "bwd_us": max(all - fwd, 0.0)})
            if self.device.type == "cuda":
                say(peak_bytes=torch.cuda.max_memory_allocated(self.device))
        except Exception as error:
            say(note=f"the whole graph does not run: {first_line(error)}")
            return
        if self.request["compile"]:
            try:
                compiled = torch.compile(module)
                fwd, _ = self.time(forward(compiled))
                all, _ = self.time(both(compiled))
                say(compiled={"fwd_us": fwd, "bwd_us": max(all - fwd, 0.0)})
            except Exception as error:
                say(note=f"torch.compile fails: {first_line(error)}")


def spread_of(times):
    """The width of the middle half of the times, as a fraction of their median."""
    median, quarter = statistics.median(times), len(times) // 4
    middle = sorted(times)[quarter : max(3 * len(times) // 4, quarter + 1)]
    return (middle[-1] - middle[0]) / median if median > 0 else 0.0


def is_float(torch, value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def with_values(torch, program):
    """The program with small random numbers for the parameters and constants that its file leaves out."""
    made = {}
    for values in (program.state_dict, program.constants):
        for name, value in list(values.items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                if id(value) not in made:
                    new = torch.zeros(value.shape, dtype=value.dtype)
                    new = new.normal_(0.0, 0.02) if value.is_floating_point() else new
                    made[id(value)] = torch.nn.Parameter(new, value.requires_grad) if isinstance(value, torch.nn.Parameter) else new
                values[name] = made[id(value)]
    return program


def program_in(torch, program, dtype):
    """The program with its float parameters, buffers and constants in another type."""
    for values in (program.state_dict, program.constants):
        for name, value in list(values.items()):
            if is_float(torch, value):
                values[name] = value.detach().to(dtype)
    return program


class Steps:
    """Runs forward and backward of the whole graph several times, and divides their time among the nodes.

    A forward ends with the release of its last inputs. In the backward, the time between the starts of two autograd functions is
    that of the first, with the sum of gradients that it adds to. A function belongs to the node that created it.
    """

    def __init__(self, profiler, values):
        self.profiler, self.torch, self.values = profiler, profiler.torch, values
        graph = profiler.program.graph_module
        self.module, self.nodes = graph, list(graph.graph.nodes)
        self.dead, seen = {}, set()
        for node in reversed(self.nodes):
            self.dead[node] = [of for of in node.all_input_nodes if of not in seen]
            seen.update(node.all_input_nodes)
        kinds = [spec.kind.name for spec in profiler.program.graph_signature.output_specs]
        self.outputs = [at for at, kind in enumerate(kinds) if kind in ("USER_OUTPUT", "LOSS_OUTPUT")]

    def measure(self):
        """Median times of every node: {name: {"fwd_us", "bwd_us", "accumulate_us", "spread"}}; {} if the graph does not train."""
        profiler, runs = self.profiler, []
        try:
            for run in range(profiler.warmup + profiler.runs):
                times = self.step()
                if run >= profiler.warmup:
                    runs.append(times)
        except Exception as error:
            say(note=f"the whole graph does not train ({first_line(error)}): each node is measured alone")
            return {}
        found = {}
        for name in {name: None for times in runs for name in times}:
            columns = list(zip(*[times.get(name, (0.0, 0.0, 0.0)) for times in runs]))
            fwd, bwd, accumulate = [statistics.median(column) * 1e6 for column in columns]
            spread = spread_of([one + other for one, other in zip(*columns[:2])])
            found[name] = {"fwd_us": fwd, "bwd_us": bwd, "accumulate_us": accumulate, "spread": spread}
        loss = found.pop("", None)
        if loss and profiler.request["loss"] in ("cross-entropy", "mse", "bce"):
            profiler.has_loss = True
            say(loss={"fwd_us": loss["fwd_us"], "bwd_us": loss["bwd_us"]})
        return found

    def step(self):
        """Seconds of every node in one step: {name: [forward, backward, accumulation of weight gradients]}. The loss is ""."""
        torch, clock = self.torch, time.thread_time
        times, env, owners = {}, {}, {}
        # What happens in the backward: [owner, is an accumulation, start].
        events = []

        def own(result, name):
            """Functions that a node has created belong to it, and so do the gradients of parameters that it is first to read."""
            waiting = [value.grad_fn for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
            while waiting:
                function = waiting.pop()
                if function is None or function in owners:
                    continue
                owners[function] = name
                is_sum = type(function).__name__ == "AccumulateGrad"
                function.register_prehook(lambda gradients, name=name, is_sum=is_sum: events.append((name, is_sum, clock())))
                waiting.extend(of for of, _ in function.next_functions)

        values = iter(self.values)
        learned = []
        with torch.enable_grad():
            for node in self.nodes:
                if node.op == "placeholder":
                    value = next(values)
                    if node.name in self.profiler.learned:
                        value = value.detach().requires_grad_(True)
                        learned.append(value)
                    env[node] = value
                elif node.op == "get_attr":
                    env[node] = operator.attrgetter(node.target)(self.module)
                elif node.op == "call_function":
                    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
                    begin = clock()
                    env[node] = node.target(*args, **kwargs)
                    args = kwargs = None
                    for dead in self.dead[node]:
                        del env[dead]
                    times[node.name] = [clock() - begin, 0.0, 0.0]
                    own(env[node], node.name)
                elif node.op == "output":
                    results = torch.fx.node.map_arg(node.args[0], env.__getitem__)
            outputs = [results[at] for at in self.outputs]
            env, results = {}, None
            begin = clock()
            loss = self.profiler.loss(outputs)
            times[""] = [clock() - begin, 0.0, 0.0]
            own(loss, "")
            outputs = None
        if getattr(loss, "requires_grad", False):
            loss.backward()
            events.append(("", False, clock()))
            for (name, is_sum, begin), (_, _, end) in zip(events, events[1:]):
                times[name][1] += end - begin
                times[name][2] += end - begin if is_sum else 0.0
        for value in learned:
            value.grad = None
        return times


class Nodes:
    """Runs the graph node by node, each several times. `inside` has the times of nodes that are known from whole steps."""

    def __init__(self, profiler, values, inside):
        self.profiler, self.torch, self.values, self.inside = profiler, profiler.torch, values, inside

    def measure(self):
        import torch

        profiler, outer = self.profiler, self
        graph = profiler.program.graph_module
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        total, self.done = len(calls), 0

        class Interpreter(torch.fx.Interpreter):
            def run_node(self, node):
                if node.op != "call_function":
                    return super().run_node(node)
                args, kwargs = self.fetch_args_kwargs_from_env(node)
                needs = any(outer.needs.get(of.name, False) for of in node.all_input_nodes)
                result = outer.node(node, args, kwargs, needs)
                outer.done += 1
                if outer.done % 10 == 0 or outer.done == total:
                    say(progress=[outer.done, total], name=node.name)
                return result

        self.needs = {name: name in profiler.learned for name in (n.name for n in graph.graph.nodes)}
        try:
            with torch.no_grad():
                Interpreter(graph).run(*self.values)
        except Exception as error:
            if "size" in str(error) or "shape" in str(error):
                fail(
                    f"the graph does not run at this micro-batch size: {first_line(error)}",
                    "export the model with a dynamic batch dimension (`dynamic_shapes`), or use `--micro-batch` with the exported size",
                )
            fail(f"the graph does not run: {first_line(error)}")

    def node(self, node, args, kwargs, needs):
        torch = self.torch
        target = node.target
        if target is operator.getitem or not hasattr(target, "_schema"):
            self.needs[node.name] = needs
            return target(*args, **kwargs)
        returns = target._schema.returns
        is_view = any(of.alias_info is not None and not of.alias_info.is_write for of in returns)
        writes = any(of.alias_info is not None and of.alias_info.is_write for of in target._schema.arguments)
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
        tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(values, grad):
            copies = [value.clone() if writes and isinstance(value, torch.Tensor) else value for value in values]
            arguments, keywords = torch.utils._pytree.tree_unflatten(copies, tree)
            with torch.set_grad_enabled(grad):
                return target(*arguments, **keywords)

        result = target(*args, **kwargs)
        floats = [value for value in torch.utils._pytree.tree_leaves(result) if is_float(torch, value)]
        self.needs[node.name] = needs and bool(floats)
        record = {"fwd_us": 0.0, "bwd_us": 0.0, "weight_grad_us": 0.0, "spread": 0.0, "is_view": is_view}
        try:
            record.update(self.times(node, call, leaves, tensors, needs, writes))
        except Exception as error:
            say(note=f"`{node.name}` is not measured: {first_line(error)}")
        say(node=node.name, **record)
        return result

    def times(self, node, call, leaves, tensors, needs, writes):
        torch, profiler = self.torch, self.profiler
        names = [of.name for of in node.all_input_nodes]
        gradients, learned = [], []
        values = list(leaves)
        by_value = {}
        for of in node.all_input_nodes:
            by_value.setdefault(of.name, self.needs.get(of.name, False))
        of_leaf = iter(self.leaf_names(node))
        for at in range(len(leaves)):
            name = next(of_leaf, None)
            if at in tensors and is_float(torch, leaves[at]) and needs and self.needs.get(name, False):
                values[at] = leaves[at].detach().requires_grad_(True)
                (learned if name in profiler.learned else gradients).append(values[at])
        inside = self.inside.get(node.name)
        if inside is not None and not (inside["bwd_us"] > 0.0 and learned):
            return {name: inside[name] for name in ("fwd_us", "bwd_us", "spread")}
        copying = 0.0
        if writes:
            copies = [value for value in leaves if isinstance(value, torch.Tensor)]
            copying, _ = profiler.time(lambda: [value.clone() for value in copies])
        grad = bool(gradients or learned)
        if inside is None:
            fwd, spread = profiler.time(lambda: call(values, grad))
            found = {"fwd_us": max(fwd - copying, 0.0), "spread": spread}
        else:
            found = {"fwd_us": inside["fwd_us"], "spread": inside["spread"]}
        if not grad:
            return found
        outputs = [value for value in torch.utils._pytree.tree_leaves(call(values, True)) if is_float(torch, value) and value.requires_grad]
        if not outputs:
            return found
        seeds = [torch.ones_like(value) for value in outputs]

        def backward(wanted):
            return lambda: torch.autograd.grad(outputs, wanted, seeds, retain_graph=True, allow_unused=True)

        found["bwd_us"], _ = profiler.time(backward(gradients + learned))
        if learned:
            alone = profiler.time(backward(gradients))[0] if gradients else 0.0
            found["weight_grad_us"] = max(found["bwd_us"] - alone, 0.0)
        if inside is not None:
            # The parts of a backward follow from the node alone.
            share = found.get("weight_grad_us", 0.0) / max(found["bwd_us"], 1e-9)
            found["bwd_us"] = inside["bwd_us"]
            found["weight_grad_us"] = inside["accumulate_us"] + share * (inside["bwd_us"] - inside["accumulate_us"])
        return found

    def leaf_names(self, node):
        """The names of the nodes among the flattened arguments; None for constants."""
        flat, _ = self.torch.utils._pytree.tree_flatten((node.args, dict(node.kwargs)))
        return [leaf.name if isinstance(leaf, self.torch.fx.Node) else None for leaf in flat]


if __name__ == "__main__":
    main()

"""The stages of this process, built from a plan and a module, with a step that takes what the module takes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from .errors import DeviceError, InputError, fixed_batch, warn
from .exporting import Exported, as_exported, batch_sizes, export_module, load_program, resized
from .runtime import PipelineRuntime
from .split import SplitError, result_leaves, split

if TYPE_CHECKING:
    from .plan import Plan


IGNORED = -100


class Pipeline:
    """The stages of this process.

    modules: the stages as modules. Parameters have the names of the model and, for an nn.Module, are its own.
    stages: the same as torch.distributed.pipelining.PipelineStage.
    schedule: the torch schedule. After each of its steps, gradients are summed over replicas and tied weights. Its losses are
        divided by the number of micro-batches, so that their sum is the mean loss.
    replica: number of this process's replica of the pipeline, from 0.
    is_first, is_last: True if this process has the first stage (needs the inputs), or the last one (needs the targets).
    """

    def __init__(self, runtime: PipelineRuntime, exported: Exported, aliases: Mapping[str, str]) -> None:
        self.runtime = runtime
        self.modules = runtime.modules
        self.stages = runtime.stages
        self.schedule = runtime.schedule
        self.is_first = runtime.is_first
        self.is_last = runtime.is_last
        self.replica = runtime.replica
        self._spec = exported.program.call_spec.in_spec
        self._batched = batched_inputs(exported)
        self._aliases = dict(aliases)
        self._whole = exported.program.state_dict
        self._are_labels_seen = False

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Runs forward and backward of one minibatch and sets gradients. Call the optimizer afterwards.

        Inputs are those of the model. With the rows of the whole minibatch, each replica takes its part of them; with as many rows
        as one replica needs, they are its own. Only the process with the first stage needs the inputs, and only the one with the
        last stage needs `target`: a tensor, or tuples and dicts of tensors, with the batch on axis 0. Returns the mean loss, a
        float64 scalar, on every process.
        """
        run = self.runtime
        inputs = self._micro_batches(args, kwargs) if run.is_first else None
        targets = [self._part(target, at, "target") for at in range(run.microbatches)] if run.is_last else None
        if not self._are_labels_seen:
            self._are_labels_seen = True
            warn_of_uneven_labels([*zip(inputs or [()] * run.microbatches, targets or [None] * run.microbatches)])
        return run.run(inputs, targets)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The trainable parameters of this process, for an optimizer."""
        return iter(dict(self.named_parameters()).values())

    def named_parameters(self) -> Iterator[Tuple[str, torch.nn.Parameter]]:
        """The trainable parameters of this process, with the names of the model."""
        for name, value in self.runtime.parameters_by_name.items():
            yield name, value

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips the global norm of the gradients, over all stages. Returns the norm before. Every process must call it."""
        run = self.runtime
        total = torch.zeros((), dtype=torch.float32, device=run.device)
        for name, parameter in run.parameters_by_name.items():
            if parameter.grad is not None:
                # Every holder of a parameter has its whole gradient.
                total += parameter.grad.detach().float().pow(2).sum() / len(run.holders[name])
        dist.all_reduce(total, group=run.everyone)
        norm = total.sqrt()
        for parameter in run.parameters_by_name.values():
            if parameter.grad is not None:
                parameter.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(parameter.grad.dtype))
        return norm

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """Parameters and buffers of this process by the names of the model. A tied weight has all its names."""
        return self._named(self.runtime.state())

    def full_state_dict(self) -> Dict[str, torch.Tensor]:
        """The state dict of the whole model on the CPU of the first process, {} on others. Every process must call it."""
        found = self._named(self.runtime.gather(self.runtime.state()))
        # What the model does not use is in no stage.
        return {name: found[name] if name in found else value.detach().cpu() for name, value in self._whole.items()} if found else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copies the entries of the stages of this process from a state dict of the whole model."""
        for name, value in self.state_dict().items():
            if name not in state:
                raise InputError(f"the state dict has no `{name}`")
            value.copy_(state[name])

    def _named(self, held: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """A state dict: all names of tied weights, and only what the state dict of the model has."""
        named = dict(held)
        named.update({name: held[first] for name, first in self._aliases.items() if first in held})
        # Buffers that are not persistent and constants of the graph are not in a state dict.
        return {name: value for name, value in named.items() if name in self._whole}

    def _micro_batches(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[Tuple[Any, ...]]:
        """The inputs of the first stage for each micro-batch."""
        leaves = leaves_in_order(self._spec, args, kwargs)
        cut = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return [
            tuple(self._part(leaves[at], number, "the input") if at in self._batched else leaves[at].to(self.runtime.device) for at in cut)
            for number in range(self.runtime.microbatches)
        ]

    def _part(self, value: Any, number: int, what: str) -> Any:
        """The rows of one micro-batch."""
        size, count, replicas = self.runtime.micro_batch, self.runtime.microbatches, self.runtime.replicas
        rows = size * count

        def one(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.shape[0] if tensor.dim() > 0 else 0
            if found not in (rows, rows * replicas):
                each = f", or {rows} on each of {replicas} replicas" if replicas > 1 else ""
                raise InputError(
                    f"{what} has {found} rows, and the plan has {count * replicas} micro-batches of {size}: {rows * replicas} rows{each}"
                )
            first = number * size + (self.replica * rows if found != rows else 0)
            return tensor[first : first + size].to(self.runtime.device)

        return pytree.tree_map_only(torch.Tensor, one, value)


def warn_of_uneven_labels(micro_batches: Sequence[Any]) -> None:
    """Warns if micro-batches have different numbers of labels that a cross-entropy counts."""

    def counts(micro_batch: Any) -> List[int]:
        tensors = [leaf for leaf in pytree.tree_leaves(micro_batch) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64]
        return [int((tensor != IGNORED).sum()) for tensor in tensors]

    if len({tuple(counts(micro_batch)) for micro_batch in micro_batches}) > 1:
        warn(
            f"the micro-batches have different numbers of labels other than {IGNORED}: the loss is the mean of their means, not the "
            "mean over all labels"
        )


def leaves_in_order(expected: Any, args: Tuple[Any, ...], kwargs: Mapping[str, Any]) -> List[Any]:
    """The values of inputs in the order of the exported program."""
    order = list((expected.child(1) if hasattr(expected, "child") else expected.children_specs[1]).context or [])
    if set(order) != set(kwargs):
        raise InputError(f"step() has the keyword arguments {sorted(kwargs)}, and the model was exported with {sorted(order)}")
    leaves, spec = pytree.tree_flatten((tuple(args), {name: kwargs[name] for name in order}))
    if spec != expected:
        raise InputError(f"step() has other inputs than the exported model: {spec} instead of {expected}")
    return leaves


def build(
    plan: Plan,
    model: Any,
    group: Union[DeviceMesh, dist.ProcessGroup, None],
    example_args: Optional[Sequence[Any]],
    example_kwargs: Optional[Mapping[str, Any]],
    loss_fn: Optional[Callable[..., torch.Tensor]],
    device: Union[str, torch.device, None],
    autocast: Optional[torch.dtype],
) -> Pipeline:
    """`Plan.build`."""
    files = plan.export("torch")
    table = json.loads(files["stages.json"])
    warn_of_version(table["torch"])
    members = processes(plan, table, group)
    place = device_of(device)
    exported = program_of(model, example_args, example_kwargs, plan.schedule.micro_batch)
    if exported.fixed_batch not in (None, plan.schedule.micro_batch):
        raise fixed_batch(exported.fixed_batch, exported.input, plan.schedule.micro_batch)
    graph_module: Any = exported.program.module()
    args, kwargs = resized(exported.example, plan.schedule.micro_batch)
    example = leaves_in_order(exported.program.call_spec.in_spec, args, kwargs)
    context = running(place, autocast)
    check_buffers(graph_module, exported.program)
    try:
        stages = split(graph_module, table, example, place, context)
    except SplitError as fault:
        raise InputError(str(fault)) from None
    for stage in stages:
        if autocast is not None:
            stage.module.forward = within(context, stage.module.forward)
    leaves = result_leaves(graph_module.graph)
    out_spec = exported.program.call_spec.out_spec

    if loss_fn is None:
        # Fails here, on all ranks; during training only the last rank would fail, and the others wait for it.
        own_loss(pytree.tree_unflatten([leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in leaves], out_spec))

    def loss(output: Any, target: Any) -> torch.Tensor:
        tensors = iter(output if isinstance(output, tuple) else (output,))
        whole = pytree.tree_unflatten([next(tensors) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], out_spec)
        with context():
            return own_loss(whole) if loss_fn is None else loss_fn(whole, target)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(files["schedule.csv"], encoding="utf-8")
        runtime = PipelineRuntime(stages, table, str(path), loss, place, members)
    return Pipeline(runtime, exported, aliases(graph_module))


def own_loss(output: Any) -> torch.Tensor:
    """The loss in what a model returns."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    found = output if found is None else found
    if not isinstance(found, torch.Tensor) or found.dim() != 0:
        raise InputError(
            "the model does not return a scalar loss", "pass `loss_fn=lambda output, target: ...` to `Plan.build`, or labels to the model"
        )
    return found


def program_of(
    model: Any, args: Optional[Sequence[Any]], kwargs: Optional[Mapping[str, Any]], micro_batch: int
) -> Exported:
    """The exported program of a module, program or file."""
    if isinstance(model, ExportedProgram):
        return as_exported(model)
    if isinstance(model, (str, os.PathLike)):
        return as_exported(load_program(model))
    if isinstance(model, torch.nn.Module):
        if not args and not kwargs:
            raise InputError(
                "Plan.build needs example inputs to export the module", "pass example_args=(x,) or example_kwargs={...}, as to `pipec.partition`"
            )
        return export_module(model, args or (), kwargs, micro_batch)
    raise InputError(
        "Plan.build needs the model" if model is None else f"model is a {type(model).__name__}",
        "pass an nn.Module, an ExportedProgram, or the path of a .pt2 file",
    )


def batched_inputs(exported: Exported) -> List[int]:
    """Numbers of the inputs whose axis 0 is the batch."""
    sizes = batch_sizes(exported.program)
    names = exported.program.graph_signature.user_inputs
    return [at for at, name in enumerate(names) if name in sizes and sizes[str(name)] == exported.fixed_batch]


def check_buffers(module: fx.GraphModule, program: ExportedProgram) -> None:
    """Refuses buffers that have no value and that no state dict brings."""
    for name, value in module.named_buffers():
        if value.is_meta and name not in program.state_dict:
            raise InputError(
                f"buffer `{name}` is on the meta device, and it is not in the state dict",
                "create the buffers on the CPU: `accelerate.init_empty_weights()` puts only parameters on the meta device",
            )


def aliases(module: fx.GraphModule) -> Dict[str, str]:
    """Names of tied tensors, to the name of the tensor in the graph."""
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users}
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    by_value = {id(value): name for name, value in held if name in used}
    return {name: by_value[id(value)] for name, value in held if name not in used and id(value) in by_value}


def processes(plan: Plan, table: Mapping[str, Any], group: Union[DeviceMesh, dist.ProcessGroup, None]) -> List[int]:
    """The processes of the pipeline as ranks of the default group, replica by replica."""
    ranks, replicas = max(table["ranks"]) + 1, table["replicas"]
    needed = ranks * replicas
    if not dist.is_initialized():
        raise DeviceError(
            "torch.distributed is not initialized",
            f"run the script with `torchrun --nproc-per-node {needed}`, and call `torch.distributed.init_process_group()` first",
        )
    if isinstance(group, DeviceMesh):
        mesh = group.mesh
        if mesh.dim() > 2 or (mesh.dim() == 2 and tuple(mesh.shape) != (replicas, ranks)):
            raise DeviceError(f"the device mesh has shape {tuple(mesh.shape)}, and the plan needs ({replicas}, {ranks}): replicas, then ranks")
        members = [int(rank) for rank in mesh.flatten().tolist()]
    else:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(members) != needed:
        each = f"{replicas} replicas of {ranks}" if replicas > 1 else f"{ranks}"
        raise DeviceError(
            f"the plan needs {each} processes, and {len(members)} {'runs' if len(members) == 1 else 'run'}",
            f"`torchrun --nproc-per-node {needed}` starts them on one host; `pipec.partition(..., gpus={len(members)})` plans for {len(members)}",
        )
    return members


def device_of(device: Union[str, torch.device, None]) -> torch.device:
    """The device of this process. Raises DeviceError if it does not exist."""
    if device is None:
        # Without a backend, init_process_group uses gloo on CPUs and nccl on GPUs.
        backend = str(dist.get_backend_config(dist.group.WORLD))
        is_cuda = "nccl" in backend and torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise DeviceError(
                f"rank {dist.get_rank()} needs {device}, and this host has {count or 'no'} {'GPU' if count == 1 else 'GPUs'} that torch can use",
                "start one process per GPU, or use `device=\"cpu\"` with the gloo backend",
            )
        if device.index is not None:
            torch.cuda.set_device(device)
    return device


def running(device: torch.device, autocast: Optional[torch.dtype]) -> Callable[[], ContextManager[Any]]:
    """The context in which stages run."""
    return contextlib.nullcontext if autocast is None else lambda: torch.autocast(device.type, dtype=autocast)


def within(context: Callable[[], ContextManager[Any]], forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run in a context."""

    def run(*args: Any) -> Any:
        with context():
            return forward(*args)

    return run


def warn_of_version(tested: str) -> None:
    """Warns of a torch version whose schedule runtime was not tested."""
    if not torch.__version__.startswith(tested + "."):
        warn(
            f"Plan.build is tested with torch {tested}, and this is {torch.__version__}: it uses an internal interface of torch's pipeline runtime"
        )

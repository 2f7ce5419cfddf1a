"""Runs the stages of this process with torch's pipeline runtime, and all-reduces their gradients.

Processes are ordered replica by replica; each replica has one process per rank of the schedule. `_PipelineScheduleRuntime`
runs the schedule and is private to torch: `stages.json` has the torch version that was tested.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

Loss = Callable[[Any, Any], torch.Tensor]


class TableSchedule(_PipelineScheduleRuntime):
    """A torch schedule that runs a table, then all-reduces gradients."""

    def __init__(self, stages: List[PipelineStage], microbatches: int, loss: Loss, table: str, reduce: Callable[[], None]) -> None:
        # The loss is scaled, not the gradients: two stages of a process may share a parameter, which would be scaled twice.
        init: Any = super().__init__
        init(stages, microbatches, loss_fn=loss, scale_grads=False)
        self._load_csv(table, format="compute_only")
        self._reduce = reduce

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        super()._step_microbatches(*args, **kwargs)
        if self._has_backward:
            self._reduce()


class PipelineRuntime:
    """The stages of one process.

    stages: all stages, of `split`. plan: the content of stages.json. table: path of schedule.csv.
    loss: `loss(output, target)` is the mean loss of a micro-batch; `output` is a tensor, or a tuple if the model returns several.
    members: the processes, as ranks of the default group, replica by replica. Default: all.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        plan: Mapping[str, Any],
        table: str,
        loss: Loss,
        device: torch.device,
        members: Optional[Sequence[int]] = None,
    ) -> None:
        world = list(range(dist.get_world_size()))
        members = world if members is None else list(members)
        ranks, replicas = max(plan["ranks"]) + 1, plan["replicas"]
        self.replicas: int = replicas
        self.microbatches: int = plan["microbatches"]
        self.micro_batch: int = plan["micro_batch"]
        self.device = device
        self.rank = dist.get_rank()
        self.replica, place = divmod(members.index(self.rank), ranks)

        def group(of: Sequence[int]) -> Any:
            # Without other processes, only members take part.
            return dist.new_group(list(of), use_local_synchronization=members != world)

        # Every process creates every group of its own, in the same order.
        everyone = tuple(members)
        self.everyone = group(everyone)
        pipelines = [tuple(members[at * ranks : (at + 1) * ranks]) for at in range(replicas)]
        groups = {of: group(of) for of in pipelines if members == world or self.rank in of}
        own = [at for at in range(len(stages)) if plan["ranks"][at] == place]
        self.is_first, self.is_last = 0 in own, len(stages) - 1 in own
        self.modules: List[nn.Module] = [stages[at].module for at in own]
        holders: Dict[str, set[int]] = {}
        for at, stage in enumerate(stages):
            for name, _ in [*stage.module.named_parameters(), *stage.module.named_buffers()]:
                holders.setdefault(name, set()).update(pipeline[plan["ranks"][at]] for pipeline in pipelines)
        self.holders = {name: tuple(sorted(where)) for name, where in sorted(holders.items())}
        shared = sorted({where for where in self.holders.values() if len(where) > 1})
        self.groups = {where: group(where) for where in shared if members == world or self.rank in where}
        materialize(self.modules, device)
        self.parameters_by_name = {name: value for module in self.modules for name, value in module.named_parameters() if value.requires_grad}
        self.share()
        items = self.microbatches * replicas
        self.stages = [
            PipelineStage(
                stages[at].module,
                at,
                len(stages),
                device,
                input_args=tuple(wire.example() for wire in stages[at].inputs),
                output_args=tuple(wire.example() for wire in stages[at].outputs),
                group=groups[pipelines[self.replica]],
            )
            for at in own
        ]
        self.schedule = TableSchedule(
            self.stages, self.microbatches, lambda output, target: loss(output, target) / items, table, self.reduce
        )

    def share(self) -> None:
        """Copies parameters and buffers that several processes hold from the first of them."""
        own = {name: value for module in self.modules for name, value in state(module)}
        for name, where in self.holders.items():
            if len(where) > 1 and self.rank in where:
                dist.broadcast(own[name].data, where[0], group=self.groups[where])

    def run(self, inputs: Optional[List[Tuple[Any, ...]]], targets: Optional[List[Any]]) -> torch.Tensor:
        """Trains one minibatch of micro-batches up to the gradients. Returns the mean loss, on every process.

        The first stage needs `inputs`, the last stage `targets`. Gradients are cleared before.
        """
        given: Dict[str, Any] = {}
        if self.is_first:
            given["arg_mbs"] = inputs
        if self.is_last:
            given["target_mbs"] = targets
        losses: List[torch.Tensor] = []
        for parameter in self.parameters_by_name.values():
            parameter.grad = None
        self.schedule.step(losses=losses if self.is_last else None, return_outputs=False, **given)
        total = torch.zeros((), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total, group=self.everyone)
        return total

    def reduce(self) -> None:
        """All-reduces gradients over the replicas of a stage and over stages with tied weights."""
        waiting = []
        for name, where in self.holders.items():
            if len(where) > 1 and self.rank in where and name in self.parameters_by_name:
                parameter = self.parameters_by_name[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                waiting.append(dist.all_reduce(parameter.grad, group=self.groups[where], async_op=True))
        for work in waiting:
            work.wait()

    def state(self) -> Dict[str, torch.Tensor]:
        """Parameters and buffers of this process by name."""
        return {name: value.detach() for module in self.modules for name, value in state(module)}

    def gather(self, of: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Gathers tensors by name on the first process; the first process wins for tensors that several have."""
        first = dist.get_process_group_ranks(self.everyone)[0]
        parts: Optional[List[Any]] = [None] * dist.get_world_size(self.everyone) if self.rank == first else None
        dist.gather_object({name: value.detach().cpu() for name, value in of.items()}, parts, dst=first, group=self.everyone)
        whole: Dict[str, torch.Tensor] = {}
        for part in parts or []:
            for name, value in part.items():
                whole.setdefault(name, value)
        return whole


def state(module: nn.Module) -> Iterator[Tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def materialize(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Moves the modules to the device. Tensors on the meta device become uninitialised."""
    made: Dict[int, torch.Tensor] = {}
    for module in modules:
        for holder in module.modules():
            for name, value in [*holder._parameters.items(), *holder._buffers.items()]:
                if value is not None and value.is_meta:
                    if id(value) not in made:
                        empty = torch.empty_like(value, device=device)
                        made[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
                    setattr(holder, name, made[id(value)])
        module.to(device)

"""Trains a model with the stages of stages.json and the schedule of schedule.csv, from the folder of this file.

    torchrun --nproc-per-node N train.py --model model.pt2 --data train.npz --loss cross-entropy

N is the number of ranks times the replicas, both from stages.json. The arrays of the data file have the names of the model's
inputs; the labels are `target` or `y`. Rows are read in order for --epochs epochs. trained.pt is the resulting state dict. The
optimizer is plain SGD; change `Trainer` to use another one or to shuffle rows. _PipelineScheduleRuntime of
torch.distributed.pipelining runs the schedule. It is private to torch; stages.json has the supported version.
"""

import argparse
import os

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from split import HERE, imported, load, read_plan, split


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a file of torch.export.save")
    parser.add_argument("--module", help="package.module:function that returns a module and its example inputs")
    parser.add_argument("--data", required=True, help="arrays of inputs and labels")
    parser.add_argument("--loss", default="cross-entropy", help="cross-entropy, mse, or package.module:function [default: %(default)s]")
    parser.add_argument("--epochs", type=int, default=1, help="epochs [default: %(default)s]")
    parser.add_argument("--steps", type=int, help="minibatches, instead of --epochs")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--schedule", default=str(HERE / "schedule.csv"), help="schedule file [default: schedule.csv]")
    parser.add_argument("--save-gradients", help="npz file for the gradients of the last step, by parameter")
    parser.add_argument("--save", default="trained.pt", help="file for parameters and buffers: a state dict, or .npz [default: %(default)s]")
    args = parser.parse_args()
    if (args.model is None) == (args.module is None):
        parser.error("give one of --model and --module")
    return args


def cross_entropy(output, target):
    """Mean cross-entropy over the last axis."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


LOSSES = {"cross-entropy": cross_entropy, "mse": F.mse_loss}


def arrays(file, names):
    """The arrays of the model's inputs, and the labels. A single input array may have any name."""
    data = numpy.load(file)
    labels = [name for name in ("target", "y") if name in data and name not in names][:1]
    others = [name for name in data if name not in labels]
    named = others if len(names) == len(others) == 1 else names
    missing = [name for name in named if name not in data]
    if missing or not labels:
        raise SystemExit(f"{file} has the arrays {list(data)}; the model's inputs are {names}, and labels `target` or `y`")
    return [torch.from_numpy(data[name]) for name in named], torch.from_numpy(data[labels[0]])


class Trainer:
    """The stages of one process, and its process groups."""

    def __init__(self, args, plan):
        self.plan = plan
        self.rank = dist.get_rank()
        ranks = max(plan["ranks"]) + 1
        if dist.get_world_size() != ranks * plan["replicas"]:
            raise SystemExit(f"{ranks} ranks times {plan['replicas']} replicas need as many processes, not {dist.get_world_size()}")
        self.replica, self.place = divmod(self.rank, ranks)
        self.items = plan["microbatches"] * plan["replicas"]
        model = load(args.model, args.module)
        self.names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
        self.inputs, self.target = arrays(args.data, self.names)
        stages = split(model, plan, [self.rows(array, 0) for array in self.inputs])
        # Every process creates every group, in the same order.
        groups = [dist.new_group(list(range(at * ranks, (at + 1) * ranks))) for at in range(plan["replicas"])]
        held = {}
        for at, stage in enumerate(stages):
            for name, _ in stage.module.named_parameters():
                held.setdefault(name, set()).update(plan["ranks"][at] + ranks * replica for replica in range(plan["replicas"]))
        self.held = {name: tuple(sorted(where)) for name, where in sorted(held.items())}
        shared = sorted({where for where in self.held.values() if len(where) > 1})
        self.groups = {where: dist.new_group(list(where)) for where in shared}
        own = [at for at in range(len(stages)) if plan["ranks"][at] == self.place]
        self.modules = [stages[at].module for at in own]
        self.is_first, self.is_last = 0 in own, len(stages) - 1 in own
        loss = LOSSES.get(args.loss) or imported(args.loss)
        example = lambda wires: tuple(wire.example() for wire in wires)
        pipeline = [
            PipelineStage(
                stages[at].module,
                at,
                len(stages),
                torch.device("cpu"),
                input_args=example(stages[at].inputs),
                output_args=example(stages[at].outputs),
                group=groups[self.replica],
            )
            for at in own
        ]
        # Scale the loss, not the gradients: two stages of a process may share a parameter, which would be scaled twice.
        scaled = lambda output, target: loss(output[0] if isinstance(output, tuple) else output, target) / self.items
        self.schedule = _PipelineScheduleRuntime(pipeline, plan["microbatches"], loss_fn=scaled, scale_grads=False)
        self.schedule._load_csv(args.schedule, format="compute_only")
        self.parameters = {name: p for module in self.modules for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=args.lr) if self.parameters else None

    def minibatches(self):
        """Number of whole minibatches in the data, at least one."""
        return max(1, self.target.shape[0] // (self.items * self.plan["micro_batch"]))

    def rows(self, array, item):
        """The rows of one micro-batch; the data wraps around."""
        size = self.plan["micro_batch"]
        count = array.shape[0]
        at = [(item * size + row) % count for row in range(size)]
        return array[at]

    def step(self, number):
        """Trains one minibatch and returns its loss."""
        own = [number * self.items + at for at in range(self.items) if at % self.plan["replicas"] == self.replica]
        given = {}
        if self.is_first:
            given["arg_mbs"] = [tuple(self.rows(array, item) for array in self.inputs) for item in own]
        if self.is_last:
            given["target_mbs"] = [self.rows(self.target, item) for item in own]
        losses = []
        for parameter in self.parameters.values():
            parameter.grad = None
        self.schedule.step(losses=losses if self.is_last else None, return_outputs=False, **given)
        self.reduce()
        total = sum(loss.detach() for loss in losses) if self.is_last else torch.zeros(())
        total = torch.as_tensor(total, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    def reduce(self):
        """All-reduces gradients over the replicas of a stage and over stages with tied weights."""
        for name, where in self.held.items():
            if len(where) > 1 and self.rank in where and name in self.parameters:
                parameter = self.parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.groups[where])

    def gathered(self, of):
        """Gathers arrays by name on rank 0; the lowest rank wins for arrays that several processes have."""
        own = {name: value.numpy() for name, value in of.items()}
        all_of = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object(own, all_of)
        whole = {}
        for part in all_of or []:
            for name, value in part.items():
                whole.setdefault(name, value)
        return whole


def main():
    """Runs the training."""
    args = arguments()
    plan = read_plan()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if dist.get_rank() == 0 and not torch.__version__.startswith(plan["torch"] + "."):
        print(f"warning: this script supports torch {plan['torch']}, not {torch.__version__}: the schedule runtime is private and may differ")
    trainer = Trainer(args, plan)
    steps = args.steps if args.steps is not None else args.epochs * trainer.minibatches()
    for number in range(steps):
        loss = trainer.step(number)
        if dist.get_rank() == 0:
            print(f"step {number + 1}  loss {loss:.9g}", flush=True)
        if number + 1 == steps and args.save_gradients:
            found = trainer.gathered({name: p.grad for name, p in trainer.parameters.items() if p.grad is not None})
            if dist.get_rank() == 0:
                numpy.savez(args.save_gradients, **found)
        if trainer.optimizer:
            trainer.optimizer.step()
    found = trainer.gathered({name: value.detach() for module in trainer.modules for name, value in module.state_dict().items()})
    if dist.get_rank() == 0:
        if args.save.endswith(".npz"):
            numpy.savez(args.save, **found)
        else:
            torch.save({name: torch.from_numpy(numpy.asarray(value)) for name, value in found.items()}, args.save)
        print(f"wrote {args.save}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

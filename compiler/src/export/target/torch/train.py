"""Trains a model in the stages of stages.json and the order of work of schedule.csv, which lie beside this file.

    torchrun --nproc-per-node N train.py --model model.pt2 --data train.npz --loss cross-entropy

N is the number of ranks times the replicas, both of stages.json. The data file's arrays are named by the model's inputs, the labels
`target` or `y`; rows are taken in order, once or for so many --epochs, and trained.pt is the state dict that comes of it. The optimizer is plain
SGD: `Trainer` is the place for another one, and for rows that are shuffled. The order of work is run by torch.distributed.pipelining's _PipelineScheduleRuntime, which is
private to torch: stages.json says which version this was made for.
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
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a file that torch.export.save wrote")
    parser.add_argument("--module", help="package.module:function that returns a module and its example inputs")
    parser.add_argument("--data", required=True, help="arrays of inputs and labels")
    parser.add_argument("--loss", default="cross-entropy", help="cross-entropy, mse, or package.module:function [default: %(default)s]")
    parser.add_argument("--epochs", type=int, default=1, help="times through the data [default: %(default)s]")
    parser.add_argument("--steps", type=int, help="minibatches, in place of --epochs")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--schedule", default=str(HERE / "schedule.csv"), help="the order of work [default: schedule.csv]")
    parser.add_argument("--save-gradients", help="where to write the gradients of the last step, by parameter, as npz")
    parser.add_argument("--save", default="trained.pt", help="where to write parameters and buffers: a state dict, or .npz [default: %(default)s]")
    told = parser.parse_args()
    if (told.model is None) == (told.module is None):
        parser.error("one of --model and --module says what to train")
    return told


def cross_entropy(output, target):
    """Over the last axis, the mean of all places."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


LOSSES = {"cross-entropy": cross_entropy, "mse": F.mse_loss}


def arrays(file, names):
    """The arrays of the model's inputs, of which the only one may have any name, and the labels."""
    data = numpy.load(file)
    labels = [name for name in ("target", "y") if name in data and name not in names][:1]
    others = [name for name in data if name not in labels]
    named = others if len(names) == len(others) == 1 else names
    missing = [name for name in named if name not in data]
    if missing or not labels:
        raise SystemExit(f"{file} has the arrays {list(data)}; the model's inputs are {names}, and labels `target` or `y`")
    return [torch.from_numpy(data[name]) for name in named], torch.from_numpy(data[labels[0]])


class Trainer:
    """The stages of one process, and what it shares with others."""

    def __init__(self, told, plan):
        self.plan = plan
        self.rank = dist.get_rank()
        ranks = max(plan["ranks"]) + 1
        if dist.get_world_size() != ranks * plan["replicas"]:
            raise SystemExit(f"{ranks} ranks times {plan['replicas']} replicas are needed, there are {dist.get_world_size()} processes")
        self.replica, self.place = divmod(self.rank, ranks)
        self.items = plan["microbatches"] * plan["replicas"]
        model = load(told.model, told.module)
        self.names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
        self.inputs, self.target = arrays(told.data, self.names)
        stages = split(model, plan, [self.rows(array, 0) for array in self.inputs])
        # Every process makes every group, in one order.
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
        loss = LOSSES.get(told.loss) or imported(told.loss)
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
        # The loss is scaled, and not the gradients: two stages of a process may share a parameter, which would be scaled twice.
        scaled = lambda output, target: loss(output[0] if isinstance(output, tuple) else output, target) / self.items
        self.schedule = _PipelineScheduleRuntime(pipeline, plan["microbatches"], loss_fn=scaled, scale_grads=False)
        self.schedule._load_csv(told.schedule, format="compute_only")
        self.parameters = {name: p for module in self.modules for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=told.lr) if self.parameters else None

    def minibatches(self):
        """Whole minibatches of the data, or one."""
        return max(1, self.target.shape[0] // (self.items * self.plan["micro_batch"]))

    def rows(self, array, item):
        """The rows of one micro-batch; they start again where the data ends."""
        size = self.plan["micro_batch"]
        count = array.shape[0]
        at = [(item * size + row) % count for row in range(size)]
        return array[at]

    def step(self, number):
        """One minibatch; the loss, in the process that has it."""
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
        """Adds up the gradients of parameters that several processes hold: replicas of a stage, and stages that share a parameter."""
        for name, where in self.held.items():
            if len(where) > 1 and self.rank in where and name in self.parameters:
                parameter = self.parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.groups[where])

    def gathered(self, of):
        """Arrays by name from all processes, in the first one; of those that several hold, the first holder's."""
        own = {name: value.numpy() for name, value in of.items()}
        all_of = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object(own, all_of)
        whole = {}
        for part in all_of or []:
            for name, value in part.items():
                whole.setdefault(name, value)
        return whole


def main():
    """Trains."""
    told = arguments()
    plan = read_plan()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if dist.get_rank() == 0 and not torch.__version__.startswith(plan["torch"] + "."):
        print(f"warning: made for torch {plan['torch']}, this is {torch.__version__}: the schedule runtime is private and may differ")
    trainer = Trainer(told, plan)
    steps = told.steps if told.steps is not None else told.epochs * trainer.minibatches()
    for number in range(steps):
        loss = trainer.step(number)
        if dist.get_rank() == 0:
            print(f"step {number + 1}  loss {loss:.9g}", flush=True)
        if number + 1 == steps and told.save_gradients:
            found = trainer.gathered({name: p.grad for name, p in trainer.parameters.items() if p.grad is not None})
            if dist.get_rank() == 0:
                numpy.savez(told.save_gradients, **found)
        if trainer.optimizer:
            trainer.optimizer.step()
    found = trainer.gathered({name: value.detach() for module in trainer.modules for name, value in module.state_dict().items()})
    if dist.get_rank() == 0:
        if told.save.endswith(".npz"):
            numpy.savez(told.save, **found)
        else:
            torch.save({name: torch.from_numpy(numpy.asarray(value)) for name, value in found.items()}, told.save)
        print(f"wrote {told.save}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Trains a model with the stages of stages.json and the schedule of schedule.csv, from the folder of this file.

    torchrun --nproc-per-node N train.py --model model.pt2 --data train.npz --loss cross-entropy

N is the number of ranks times the replicas, both from stages.json. The model is a file of torch.export.save, or a module and its
example inputs that `package.module:function` returns. The arrays of the data file have the names of the model's inputs; the labels
are `target` or `y`; a model that returns its loss, with --loss model, needs none. Rows are read in order for --epochs epochs. trained.pt is the resulting state dict. The optimizer is plain SGD;
change `main` to use another one, and `Data` to shuffle rows.

torch.export.load can execute code from the file: only load files that you trust.
"""

import argparse
import contextlib
import importlib
import json
import os
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime import PipelineRuntime
from split import SplitError, split

HERE = Path(__file__).resolve().parent


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a file of torch.export.save")
    parser.add_argument("--module", help="package.module:function that returns a module and its example inputs")
    parser.add_argument("--data", required=True, help="arrays of inputs and labels")
    parser.add_argument("--loss", default="cross-entropy", help="cross-entropy, mse, model (the model's first output), or package.module:function [default: %(default)s]")
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


LOSSES = {"cross-entropy": cross_entropy, "mse": F.mse_loss, "model": lambda output, target: output}


def arrays(file, names, needs_labels):
    """The arrays of the model's inputs, and the labels. A single input array may have any name."""
    data = numpy.load(file)
    if not needs_labels and all(name in data for name in names):
        inputs = [torch.from_numpy(data[name]) for name in names]
        return inputs, inputs[0]
    labels = [name for name in ("target", "y") if name in data and name not in names][:1]
    others = [name for name in data if name not in labels]
    named = others if len(names) == len(others) == 1 else names
    missing = [name for name in named if name not in data]
    if missing or not labels:
        raise SystemExit(f"{file} has the arrays {list(data)}; the model's inputs are {names}, and labels `target` or `y`")
    return [torch.from_numpy(data[name]) for name in named], torch.from_numpy(data[labels[0]])


class Data:
    """The rows of the data file, in micro-batches."""

    def __init__(self, file, names, plan, needs_labels):
        self.inputs, self.target = arrays(file, names, needs_labels)
        self.size = plan["micro_batch"]
        self.replicas = plan["replicas"]
        self.items = plan["microbatches"] * self.replicas

    def minibatches(self):
        """Number of whole minibatches in the data, at least one."""
        return max(1, self.target.shape[0] // (self.items * self.size))

    def rows(self, array, item):
        """The rows of one micro-batch; the data wraps around."""
        count = array.shape[0]
        return array[[(item * self.size + row) % count for row in range(self.size)]]

    def micro_batches(self, number, replica):
        """Inputs and targets of one minibatch and replica."""
        own = [number * self.items + at for at in range(self.items) if at % self.replicas == replica]
        return [tuple(self.rows(array, item) for array in self.inputs) for item in own], [self.rows(self.target, item) for item in own]


def imported(name):
    """Imports `package.module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load(file=None, module=None):
    """The model as a graph, from a file or from a function that returns a module and its example inputs."""
    if file is not None:
        # A file of a transformers model names the library's output classes.
        with contextlib.suppress(ImportError):
            import transformers.modeling_outputs  # noqa: F401
        return torch.export.load(file).module()
    built, example = imported(module)()
    return torch.export.export(built, tuple(example)).module()


def first_output(loss):
    """The loss of the first output of the model."""
    return lambda output, target: loss(output[0] if isinstance(output, tuple) else output, target)


def main():
    """Runs the training."""
    args = arguments()
    with open(HERE / "stages.json", encoding="utf-8") as file:
        plan = json.load(file)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_zero = dist.get_rank() == 0
    if is_zero and not torch.__version__.startswith(plan["torch"] + "."):
        print(f"warning: this script supports torch {plan['torch']}, not {torch.__version__}: the schedule runtime is private and may differ")
    ranks = max(plan["ranks"]) + 1
    if dist.get_world_size() != ranks * plan["replicas"]:
        raise SystemExit(f"{ranks} ranks times {plan['replicas']} replicas need as many processes, not {dist.get_world_size()}")
    model = load(args.model, args.module)
    data = Data(args.data, [str(node.target) for node in model.graph.nodes if node.op == "placeholder"], plan, args.loss != "model")
    try:
        stages = split(model, plan, [data.rows(array, 0) for array in data.inputs])
    except SplitError as fault:
        raise SystemExit(str(fault)) from None
    loss = first_output(LOSSES.get(args.loss) or imported(args.loss))
    pipeline = PipelineRuntime(stages, plan, args.schedule, loss, torch.device("cpu"))
    parameters = pipeline.parameters_by_name
    optimizer = torch.optim.SGD(parameters.values(), lr=args.lr) if parameters else None
    steps = args.steps if args.steps is not None else args.epochs * data.minibatches()
    for number in range(steps):
        total = pipeline.run(*data.micro_batches(number, pipeline.replica))
        if is_zero:
            print(f"step {number + 1}  loss {total.item():.9g}", flush=True)
        if number + 1 == steps and args.save_gradients:
            found = pipeline.gather({name: p.grad for name, p in parameters.items() if p.grad is not None})
            if is_zero:
                numpy.savez(args.save_gradients, **{name: value.numpy() for name, value in found.items()})
        if optimizer:
            optimizer.step()
    found = pipeline.gather(pipeline.state())
    if is_zero:
        if args.save.endswith(".npz"):
            numpy.savez(args.save, **{name: value.numpy() for name, value in found.items()})
        else:
            torch.save(found, args.save)
        print(f"wrote {args.save}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

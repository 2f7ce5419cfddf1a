"""PyTorch's side of `cargo bench --bench training`: the same models written by hand, trained on request.

Reads a request from each line of standard input and answers with a line of JSON:

    count MODEL             {"parameters": ...}
    run MODEL MODE STEPS    {"seconds": ..., "cpu_seconds": ..., "loss": ...}, of STEPS steps together

| mode       | what runs |
| eager1     | whole minibatches, one thread |
| eager2     | whole minibatches, two threads |
| compiled1  | whole minibatches with torch.compile, one thread |
| micro      | the gradients of 8 microbatches added up, one thread |
| pipelining | torch.distributed.pipelining's 1F1B with 8 microbatches over two gloo processes of one thread |

Models, batches and the optimizer (SGD, momentum 0.9) are those of `subjects.rs`. Each model is a list of layers; a pipeline is cut
where the slower half takes the least time, by a measurement of each layer. A parameter that both halves hold has its
gradients added up over the processes in every step.
"""

import json
import os
import sys
import tempfile
import time

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    sys.exit(0)

MICROBATCHES = 8
MINIBATCHES = 8
WARMUP = 8
RATE = 0.01
PATIENCE = 300  # Seconds before a request to a pipeline times out.


class Tokens(nn.Module):
    """Token and position embeddings of GPT."""

    def __init__(self, vocabulary, context, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.register_buffer("positions", torch.arange(context), persistent=False)

    def forward(self, tokens):
        return self.wte(tokens) + self.wpe(self.positions)


class Block(nn.Module):
    """A block of GPT: normalisation before attention and before the GELU layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, context, width = x.shape
        split = (batch, context, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, context, width))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class Head(nn.Module):
    """Logits by the table of an embedding."""

    def __init__(self, table, bias):
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(table.shape[0])) if bias else None

    def forward(self, x):
        return F.linear(x, self.table, self.bias)


class Recurrent(nn.Module):
    """One layer of an LSTM, its states alone."""

    def __init__(self, width):
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


class Residual(nn.Module):
    """Two convolutions of 3x3 beside a shortcut."""

    def __init__(self, width, to, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width, to, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(to, to, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(to), nn.BatchNorm2d(to)
        self.shortcut = None
        if stride != 1 or width != to:
            self.shortcut = nn.Sequential(nn.Conv2d(width, to, 1, stride, bias=False), nn.BatchNorm2d(to))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y = y + (x if self.shortcut is None else self.shortcut(x))
        return F.relu(y, inplace=True)


class Mean(nn.Module):
    """The mean of each channel."""

    def forward(self, x):
        return x.mean((2, 3))


def gpt():
    tokens = Tokens(8192, 128, 256)
    blocks = [Block(256, 4) for _ in range(4)]
    return [tokens, *blocks, nn.LayerNorm(256), Head(tokens.wte.weight, False)]


def resnet18():
    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    width = 64
    for group, to in enumerate([64, 128, 256, 512]):
        for index in range(2):
            layers.append(Residual(width, to, 2 if group > 0 and index == 0 else 1))
            width = to
    return [*layers, Mean(), nn.Linear(512, 10)]


def vgg11bn():
    layers, width = [], 3
    for group, count in enumerate([1, 1, 2, 2, 2]):
        to = 64 << min(group, 3)
        for _ in range(count):
            layers += [nn.Conv2d(width, to, 3, 1, 1), nn.BatchNorm2d(to), nn.ReLU(inplace=True)]
            width = to
        layers.append(nn.MaxPool2d(2))
    classifier = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return [*layers, nn.Flatten(), *classifier]


def lstm():
    table = nn.Embedding(4096, 512)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    return [table, Recurrent(512), Recurrent(512), Head(table.weight, True)]


def mlp():
    widths = [1024] * 9
    layers = [part for a, b in zip(widths, widths[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
    return [*layers, nn.Linear(1024, 10)]


def images(batch):
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def sequences(batch, context, vocabulary):
    return torch.randint(vocabulary, (batch, context)), torch.randint(vocabulary, (batch, context))


# The layers, the samples of a minibatch, and what makes one.
MODELS = {
    "gpt": (gpt, 8, lambda batch: sequences(batch, 128, 8192)),
    "resnet18": (resnet18, 16, images),
    "vgg11bn": (vgg11bn, 16, images),
    "lstm": (lstm, 16, lambda batch: sequences(batch, 32, 4096)),
    "mlp-512": (mlp, 512, lambda batch: (torch.randn(batch, 1024), torch.randint(10, (batch,)))),
    "mlp-64": (mlp, 64, lambda batch: (torch.randn(batch, 1024), torch.randint(10, (batch,)))),
}


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def data_of(name):
    _, batch, sample = MODELS[name]
    torch.manual_seed(1)
    return [sample(batch) for _ in range(MINIBATCHES)]


def layers_of(name):
    torch.manual_seed(0)
    return MODELS[name][0]()


def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)


class Whole:
    """A model in one process."""

    def __init__(self, name, compiled):
        self.module = nn.Sequential(*layers_of(name))
        self.optimizer = optimizer_of(self.module)
        self.data = data_of(name)
        self.steps = 0
        self.forward = torch.compile(self.module) if compiled else self.module

    def step(self, microbatches):
        x, target = self.data[self.steps % MINIBATCHES]
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part, wanted in zip(x.chunk(microbatches), target.chunk(microbatches)):
            loss = loss_of(self.forward(part), wanted) / microbatches
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total


class Contiguous(torch.autograd.Function):
    """The identity, with a contiguous gradient: others deadlock."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()


class Stage(nn.Module):
    """Half of a model."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = Contiguous.apply(x) if x.is_floating_point() else x
        for layer in self.layers:
            x = layer(x)
        return x.contiguous()


def cut_of(name, layers):
    """The number of layers in the first half for which the slower half is fastest."""
    x, target = data_of(name)[0]
    x, target = x.chunk(MICROBATCHES)[0], target.chunk(MICROBATCHES)[0]
    times = [float("inf")] * len(layers)
    for _ in range(4):
        y = x
        for at, layer in enumerate(layers):
            y = y.detach()
            # A layer that works in place needs a value that is no leaf.
            given = y.requires_grad_().clone() if y.is_floating_point() else y
            began = time.perf_counter()
            y = layer(given)
            last = loss_of(y, target) if at + 1 == len(layers) else y
            last.backward(torch.ones_like(last))
            times[at] = min(times[at], time.perf_counter() - began)
    for parameter in nn.Sequential(*layers).parameters():
        parameter.grad = None
    return min(range(1, len(layers)), key=lambda cut: max(sum(times[:cut]), sum(times[cut:])))


class Half:
    """One process's half of a pipeline over two."""

    def __init__(self, name, rank):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        layers = layers_of(name)
        # Both must cut alike: the first decides.
        cut = torch.tensor([cut_of(name, layers) if rank == 0 else 0])
        dist.broadcast(cut, 0)
        cut = int(cut)
        halves = [nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:])]
        beside = {id(parameter) for parameter in halves[1 - rank].parameters()}
        self.tied = [parameter for parameter in halves[rank].parameters() if id(parameter) in beside]
        self.module = Stage(layers[:cut] if rank == 0 else layers[cut:])
        self.rank, self.optimizer, self.data, self.steps = rank, optimizer_of(self.module), data_of(name), 0
        stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(self):
        x, target = self.data[self.steps % MINIBATCHES]
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=target, losses=losses)
        for parameter in self.tied:
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return sum(loss.item() for loss in losses) / MICROBATCHES


def half(rank, store, requests):
    """A process of the pipeline: answers requests until there are no more."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    known = {}
    while (request := requests.recv()) is not None:
        name, steps = request
        if name not in known:
            known[name] = Half(name, rank)
        run = known[name]
        requests.send(timed(run.step, steps, WARMUP, dist.barrier))
    dist.destroy_process_group()


def timed(step, steps, warmup, meet=lambda: None):
    """Wall-clock and CPU seconds of `steps` steps, and the last loss."""
    for _ in range(warmup):
        step()
    meet()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loss = step()
    meet()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - processor, "loss": loss}


class Pipelines:
    """The two processes, started when they are first needed."""

    def __init__(self):
        self.halves = None

    def start(self):
        context, folder = mp.get_context("spawn"), tempfile.mkdtemp()
        self.halves = []
        for rank in range(2):
            own, other = context.Pipe()
            process = context.Process(target=half, args=(rank, os.path.join(folder, "store"), other), daemon=True)
            process.start()
            self.halves.append((process, own))

    def run(self, name, steps):
        if self.halves is None:
            self.start()
        for _, requests in self.halves:
            requests.send((name, steps))
        answers = []
        for _, requests in self.halves:
            if not requests.poll(PATIENCE):
                self.stop()
                raise RuntimeError(f"the pipeline did not answer within {PATIENCE} s")
            answers.append(requests.recv())
        first, last = answers
        cpu_seconds = first["cpu_seconds"] + last["cpu_seconds"]
        return {"seconds": max(first["seconds"], last["seconds"]), "cpu_seconds": cpu_seconds, "loss": last["loss"]}

    def stop(self):
        for process, _ in self.halves or []:
            process.kill()
        self.halves = None


def answer(request, wholes, pipelines):
    what, name, *rest = request.split()
    if what == "count":
        return {"parameters": sum(parameter.numel() for parameter in nn.Sequential(*layers_of(name)).parameters())}
    mode, steps = rest[0], int(rest[1])
    if mode == "pipelining":
        return pipelines.run(name, steps)
    torch.set_num_threads(2 if mode == "eager2" else 1)
    compiled = mode == "compiled1"
    if all(of != name for of, _ in wholes):
        # Models are requested one after another, so only those of one name are kept.
        wholes.clear()
    if (name, compiled) not in wholes:
        wholes[name, compiled] = Whole(name, compiled)
    whole, microbatches = wholes[name, compiled], MICROBATCHES if mode == "micro" else 1
    return timed(lambda: whole.step(microbatches), steps, WARMUP)


def main():
    print(json.dumps({"torch": torch.__version__}), flush=True)
    wholes, pipelines = {}, Pipelines()
    for line in sys.stdin:
        try:
            result = answer(line, wholes, pipelines)
        except Exception as error:  # The rest of the table can still be measured.
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)
    pipelines.stop()


if __name__ == "__main__":
    main()

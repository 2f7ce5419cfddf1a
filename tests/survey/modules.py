"""Trains random PyTorch modules with pipec and compares the losses and weights with eager PyTorch.

    python tests/survey/modules.py target/release/pipec --count 1000 --folder /tmp/modules

A module is a random chain of blocks: layers, in-place writes, `out=` arguments, views, buffers, masks, tied and scalar
parameters, own losses with ignored labels. Each is exported as `.pt2` (with `Dim.AUTO`, a named `Dim` and static sizes) and
as ONNX (by both exporters), and trained for three steps over one and two stages and 1, 2 and 4 micro-batches. A module that
pipec refuses is not a failure: the table counts the reasons. The exit code is 1 if a result differs.
"""

import argparse
import collections
import copy
import contextlib
import json
import logging
import os
import pathlib
import random
import subprocess
import sys
import warnings

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)

BATCH, STEPS, TIME, WIDTH, CLASSES, WORDS, RATE = 8, 3, 6, 8, 5, 11, 0.05
TOLERANCE = 1e-4


class Function(nn.Module):
    """A block without parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, mask):
        return self.function(x, mask)


class Wrapped(nn.Module):
    """A layer that reads only the activations."""

    def __init__(self, layer, channels_second=False):
        super().__init__()
        self.layer, self.channels_second = layer, channels_second

    def forward(self, x, mask):
        if self.channels_second:
            return self.layer(x.transpose(1, 2)).transpose(1, 2)
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


class Gate(nn.Module):
    """Parameters with one number: rank 0, [1] and [1, 1]."""

    def __init__(self, shape):
        super().__init__()
        self.gate = nn.Parameter(torch.full(shape, 0.4))

    def forward(self, x, mask):
        return x + self.gate * torch.sin(x)


class MovingAverage(nn.Module):
    """A buffer that every forward pass writes, in one of the usual spellings."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x, mask):
        mean = x.detach().mean((0, 1))
        if self.spelling == "copy_":
            self.average.copy_(0.9 * self.average + 0.1 * mean)
        elif self.spelling == "mul_add_":
            self.average.mul_(0.9).add_(mean, alpha=0.1)
        elif self.spelling == "lerp_":
            self.average.lerp_(mean, 0.1)
        else:
            torch.add(0.9 * self.average, 0.1 * mean, out=self.average)
        return x


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x, mask):
        self.count += 1
        return x


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.kind == "sdpa":
            return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, :]))
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        if self.kind == "fill":
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        else:
            scores = scores + (1.0 - mask[:, None, :].to(x.dtype)) * -1e9
        return x + self.out(scores.softmax(-1) @ v)


class Tied(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.first, self.transposed = nn.Linear(WIDTH, WIDTH), transposed

    def forward(self, x, mask):
        weight = self.first.weight.t() if self.transposed else self.first.weight
        return F.linear(torch.tanh(self.first(x)), weight)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return self.left(x) * torch.sigmoid(self.right(x))


def written_in_place(x, mask):
    y = x * 1.5
    y[:, 1] = y[:, 0] * 0.5
    y[:, 2:4].mul_(0.5)
    y.add_(0.1)
    return y


def written_through_view(x, mask):
    y = x.clone()
    y.view(-1)[::2] = 0.25
    y.transpose(1, 2)[:, 0] += 1.0
    return y


def written_with_out(x, mask):
    y = torch.empty_like(x)
    torch.tanh(x.detach(), out=y)
    return x + y


def indexed(x, mask):
    rows = torch.arange(x.shape[0])
    last = x[rows, mask.sum(1) - 1]
    return x + last[:, None, :]


def levels(x):
    """Values on few levels, so many are equal, with the gradient of `x`."""
    return x + (x.round() - x).detach()


def without_padding(x, mask):
    weights = mask.to(x.dtype)
    return x - ((x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1))[:, None, :]


FUNCTIONS = {
    "gelu": lambda x, m: F.gelu(x),
    "gelu-tanh": lambda x, m: F.gelu(x, approximate="tanh"),
    "silu": lambda x, m: F.silu(x),
    "leaky": lambda x, m: F.leaky_relu(x, 0.1),
    "elu": lambda x, m: F.elu(x),
    "softplus": lambda x, m: F.softplus(x, beta=2.0, threshold=1.0),
    "hardtanh": lambda x, m: F.hardtanh(x),
    "hardswish": lambda x, m: F.hardswish(x),
    "logsigmoid": lambda x, m: F.logsigmoid(x),
    "clamp": lambda x, m: x.clamp(-0.5, 0.5) + x,
    "clamp-max": lambda x, m: x.clamp(max=0.5) + x,
    "maximum": lambda x, m: torch.maximum(x, x.flip(-1)),
    "maximum-zero": lambda x, m: torch.maximum(F.relu(x), torch.zeros_like(x)),
    "minimum": lambda x, m: torch.minimum(x, torch.tensor(0.3)),
    "where": lambda x, m: torch.where(m[..., None], x, -x),
    "masked-fill": lambda x, m: x.masked_fill(~m[..., None], 0.0),
    "relu_": lambda x, m: F.relu_(x * 1.0),
    "in-place": written_in_place,
    "view": written_through_view,
    "out": written_with_out,
    "index": indexed,
    "mean": without_padding,
    "cumsum": lambda x, m: x.cumsum(1) / TIME,
    "softmax": lambda x, m: x.softmax(-1) * 3,
    "log-softmax": lambda x, m: x.log_softmax(-1),
    "norm": lambda x, m: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6),
    "normalize": lambda x, m: F.normalize(x, dim=-1),
    "var": lambda x, m: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    "std": lambda x, m: x / (x.std(-1, keepdim=True) + 0.1),
    "logsumexp": lambda x, m: x - x.logsumexp(-1, keepdim=True),
    "amax": lambda x, m: x - x.amax(-1, keepdim=True),
    "max": lambda x, m: x - x.max(-1, keepdim=True).values,
    "ties-max": lambda x, m: x - levels(x).max(-1, keepdim=True).values,
    "ties-min": lambda x, m: x - levels(x).min(1).values[:, None],
    "ties-amax": lambda x, m: x - levels(x).amax(-1, keepdim=True),
    "ties-pool": lambda x, m: x - F.adaptive_max_pool1d(levels(x), 1) - F.adaptive_max_pool1d(levels(x), 3).mean(-1, keepdim=True),
    "sort": lambda x, m: x.sort(-1).values,
    # PyTorch does not say which of equal elements it takes.
    "topk": lambda x, m: torch.cat([(x + 0.1 * torch.arange(x.shape[-1])).topk(4, -1).values, x[..., 4:]], -1),
    "roll": lambda x, m: x.roll(1, 1),
    "flip": lambda x, m: x.flip(1),
    "pad": lambda x, m: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "einsum": lambda x, m: torch.einsum("bti,bsi->bts", x, x).softmax(-1) @ x,
    "cat": lambda x, m: torch.cat([x[..., :3], x[..., 3:]], -1),
    "split": lambda x, m: torch.cat(x.split([2, 6], -1)[::-1], -1),
    "stack": lambda x, m: torch.stack([x, -x]).sum(0) + x,
    "unbind": lambda x, m: torch.stack(x.unbind(1)[::-1], 1),
    "repeat": lambda x, m: x.repeat(1, 2, 1)[:, :TIME],
    "interleave": lambda x, m: x.repeat_interleave(2, 1)[:, ::2],
    "expand": lambda x, m: x + x[:, :1].expand(-1, TIME, -1),
    "triu": lambda x, m: (x @ x.transpose(1, 2)).triu() @ x / 8,
    "gather": lambda x, m: x.gather(2, x.argsort(-1)),
    "scatter": lambda x, m: torch.zeros_like(x).scatter(2, x.argsort(-1), x),
    "scatter-add": lambda x, m: torch.zeros_like(x).scatter_add(2, (x > 0).long(), x) + x,
    "index-add": lambda x, m: x.index_add(2, torch.tensor([0, 2]), x[..., :2]),
    "detach": lambda x, m: x * x.detach().sigmoid(),
    "round": lambda x, m: x + (x.round() - x).detach(),
    "addcmul": lambda x, m: torch.addcmul(x, x, x, value=0.5),
    "lerp": lambda x, m: torch.lerp(x, x.flip(-1), 0.3),
    "atan2": lambda x, m: torch.atan2(x, x.abs() + 1),
    "pow": lambda x, m: x.abs().add(0.1).pow(1.5),
    "rsqrt": lambda x, m: x * (x * x + 1).rsqrt(),
    "prod": lambda x, m: x + x[..., :2].prod(-1, keepdim=True),
    "pool": lambda x, m: F.avg_pool1d(x, 3, 1, 1),
    "max-pool": lambda x, m: F.max_pool1d(x, 3, 1, 1),
    "adaptive": lambda x, m: x + F.adaptive_avg_pool1d(x, 1),
    "interpolate": lambda x, m: F.interpolate(x, scale_factor=2.0, mode="nearest")[..., ::2],
    "interpolate-linear": lambda x, m: F.interpolate(x, size=WIDTH, mode="linear"),
    "interpolate-corners": lambda x, m: F.interpolate(x, scale_factor=1.3, mode="linear", align_corners=True)[..., :WIDTH],
    "pool-divisor": lambda x, m: F.avg_pool2d(x[:, None], 3, 1, 1, divisor_override=5)[:, 0],
    "unfold": lambda x, m: x.unfold(2, 2, 2).flatten(2),
    "glu": lambda x, m: F.glu(torch.cat([x, x], -1), -1),
    "cosine": lambda x, m: x * F.cosine_similarity(x, x.flip(-1), dim=-1)[..., None],
    "cdist": lambda x, m: x + torch.cdist(x, x.flip(1) + 1)[..., :1],
    "outer": lambda x, m: (x[..., :, None] * x[..., None, :]).mean(-1),
    "tril-mask": lambda x, m: (x @ x.transpose(1, 2)).masked_fill(torch.ones(TIME, TIME).triu(1).bool(), -1e9).softmax(-1) @ x,
}


def layers():
    norm = nn.utils.parametrizations.weight_norm
    old_norm = nn.utils.weight_norm
    linear = lambda: nn.Linear(WIDTH, WIDTH)
    return {
        "linear": lambda: Wrapped(linear()),
        "linear-without-bias": lambda: Wrapped(nn.Linear(WIDTH, WIDTH, bias=False)),
        "layer-norm": lambda: Wrapped(nn.LayerNorm(WIDTH)),
        "layer-norm-two": lambda: Wrapped(nn.LayerNorm((TIME, WIDTH))),
        "rms-norm": lambda: Wrapped(nn.RMSNorm(WIDTH)),
        "group-norm": lambda: Wrapped(nn.GroupNorm(2, WIDTH), True),
        "instance-norm": lambda: Wrapped(nn.InstanceNorm1d(WIDTH, affine=True), True),
        "batch-norm": lambda: Wrapped(nn.BatchNorm1d(WIDTH), True),
        "batch-norm-average": lambda: Wrapped(nn.BatchNorm1d(WIDTH, momentum=0.3, eps=1e-3), True),
        "batch-norm-plain": lambda: Wrapped(nn.BatchNorm1d(WIDTH, affine=False), True),
        "conv": lambda: Wrapped(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), True),
        "conv-grouped": lambda: Wrapped(nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=2), True),
        "conv-same": lambda: Wrapped(nn.Conv1d(WIDTH, WIDTH, 4, padding="same"), True),
        "conv-circular": lambda: Wrapped(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular"), True),
        "lstm": lambda: Wrapped(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
        "gru": lambda: Wrapped(nn.GRU(WIDTH, WIDTH, batch_first=True)),
        "prelu": lambda: Wrapped(nn.PReLU()),
        "prelu-channels": lambda: Wrapped(nn.PReLU(WIDTH), True),
        "weight-norm": lambda: Wrapped(norm(linear())),
        "weight-norm-all": lambda: Wrapped(norm(linear(), dim=None)),
        "weight-norm-old": lambda: Wrapped(old_norm(linear(), dim=1)),
        "spectral-norm": lambda: Wrapped(nn.utils.parametrizations.spectral_norm(linear())),
        "spectral-norm-old": lambda: Wrapped(nn.utils.spectral_norm(linear())),
        "gate": lambda: Gate(()),
        "gate-1": lambda: Gate((1,)),
        "gate-1-1": lambda: Gate((1, 1)),
        "attention-sdpa": lambda: Attention("sdpa"),
        "attention-fill": lambda: Attention("fill"),
        "attention-add": lambda: Attention("add"),
        "tied": lambda: Tied(False),
        "tied-transposed": lambda: Tied(True),
        "two-heads": TwoHeads,
        "bilinear": lambda: Function2(nn.Bilinear(WIDTH, WIDTH, WIDTH)),
        "average-copy": lambda: MovingAverage("copy_"),
        "average-mul": lambda: MovingAverage("mul_add_"),
        "average-lerp": lambda: MovingAverage("lerp_"),
        "average-out": lambda: MovingAverage("out"),
        "counter": Counter,
    }


class Function2(nn.Module):
    """A layer of two operands."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        return self.layer(x, x.flip(-1).contiguous())


LOSSES = ["logits", "tokens", "cross-entropy", "shifted", "masked", "smoothed", "weighted", "mse"]


class Model(nn.Module):
    def __init__(self, blocks, inputs, loss):
        super().__init__()
        self.embed = {
            "floats": lambda: nn.Linear(WIDTH, WIDTH),
            "words": lambda: nn.Embedding(WORDS, WIDTH),
            "padded words": lambda: nn.Embedding(WORDS, WIDTH, padding_idx=2),
        }[inputs]()
        self.blocks, self.head, self.loss = nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES), loss
        self.register_buffer("class_weights", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, x, mask, labels=None):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        if self.loss == "logits":
            return self.head(x.mean(1))
        y = self.head(x)
        if self.loss == "tokens":
            return y
        flat, targets = y.reshape(-1, CLASSES), labels.reshape(-1)
        if self.loss == "cross-entropy":
            return F.cross_entropy(flat, targets), y
        if self.loss == "shifted":
            return F.cross_entropy(y[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1)), y
        if self.loss == "smoothed":
            return F.cross_entropy(flat, targets, label_smoothing=0.1), y
        if self.loss == "weighted":
            return F.cross_entropy(flat, targets, weight=self.class_weights), y
        if self.loss == "mse":
            return F.mse_loss(y.mean(-1), labels.clamp(min=0).to(y.dtype)), y
        losses = F.cross_entropy(flat, targets.clamp(min=0), reduction="none").view(labels.shape)
        weights = (labels >= 0).to(y.dtype)
        return (losses * weights).sum() / weights.sum().clamp(min=1), y


def counted(loss, labels, class_weights):
    """The weight of a micro-batch in the mean over its minibatch."""
    if loss == "shifted":
        labels = labels[:, 1:]
    is_counted = labels >= 0
    if loss == "mse":
        return float(labels.numel())
    if loss == "weighted":
        return float((class_weights[labels.clamp(min=0)] * is_counted).sum())
    return float(is_counted.sum())


def eager(model, data, microbatches):
    """Losses and final weights of eager PyTorch."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses, size = [], BATCH // microbatches
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [slice(step * BATCH + k * size, step * BATCH + (k + 1) * size) for k in range(microbatches)]
        counts = [counted(model.loss, data["labels"][part], model.class_weights) for part in parts]
        total = 0.0
        for part, count in zip(parts, counts):
            labels = data["labels"][part]
            if model.loss in ("logits", "tokens"):
                y = model(data["x"][part], data["mask"][part])
                loss = F.cross_entropy(y.reshape(-1, CLASSES), labels.reshape(-1))
            else:
                loss = model(data["x"][part], data["mask"][part], labels)[0]
            loss = loss * (count / sum(counts)) if count else loss.nan_to_num(0.0) * 0.0
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, {name: value.detach().numpy() for name, value in model.state_dict().items()}


def is_lost(file, names, inputs):
    """True if an ONNX file cannot say what PyTorch does: written buffers, and in the older exporter `detach`, `padding_idx`
    and the threshold of `softplus`."""
    if file == "legacy.onnx" and (inputs == "padded words" or {"detach", "round", "out", "softplus", "ties-amax", "pool-divisor"} & set(names)):
        return True
    return file.endswith(".onnx") and any(name.startswith(("spectral", "average", "ties-max", "ties-min", "ties-pool")) for name in names)


def is_exported_wrong(path, model, data):
    """True if onnxruntime, where it is installed, does not compute what PyTorch does: the exporter's fault."""
    try:
        import onnxruntime
    except ImportError:
        return False
    names = ["x", "mask"] + ([] if model.loss in ("logits", "tokens") else ["labels"])
    rows = {name: data[name][:BATCH] for name in names}
    with torch.no_grad():
        expected = copy.deepcopy(model).train()(*rows.values())
    expected = expected[0] if isinstance(expected, tuple) else expected
    try:
        session = onnxruntime.InferenceSession(str(path))
        known = {given.name for given in session.get_inputs()}
        computed = session.run(None, {name: rows[name].numpy() for name in names if name in known})[0]
    except Exception:
        return False
    return not np.allclose(computed, expected.numpy(), rtol=1e-3, atol=1e-4)


def make(seed):
    """A module, its inputs, its blocks and kind of input, and a description."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    known = layers()
    names = [rng.choice(sorted(known if rng.random() < 0.5 else FUNCTIONS)) for _ in range(rng.randint(1, 4))]
    blocks = [known[name]() if name in known else Function(FUNCTIONS[name]) for name in names]
    inputs, loss = rng.choice(["floats", "words", "padded words"]), rng.choice(LOSSES)
    model = Model(blocks, inputs, loss)
    rows = BATCH * STEPS
    x = torch.randn(rows, TIME, WIDTH) if inputs == "floats" else torch.randint(WORDS, (rows, TIME))
    lengths = torch.randint(2, TIME + 1, (rows,))
    mask = torch.arange(TIME)[None, :] < lengths[:, None]
    shape = (rows,) if loss == "logits" else (rows, TIME)
    labels = torch.randint(CLASSES, shape)
    if rng.random() < 0.6:
        labels[torch.rand(shape) < 0.4] = -100
    return model, {"x": x, "mask": mask, "labels": labels}, (names, inputs), f"{inputs}: {', '.join(names)}; {loss}"


@contextlib.contextmanager
def silent():
    """Drops what the exporters print, in C++ as well."""
    saved = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush(), sys.stderr.flush()
    os.dup2(null, 1), os.dup2(null, 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(saved[0], 1), os.dup2(saved[1], 2)
        [os.close(file) for file in [null, *saved]]


def written(folder, file, write):
    """True if the exporter wrote the file."""
    with contextlib.suppress(Exception), silent():
        write(folder / file)
        return True
    return False


def exports(model, data, folder):
    """Writes the files that the exporters can make; yields their names."""
    own = model.loss not in ("logits", "tokens")
    names = ["x", "mask"] + (["labels"] if own else [])
    example = {name: data[name][:7].clone() for name in names}
    dim = torch.export.Dim("batch")
    for kind, dims in [("auto", torch.export.Dim.AUTO), ("named", dim), ("static", None)]:
        shapes = None if dims is None else {name: {0: dims} for name in names}

        def program(path):
            exported = torch.export.export(copy.deepcopy(model).train(), (), example, dynamic_shapes=shapes, strict=False)
            torch.export.save(exported, path)

        if written(folder, f"{kind}.pt2", program):
            yield f"{kind}.pt2"
    arguments = tuple(example.values())
    older = dict(
        dynamo=False, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        dynamic_axes={name: {0: f"{name}_batch"} for name in names},
    )
    newer = dict(
        dynamo=True, optimize=False, verbose=False, external_data=False,
        dynamic_shapes={name: {0: dim} for name in names},
    )
    for file, options in [("legacy.onnx", older), ("dynamo.onnx", newer)]:
        if written(folder, file, lambda path: torch.onnx.export(copy.deepcopy(model).train(), arguments, path, input_names=names, **options)):
            yield file


def run(pipec, folder, file, data, loss, stages, microbatches, expected):
    """`None` if pipec's results are those of PyTorch; else the outcome and its description."""
    own = loss not in ("logits", "tokens")
    arrays = {"x": data["x"].numpy(), "mask": data["mask"].numpy(), "labels" if own else "target": data["labels"].numpy()}
    np.savez(folder / "data.npz", **arrays)
    for name in ["m.jsonl", "w.npz"]:
        (folder / name).unlink(missing_ok=True)
    command = [
        pipec, "train", file, "--data", "data.npz", "--batch", str(BATCH), "--microbatches", str(microbatches), "--steps", str(STEPS),
        "--stages", ",".join(["1"] * stages), "--schedule", "1f1b", "--optimizer", "sgd", "--lr", str(RATE),
        "--loss", "output" if own else "cross-entropy", "--metrics", "m.jsonl", "--save", "w.npz", "-q",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if not line.startswith(("warning", "note"))]
    if done.returncode not in (0, 1, 2):
        return "crashed", " ".join(errors)[:300]
    if done.returncode != 0:
        return "refused", " ".join(errors[:2])[:300]
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "step" in line and "loss" in line]
    wanted_losses, wanted = expected
    worst = max((abs(a - b) for a, b in zip(losses, wanted_losses)), default=1.0)
    if len(losses) != STEPS or not worst <= TOLERANCE:
        return "different", f"losses {losses} instead of {wanted_losses}; said: {done.stderr.strip()[-200:]}"
    weights = dict(np.load(folder / "w.npz"))
    # Tracing by the older exporter is a forward pass, which updates the running statistics in the file.
    skipped = ("running_mean", "running_var") if file == "legacy.onnx" else ()
    for name, value in weights.items():
        if not name.endswith(skipped) and name in wanted and value.shape == wanted[name].shape:
            worst = np.abs(value.astype(np.float64) - wanted[name].astype(np.float64)).max(initial=0.0)
            if not worst <= TOLERANCE * max(1.0, np.abs(wanted[name]).max(initial=0.0)):
                return "different", f"`{name}` is off by {worst:.3g}; said: {done.stderr.strip()[-200:]}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipec")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/modules"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="only two stages and two micro-batches")
    arguments = parser.parse_args()
    pipec = os.path.abspath(arguments.pipec)
    counts, reasons = collections.Counter(), collections.Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        folder = arguments.folder / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        model, data, made_of, described = make(seed)
        expected = {}
        try:
            for microbatches in (1, 2, 4):
                expected[microbatches] = eager(model, data, microbatches)
        except Exception as error:
            counts["not run by PyTorch"] += 1
            reasons[f"PyTorch: {str(error)[:80]}"] += 1
            continue
        if not all(np.isfinite(losses).all() for losses, _ in expected.values()):
            counts["not finite in PyTorch"] += 1
            continue
        for file in exports(model, data, folder):
            if is_lost(file, *made_of):
                counts[f"{file}: not in ONNX"] += 1
                continue
            if file.endswith(".onnx") and is_exported_wrong(folder / file, model, data):
                counts[f"{file}: exported wrong"] += 1
                continue
            runs = [(2, 2)] if arguments.quick else [(s, k) for s in (1, 2) for k in (1, 2, 4)]
            for stages, microbatches in runs:
                outcome = run(pipec, folder, file, data, model.loss, stages, microbatches, expected[microbatches])
                kind, why = outcome or ("equal", "")
                counts[f"{file}: {kind}"] += 1
                if kind == "refused":
                    reasons[f"{file}: {why[:160]}"] += 1
                    break
                if kind != "equal":
                    print(f"{kind}  seed {seed} {file} stages {stages} micro-batches {microbatches} ({described}): {why}", flush=True)
                    break
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    for reason, count in reasons.most_common(40):
        print(f"{count:6} {reason}")
    failed = sum(count for name, count in counts.items() if name.endswith(("different", "crashed")))
    sys.exit(1 if failed else 0)


main()

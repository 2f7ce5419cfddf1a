#!/usr/bin/env python3
"""What of today's models pipec takes: exports a list of architectures with random weights, and for each asks pipec to

- plan the training export for 8 GPUs                    (`pipec partition train.pt2 --gpus 8`),
- plan an export with a dynamic batch and, where the model takes one, an attention mask,
- evaluate the evaluation export, against PyTorch        (`pipec eval eval.pt2`, every output within 1e-3),
- train three steps of SGD, one of each family, against PyTorch (`pipec train train.pt2`, losses within 1e-4).

Prints one table. Exports are kept in a folder, so that a second run only asks pipec.

    pip install torch torchvision transformers timm diffusers onnx onnxscript
    python tests/survey/survey.py target/release/pipec --folder /tmp/survey [--only REGEX] [--onnx]

Exit code 1 when an answer differs from PyTorch's or pipec crashed.
"""

import argparse
import collections
import contextlib
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import zipfile
import zlib

import numpy as np

STEPS = 3
# Largest difference of an output, relative to the largest number of that output where this is above 1.
CLOSE = 1e-3
# Largest relative difference of a loss.
LOSS = 1e-4
# Batches that exports have: some divide other sizes, some do not.
BATCHES = (2, 4, 7)
PATIENCE = {"export": 600, "pipec": 300}


def batch_of(name):
    return BATCHES[zlib.crc32(name.encode()) % len(BATCHES)]


def leaves(value):
    """The tensors of a result, in the order that an export has them."""
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def saved(path, tensors):
    np.savez(path, **{name: tensor.detach().numpy() for name, tensor in tensors.items()})


def export(architecture, folder, onnx):
    """Writes the exports of one architecture and what PyTorch makes of it."""
    import torch

    torch.manual_seed(0)
    batch = batch_of(architecture.name)
    module, inputs = architecture.build(batch)
    for parameter in module.parameters():
        # Weights that begin at zero or at one hide mistakes.
        if parameter.is_floating_point() and parameter.detach().std() == 0 if parameter.numel() > 1 else False:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().flatten()[0]), std=0.02)
    named = all(name != "x" for name in inputs)
    if "input_ids" in inputs and "attention_mask" in inspect.signature(module.forward).parameters:
        inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    args, kwargs = ((), inputs) if named else (tuple(inputs.values()), {})
    names = list(inputs)
    module.eval()
    with torch.no_grad():
        expected = leaves(module(*args, **kwargs))
    saved(folder / "inputs.npz", inputs)
    saved(folder / "expected.npz", {f"{at:04}": tensor.float() for at, tensor in enumerate(expected)})
    about = {"batch": batch, "inputs": names, "torch": torch.__version__}
    with torch.no_grad():
        torch.export.save(torch.export.export(module, args, kwargs, strict=False), folder / "eval.pt2")
    module.train()
    program = torch.export.export(module, args, kwargs, strict=False)
    torch.export.save(program, folder / "train.pt2")
    with contextlib.suppress(Exception):
        # As the documentation says; torch cannot export every model so.
        rows = {name: {0: torch.export.Dim.AUTO} for name in inputs}
        shapes = rows if named else tuple(rows.values())
        torch.export.save(torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False), folder / "dynamic.pt2")
    if onnx:
        module.eval()
        torch.onnx.export(module, args, folder / "eval.onnx", kwargs=kwargs, dynamo=True, optimize=False, verbose=False)
        module.train()
        torch.onnx.export(program, args=(), f=folder / "train.onnx", dynamo=True, optimize=False, verbose=False)
    if architecture.trains or architecture.repeats:
        train(architecture, module, inputs, args, kwargs, folder)
    (folder / "about.json").write_text(json.dumps(about))


def train(architecture, module, inputs, args, kwargs, folder):
    """Three steps of SGD on fresh rows, and the losses."""
    import torch

    generator = torch.Generator().manual_seed(1)
    rows = {name: [] for name in inputs}
    targets, losses = [], []
    optimizer = torch.optim.SGD(module.parameters(), lr=architecture.rate)
    for _ in range(STEPS):
        fresh = {}
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                fresh[name] = torch.randn(tensor.shape, generator=generator)
            else:
                order = torch.randperm(tensor.numel(), generator=generator)
                fresh[name] = tensor.flatten()[order].reshape(tensor.shape)
            rows[name].append(fresh[name])
        optimizer.zero_grad()
        result = module(**fresh) if kwargs else module(*fresh.values())
        first = leaves(result)[0]
        if architecture.loss == "output":
            loss = first
        elif architecture.loss == "mse":
            target = torch.randn(first.shape, generator=generator)
            targets.append(target)
            loss = torch.nn.functional.mse_loss(first, target)
        else:
            target = torch.randint(0, first.shape[1], (first.shape[0], *first.shape[2:]), generator=generator)
            targets.append(target)
            loss = torch.nn.functional.cross_entropy(first, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    data = {name: torch.cat(tensors) for name, tensors in rows.items()}
    if targets:
        data["target"] = torch.cat(targets)
    saved(folder / "data.npz", data)
    (folder / "losses.json").write_text(json.dumps(losses))


def run(command, patience):
    """Runs a command; its exit code, its standard error, and seconds."""
    began = time.time()
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=patience)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        code, err = "timeout", f"longer than {patience} s"
    return code, out, err, time.time() - began


def reason(error):
    """The line of an error that says why."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    at = next((at for at, line in enumerate(lines) if line.startswith("error")), max(len(lines) - 1, 0))
    return " | ".join(lines[at : at + 6])[:400] if lines else ""


class Row:
    """What came of one architecture."""

    def __init__(self, name, family):
        self.name, self.family = name, family
        self.exports = self.plans = self.evaluates = self.trains = "-"
        self.why, self.wrong = "", False

    def fail(self, column, code, error):
        setattr(self, column, "no")
        self.why = self.why or f"{column}: {reason(error)}"
        self.wrong |= code not in (2, 3)


def outputs_of(path, have):
    """The arrays in the order that the export has its results: those of a .pt2 are named by its signature."""
    if path.suffix != ".pt2":
        import onnx

        graph = onnx.load(path, load_external_data=False).graph
        return [have[output.name] for output in graph.output]
    with zipfile.ZipFile(path) as archive:
        entry = next(n for n in archive.namelist() if "/models/" in n and n.endswith(".json"))
        specs = json.loads(archive.read(entry))["graph_module"]["signature"]["output_specs"]
    given = [spec["user_output"]["arg"] for spec in specs if "user_output" in spec]
    names = [arg["as_tensor"]["name"] for arg in given if "as_tensor" in arg]
    return [have[name] for name in names]


def compared(model, given, expected):
    """The largest difference between outputs, and where it is."""
    have, want = np.load(given), np.load(expected)
    try:
        arrays, worst = outputs_of(model, have), 0.0
    except KeyError as missing:
        return None, f"no output {missing} among {have.files}"
    if len(arrays) != len(want.files):
        return None, f"{len(arrays)} outputs, PyTorch has {len(want.files)}"
    for at, (array, name) in enumerate(zip(arrays, want.files)):
        target = want[name]
        if array.shape != target.shape:
            return None, f"output {at} is {array.shape}, PyTorch's {target.shape}"
        if not np.array_equal(np.isfinite(array), np.isfinite(target)):
            return float("inf"), f"output {at} differs in what is finite"
        finite = np.isfinite(target)
        difference = np.abs(array[finite].astype(np.float64) - target[finite])
        if difference.size:
            worst = max(worst, float(difference.max() / max(1.0, np.abs(target[finite]).max())))
    return worst, ""


def losses_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["loss"] for line in lines if "step" in line and "loss" in line][:STEPS]


def ask(pipec, architecture, folder, suffix):
    """Asks pipec about the exports in a folder."""
    row = Row(architecture.name, architecture.family)
    row.exports = "yes"
    about = json.loads((folder / "about.json").read_text())
    evaluation, training = folder / f"eval.{suffix}", folder / f"train.{suffix}"
    out = folder / "outputs.npz"
    out.unlink(missing_ok=True)
    code, _, error, _ = run([pipec, "partition", training, "--gpus", "8", "-o", folder / "plan.json"], PATIENCE["pipec"])
    (folder / "partition.log").write_text(error)
    if code == 0:
        row.plans = "yes"
    else:
        row.fail("plans", code, error)
    dynamic = folder / "dynamic.pt2"
    if code == 0 and suffix == "pt2" and dynamic.exists():
        code, _, error, _ = run([pipec, "partition", dynamic, "--gpus", "8", "--micro-batch", "4", "-o", folder / "plan.json"], PATIENCE["pipec"])
        if code != 0:
            row.fail("plans", code, error)
    code, _, error, _ = run([pipec, "eval", evaluation, "--inputs", folder / "inputs.npz", "-o", out], PATIENCE["pipec"])
    (folder / "eval.log").write_text(error)
    if code == 0:
        worst, where = compared(evaluation, out, folder / "expected.npz")
        if worst is None or worst > CLOSE:
            row.fail("evaluates", 1, where or f"differs by {worst:.1e}")
        else:
            row.evaluates = f"{worst:.0e}"
    else:
        row.fail("evaluates", code, error)
    out.unlink(missing_ok=True)
    if row.plans == "yes" and architecture.trains:
        metrics = folder / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        command = [pipec, "train", training, "--data", folder / "data.npz", "--batch", about["batch"], "--steps", STEPS]
        command += ["--optimizer", "sgd", "--lr", architecture.rate, "--metrics", metrics]
        command += [] if architecture.loss == "output" else ["--loss", architecture.loss]
        command += ["--class-dim", 1] if architecture.loss == "cross-entropy" else []
        code, _, error, _ = run(command, PATIENCE["pipec"])
        (folder / "train.log").write_text(error)
        if code != 0:
            row.fail("trains", code, error)
        else:
            have, want = losses_of(metrics), json.loads((folder / "losses.json").read_text())
            worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(have, want, strict=True))
            if worst > LOSS:
                row.fail("trains", 1, f"losses {have}, PyTorch's {want}")
            else:
                row.trains = f"{worst:.0e}"
    if row.plans == "yes" and architecture.repeats:
        seen = []
        for extra in ([], ["--workers", 2, "--schedule", "1f1b", "--microbatches", 1], []):
            metrics = folder / "metrics.jsonl"
            metrics.unlink(missing_ok=True)
            command = [pipec, "train", training, "--data", folder / "data.npz", "--batch", about["batch"], "--steps", STEPS]
            command += ["--optimizer", "sgd", "--lr", architecture.rate, "--metrics", metrics, *extra]
            code, _, error, _ = run(command, PATIENCE["pipec"])
            (folder / "train.log").write_text(error)
            if code != 0:
                row.fail("trains", code, error)
                break
            seen.append(losses_of(metrics))
        else:
            if seen[0] != seen[1] or seen[0] != seen[2]:
                row.fail("trains", 1, f"runs differ: {seen}")
            else:
                row.trains = "same"
    return row


def table(rows):
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'family':18}  exports  plans  evaluates  trains  why not")
    for row in rows:
        cells = f"{row.exports:7}  {row.plans:5}  {row.evaluates:9}  {row.trains:6}"
        print(f"{row.name:{width}}  {row.family:18}  {cells}  {row.why}")
    print()
    exported = [row for row in rows if row.exports == "yes"]
    good = [row for row in exported if row.plans == "yes" and row.evaluates not in ("no", "-") and row.trains != "no"]
    print(f"{len(rows)} architectures, {len(exported)} that PyTorch exports, {len(good)} that pipec takes whole")
    for column in ("plans", "evaluates", "trains"):
        asked = [row for row in exported if getattr(row, column) != "-"]
        print(f"  {column:9} {sum(getattr(row, column) != 'no' for row in asked)} of {len(asked)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("pipec", nargs="?", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="names that match this")
    parser.add_argument("--onnx", action="store_true", help="ONNX exports in place of .pt2")
    parser.add_argument("--export-only", action="store_true")
    parser.add_argument("--ask-only", action="store_true", help="only what is exported already")
    parser.add_argument("--failed", action="store_true", help="show only what fails")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    import architectures

    if given.one:
        folder = given.folder / given.one.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        export(architectures.ALL[given.one], folder, given.onnx)
        return 0
    rows, reasons = [], collections.Counter()
    suffix = "onnx" if given.onnx else "pt2"
    for architecture in architectures.ALL.values():
        if not re.search(given.only, architecture.name):
            continue
        folder = given.folder / architecture.name.replace("/", "_")
        failed = folder / "failed.txt"
        if not (folder / "about.json").exists() and not failed.exists() and not given.ask_only:
            command = [sys.executable, __file__, "--folder", given.folder, "--one", architecture.name]
            code, _, error, _ = run(command + (["--onnx"] if given.onnx else []), PATIENCE["export"])
            folder.mkdir(parents=True, exist_ok=True)
            if code != 0:
                failed.write_text(error)
        if failed.exists():
            row = Row(architecture.name, architecture.family)
            row.exports, row.why = "no", "PyTorch: " + failed.read_text().strip().splitlines()[-1][:200]
            rows.append(row)
        elif (folder / f"train.{suffix}").exists() and (folder / "about.json").exists() and not given.export_only:
            rows.append(ask(given.pipec.resolve(), architecture, folder, suffix))
        else:
            continue
        print(f"{architecture.name}: {rows[-1].why or 'ok'}"[:300], file=sys.stderr, flush=True)
    if rows:
        table([row for row in rows if row.why] if given.failed else rows)
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    sys.exit(main())

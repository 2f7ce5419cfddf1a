#!/usr/bin/env python3
"""Whether two builds of pipec answer alike: plans, trained weights, losses, programs, reports, traces and exports.

    python tests/identity/identity.py target/release/pipec -o before.tsv
    … change code, build …
    python tests/identity/identity.py target/release/pipec --against before.tsv

Every line of the table is a case and the SHA-256 of its answer. Sums are of one machine: kernels follow the processor. With `--keep FOLDER` the
answers themselves stay, so that `diff` shows what differs. The published profiles are read from $PIPEC_DATA (default ../shared/data).
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA = pathlib.Path(os.environ.get("PIPEC_DATA", ROOT / "../shared/data")).resolve()

# What a model of the zoo is asked: 30 questions that reach every search.
QUESTIONS = {
    "gpt-data-parallel": "gpt --gpus 8",
    "gpt-4-stages": "gpt --gpus 4 --stages 1,1,1,1 --microbatches 8",
    "gpt-unequal": "gpt --gpus 8 --stages 1,5,2",
    "gpt-two-levels": "gpt --levels 4:100GB/s,2:1GB/s --microbatches 16 --optimizer adamw",
    "gpt-three-levels": "gpt --levels 2:100GB/s,2:10GB/s,2:1GB/s",
    "gpt-auto": "gpt --gpus 8 --schedule auto --batch 256",
    "gpt-target-megatron": "gpt --gpus 4 --target megatron --batch 64",
    "gpt-target-torch": "gpt --gpus 4 --target torch --batch 64",
    "gpt-zero-auto": "gpt --gpus 8 --zero auto --memory 4MB --optimizer adam",
    "gpt-zero-1": "gpt --gpus 4 --zero 1 --optimizer adam",
    "gpt-tensor-2": "gpt --gpus 4 --tensor 2",
    "gpt-tensor-auto": "gpt --gpus 8 --tensor auto --microbatches 4",
    "gpt-pinned": "gpt --gpus 4 --max-stages 3 --cut-after blocks.0 --microbatches 4",
    "gpt-memory": "gpt --gpus 4 --objective memory --microbatches 8",
    "gpt-interleaved": "gpt --gpus 2 --schedule interleaved --chunks 2 --microbatches 8",
    "gpt-zbv": "gpt --gpus 2 --schedule zbv --microbatches 8",
    "gpt-zb-h1": "gpt --gpus 2 --stages 1,1 --schedule zb-h1 --microbatches 8",
    "gpt-2bw": "gpt --gpus 4 --stages 2,2 --schedule 2bw --microbatches 8",
    "gpt-vsync": "gpt --gpus 4 --stages 2,1,1 --schedule 1f1b-rr-vsync",
    "gpt-paper": "gpt --gpus 4 --cost paper --bandwidth 1GB/s",
    "gpt-pipedream": "gpt --gpus 4 --cost pipedream --partitioner pipedream --bandwidth 1GB/s",
    "gpt-bucket-auto": "gpt --levels 2:10GB/s,2:1GB/s --bucket auto",
    "mlp-exhaustive": "mlp --gpus 3 --partitioner exhaustive",
    "mlp-milp": "mlp --gpus 2 --partitioner milp --no-replication",
    "moe": "moe --gpus 8 --bandwidth 5GB/s --microbatches 4",
    "cnn": "residual-cnn --gpus 8 --bandwidth 1GB/s",
    "cnn-recompute": "residual-cnn --gpus 2 --stages 1,1 --memory 2MB --microbatches 8",
    "vgg": "vgg --gpus 16 --bandwidth 1.25GB/s",
    "resnet": "resnet --levels 4:12GB/s,4:1.25GB/s",
    "gnmt": "gnmt --levels 8:12GB/s,2:1.25GB/s",
    "bert": "bert --gpus 8 --microbatches 8 --memory 8GB --optimizer adam",
    "awd-lm": "awd-lm --gpus 4 --bandwidth 1.25GB/s",
    "gpt-latency": "gpt --gpus 2 --objective latency --no-replication",
}

# Training runs: how the plan is made, and how it is trained.
RUNS = {
    **{
        f"gpt-{schedule}": (f"gpt --gpus {gpus} {stages} --microbatches 8 --schedule {schedule}", "")
        for schedule, gpus, stages in [
            ("gpipe", 2, "--stages 1,1"),
            ("1f1b", 3, "--stages 1,1,1"),
            ("interleaved", 2, "--chunks 2"),
            ("bfs", 2, "--chunks 2"),
            ("zb-h1", 2, "--stages 1,1"),
            ("zb-h2", 3, "--stages 1,1,1"),
            ("zbv", 2, ""),
            ("dualpipev", 2, ""),
            ("2bw", 2, "--stages 1,1"),
        ]
    },
    **{
        f"gpt-replicas-{schedule}": (f"gpt --gpus 4 {stages} --microbatches 8 --schedule {schedule}", "")
        for schedule, stages in [
            ("gpipe", "--stages 2,2"),
            ("1f1b", "--stages 1,3"),
            ("interleaved", "--chunks 2"),
            ("zb-h1", "--stages 2,2"),
            ("zbv", ""),
            ("2bw", "--stages 2,2"),
        ]
    },
    "mlp-round-robin": ("mlp --gpus 4 --stages 2,1,1 --schedule 1f1b-rr", "--steps 30"),
    "mlp-vsync": ("mlp --gpus 3 --stages 1,1,1 --schedule 1f1b-rr-vsync", "--steps 30"),
    "mlp-predict": ("mlp --gpus 3 --stages 1,1,1 --schedule 1f1b-rr", "--steps 30 --momentum 0.9 --staleness predict"),
    "mlp-pipemare": ("mlp --gpus 3 --stages 1,1,1 --schedule 1f1b-rr", "--steps 30 --staleness pipemare"),
    "mlp-one-version": ("mlp --gpus 3 --stages 1,1,1 --schedule 1f1b-rr", "--steps 30 --staleness none"),
    "cnn-round-robin": ("residual-cnn --gpus 3 --stages 2,1 --schedule 1f1b-rr", "--steps 8"),
    "cnn-deferred": ("residual-cnn --gpus 2 --stages 1,1 --microbatches 4", "--bn deferred"),
    "cnn-recompute": ("residual-cnn --gpus 2 --stages 1,1 --memory 2MB --microbatches 8", ""),
    "moe": ("moe --gpus 2 --stages 1,1 --microbatches 4", "--optimizer adamw"),
    **{
        f"gpt-zero-{level}": (f"gpt --gpus 4 --stages 2,2 --microbatches 4 --zero {level} --optimizer adam", "--optimizer adam")
        for level in range(4)
    },
    "gpt-zero-3-clipped": ("gpt --gpus 4 --stages 4 --microbatches 4 --zero 3", "--clip-norm 0.5 --momentum 0.9"),
    "gpt-tensor-2": ("gpt --gpus 4 --stages 1,1 --tensor 2 --microbatches 4", ""),
    "gpt-tensor-2-zero-2": ("gpt --gpus 4 --stages 2 --tensor 2 --microbatches 4 --zero 2", ""),
    **{f"gpt-{dtype}": ("gpt --gpus 2 --stages 1,1 --microbatches 4", f"--dtype {dtype}") for dtype in ["f16", "bf16", "f64"]},
    "gpt-clipped": ("gpt --gpus 3 --stages 1,2 --microbatches 4", "--clip-norm 0.1 --lr-schedule warmup:2,cosine"),
    "mlp-clipped-by-stage": ("mlp --gpus 3 --stages 1,2 --schedule 1f1b-rr", "--steps 20 --clip-norm 0.1"),
    **{
        f"mlp-{optimizer}": ("mlp --gpus 2 --stages 1,1 --microbatches 4", f"--optimizer {optimizer} --weight-decay 0.01")
        for optimizer in ["sgd-momentum", "adam", "adamw", "rmsprop-momentum", "adagrad"]
    },
    "mlp-frozen": ("mlp --gpus 2 --stages 1,1 --microbatches 4", "--freeze fc1.bias,fc2.weight --shuffle --seed 3"),
    "gpt-processes": ("gpt --gpus 2 --stages 1,1 --microbatches 4", "--processes"),
    "mlp-processes": ("mlp --gpus 3 --stages 2,1 --schedule 1f1b-rr", "--steps 12 --processes"),
}
RESUMED = ["gpt-1f1b", "mlp-round-robin", "gpt-zero-2", "gpt-2bw"]
PROGRAMS = ["gpt-4-stages", "gpt-unequal", "gpt-interleaved", "gpt-zbv", "gpt-zb-h1", "gpt-2bw", "gpt-vsync", "moe"]
EXPORTS = {
    "gpt-4-stages": ["torch", "onnx", "dot"],
    "gpt-target-megatron": ["megatron", "torchtitan", "deepspeed"],
    "gpt-target-torch": ["torch"],
    "gpt-unequal": ["onnx", "dot", "pipedream"],
    "gpt-interleaved": ["torch"],
}
GOLDEN_LEVELS = ["4:1GB/s", "8:12GB/s,2:1.25GB/s", "4:12GB/s,2:5GB/s,2:1GB/s"]
MODELS = ["mlp", "residual-cnn", "gpt", "moe"]


class Gate:
    def __init__(self, pipec, folder):
        self.pipec, self.folder, self.sums = pipec, folder, {}

    def run(self, *words):
        """Runs pipec; gives its exit code and what it wrote on standard output and standard error."""
        done = subprocess.run([self.pipec, *words], cwd=self.folder, capture_output=True, timeout=600)
        return done.returncode, done.stdout, done.stderr

    def keep(self, name, answer):
        path = self.folder / "answers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(answer)
        self.sums[name] = hashlib.sha256(answer).hexdigest()

    def ask(self, name, words, made):
        """Runs pipec and keeps the file that it makes, or its exit code where it makes none."""
        path = self.folder / made
        code, _, errors = self.run(*words)
        if path.is_file():
            self.keep(name, path.read_bytes())
        elif path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    self.keep(f"{name}/{file.relative_to(path)}", file.read_bytes())
        else:
            self.keep(name, f"exit {code}\n".encode())
            print(f"{name}: exit {code}: {errors.decode(errors='replace').strip().splitlines()[:2]}", file=sys.stderr)

    def models(self):
        for model in sorted({words.split()[0] for words in QUESTIONS.values()}):
            extra = [] if model in MODELS else ["--structure"]
            self.run("zoo", model, *extra, "-o", f"{model}.onnx", "-q")

    def plan(self, name, words):
        model, *options = words.split()
        self.ask(f"plans/{name}", ["partition", f"{model}.onnx", *options, "-q", "-o", f"{name}.json"], f"{name}.json")

    def golden(self):
        """Plans of the profiles that PipeDream published, under its costs and ours."""
        for profile in sorted((DATA / "partition/pipedream/profiles").glob("*.graph.txt")):
            for levels in GOLDEN_LEVELS:
                for cost in ["pipedream", "paper", "pipec"]:
                    name = f"golden/{profile.name.split('.')[0]}/{levels.replace('/', '')}/{cost}"
                    (self.folder / "golden.json").unlink(missing_ok=True)
                    words = ["--from", "pipedream", "--levels", levels, "--cost", cost, "-q", "-o", "golden.json"]
                    self.ask(name, ["partition", str(profile), *words], "golden.json")

    def train(self, name, planning, training):
        model, *options = planning.split()
        plan = f"run-{name}.json"
        self.ask(f"runs/{name}/plan", ["partition", f"{model}.onnx", *options, "-q", "-o", plan], plan)
        words = ["train", f"{model}.onnx", "--plan", plan, "--synthetic-data", "-q", "--metrics", "metrics.jsonl"]
        words += training.split() if "--steps" in training else ["--steps", "4", *training.split()]
        (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        self.ask(f"runs/{name}/weights", [*words, "--save", f"{name}.safetensors"], f"{name}.safetensors")
        self.losses(name)
        if name in RESUMED:
            steps = words.index("--steps") + 1
            first = [*words[:steps], "2", *words[steps + 1 :], "--checkpoint-dir", f"{name}.checkpoints"]
            self.run(*first)
            rest = [*words, "--checkpoint-dir", f"{name}.checkpoints", "--resume", "auto", "--save", f"{name}.resumed.safetensors"]
            self.ask(f"runs/{name}/resumed", rest, f"{name}.resumed.safetensors")

    def losses(self, name):
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.keep(f"runs/{name}/losses", "\n".join(repr(row["loss"]) for row in rows if "loss" in row).encode())

    def all(self):
        (self.folder / "answers").mkdir(parents=True, exist_ok=True)
        self.models()
        for name, words in QUESTIONS.items():
            self.plan(name, words)
        self.golden()
        for name in PROGRAMS:
            plan = f"{name}.json"
            for form in ["txt", "json", "csv"]:
                made = f"{name}.program.{form}"
                self.ask(f"programs/{name}.{form}", ["simulate", plan, "-q", "--minibatches", "4", "--programs", made], made)
            made = f"{name}.trace.json"
            self.ask(f"traces/{name}.json", ["simulate", plan, "-q", "--minibatches", "4", "--trace", made], made)
            made = f"{name}.pftrace"
            self.ask(f"traces/{name}.pftrace", ["simulate", plan, "-q", "--minibatches", "4", "--trace", made], made)
            made = f"{name}.html"
            self.ask(f"reports/{name}.html", ["report", plan, "-q", "--html", made], made)
        for name, targets in EXPORTS.items():
            model = QUESTIONS[name].split()[0]
            for target in targets:
                made = f"{name}.{target}"
                words = ["export", f"{name}.json", "--to", target, "--model", f"{model}.onnx", "-q", "-o", made]
                self.ask(f"exports/{name}.{target}", words, made)
        for name, (planning, training) in RUNS.items():
            self.train(name, planning, training)


def main():
    parser = argparse.ArgumentParser(description="Compare the answers of two builds of pipec.")
    parser.add_argument("pipec", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path, help="write the table of sums")
    parser.add_argument("--against", type=pathlib.Path, help="a table to compare with")
    parser.add_argument("--keep", type=pathlib.Path, help="keep models and answers in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        gate = Gate(args.pipec.resolve(), folder.resolve())
        gate.all()
    if args.output:
        args.output.write_text("".join(f"{name}\t{digest}\n" for name, digest in gate.sums.items()))
    if args.against:
        before = dict(line.split("\t") for line in args.against.read_text().splitlines())
        differing = [name for name in {**before, **gate.sums} if before.get(name) != gate.sums.get(name)]
        for name in differing:
            print(f"differs: {name}")
        print(f"{len(before) - len(differing)} of {len(before)} answers are equal")
        sys.exit(bool(differing))
    print(f"{len(gate.sums)} answers")


if __name__ == "__main__":
    main()

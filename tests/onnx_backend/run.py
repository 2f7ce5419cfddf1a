#!/usr/bin/env python3
"""The node cases of the `onnx` package through `pipec eval`.

Every case of `onnx.backend.test.case.node` is a small model with inputs and the outputs that the standard expects. This
writes them to a folder, evaluates many in one process with `pipec eval --batch-file`, and prints how many passed, were
refused (and by which rule) or failed, for every operator. Exit code 1 when an answer is wrong or pipec crashed.

    pip install onnx
    python tests/onnx_backend/run.py target/release/pipec
"""

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

# Cases in one process. Should pipec crash, the cases of this process are run again one by one.
BATCH = 200
# Seconds for a process.
PATIENCE = 600
# What these operators give is random: only element types and shapes are compared.
RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
}
# Element types that npz carries. Narrow floats travel as f32 and become what the model says at its border.
NARROW = {"bfloat16": np.float32}
PLAIN = "fiub"
# One unit in the last place of 1.
UNIT = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}


class Job:
    """One data set of one case."""

    def __init__(self, case, number, folder):
        self.case, self.number = case, number
        self.operator = case.model.graph.node[0].op_type if case.model.graph.node else "?"
        self.operators = {node.op_type for node in case.model.graph.node}
        self.model = folder / "model.onnx"
        self.inputs = folder / f"inputs_{number}.npz"
        self.outputs = folder / f"outputs_{number}.npz"
        self.expected, self.unit = {}, {}

    def line(self):
        return f"{self.model}\t{self.inputs}\t{self.outputs}\n"


def unpacked(value):
    """The value without its protobuf."""
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def carried(value):
    """The value as an array that npz carries, or None."""
    value = unpacked(value)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.name in NARROW:
        return value.astype(NARROW[value.dtype.name])
    return value if value.dtype.kind in PLAIN and value.dtype.isbuiltin == 1 else None


def write(case, folder):
    """The jobs of a case, or the rule by which npz cannot carry its data."""
    folder.mkdir()
    onnx.save(case.model, folder / "model.onnx")
    jobs = []
    for number, (inputs, outputs) in enumerate(case.data_sets):
        job = Job(case, number, folder)
        names = [info.name for info in case.model.graph.input if info.name]
        given = {name: carried(value) for name, value in zip(names, inputs) if value is not None}
        for info, value in zip(case.model.graph.output, outputs):
            if info.name:
                job.expected[info.name] = carried(value)
                job.unit[info.name] = UNIT.get(getattr(getattr(unpacked(value), "dtype", None), "name", ""), 0.0)
        if any(value is None for value in [*given.values(), *job.expected.values()]):
            return [], "data that is no array of numbers: sequences, optionals, strings, 8-bit floats, 4-bit numbers"
        np.savez(job.inputs, **given)
        jobs.append(job)
    return jobs, None


def evaluate(pipec, jobs, folder):
    """What pipec says of each job: None when it wrote outputs, else ("refused" or "crashed", why)."""
    message = [None] * len(jobs)
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        listing = folder / "cases.tsv"
        listing.write_text("".join(job.line() for job in batch))
        command = [pipec, "eval", "--batch-file", str(listing), "--format", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
            cases = json.loads(done.stdout)["cases"]
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            cases = None
        if cases is None and len(batch) > 1:
            for at, job in enumerate(batch):
                message[start + at] = evaluate(pipec, [job], folder)[0]
        elif cases is None:
            message[start] = ("crashed", "the process did not end as it should")
        else:
            for at, case in enumerate(cases):
                if "failed" in case:
                    message[start + at] = ("crashed" if case.get("bug") else "refused", case["failed"])
    return message


def wrong(job):
    """What is wrong with the outputs of a job, or None."""
    found = np.load(job.outputs)
    for name, want in job.expected.items():
        if name not in found:
            return f"no output `{name}`"
        got = found[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"`{name}` is {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
        if job.operators & RANDOM:
            continue
        got, true = got.astype(np.float64), want.astype(np.float64)
        # What was rounded on the way in another order may be off by a unit in the last place of the largest element.
        finite = np.abs(true[np.isfinite(true)])
        absolute = max(job.case.atol, job.unit[name] * finite.max(initial=0.0))
        close = np.isclose(got, true, job.case.rtol, absolute, equal_nan=True)
        if not close.all():
            return f"`{name}` differs in {np.count_nonzero(~close)} of {want.size} elements"
    return None


def rule(why):
    """A refusal without the names and numbers of its case."""
    why = re.sub(r"^error: cannot \w+ \S+; ", "", why)
    why = why.split("; help:")[0].split("; and ")[0]
    why = re.sub(r"^node `[^`]*` \(\w+\): ", "", why)
    why = re.sub(r"unsupported operators: .*", "unsupported operator", why)
    return re.sub(r"`[^`]*`", "`…`", re.sub(r"-?\d+", "N", why))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pipec", help="the program")
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="name every refused case with its reason")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    outcomes = {}
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        jobs = []
        for case in collect_testcases(None):
            if arguments.filter not in case.name:
                continue
            made, refusal = write(case, place / case.name)
            jobs.extend(made)
            operator = case.model.graph.node[0].op_type
            outcomes[case.name] = (operator, "passed", "") if refusal is None else (operator, "not arrays", refusal)
        for job, message in zip(jobs, evaluate(arguments.pipec, jobs, place)):
            if message is None:
                why = wrong(job)
                message = ("wrong", why) if why else None
            if message is not None and outcomes[job.case.name][1] == "passed":
                outcomes[job.case.name] = (job.operator, *message)

    if not outcomes:
        sys.exit(f"no case has a name that contains {arguments.filter!r}")
    kinds = ["passed", "refused", "not arrays", "wrong", "crashed"]
    table, rules, totals = collections.defaultdict(collections.Counter), collections.Counter(), collections.Counter()
    for name, (operator, kind, why) in outcomes.items():
        table[operator][kind] += 1
        totals[kind] += 1
        if kind in ("refused", "not arrays"):
            rules[rule(why)] += 1
        if kind in ("wrong", "crashed") or (arguments.verbose and kind == "refused"):
            print(f"{kind:8} {name}: {why}")
    print(f"{'operator':32}" + "".join(f"{kind:>12}" for kind in kinds))
    for operator in sorted(table):
        print(f"{operator:32}" + "".join(f"{table[operator][kind] or '':>12}" for kind in kinds))
    print(f"{'all':32}" + "".join(f"{totals[kind]:>12}" for kind in kinds))
    print("\nrefused by rule")
    for text, count in rules.most_common():
        print(f"{count:6}  {text}")
    return int(bool(totals["wrong"] or totals["crashed"]))


if __name__ == "__main__":
    sys.exit(main())

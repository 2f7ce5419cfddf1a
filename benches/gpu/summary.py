"""Tables in Markdown of the results that are in a folder of `gpu.sh`: `summary.py FOLDER`. A missing value is `-`."""

from __future__ import annotations

import csv
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

PRECISIONS = ("fp32", "bf16")

# Steps whose losses `pipec train` reads together at the end.
LATE = 4


def read(path: Path) -> Any:
    """A JSON file; None if it does not exist or is not complete."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def number(value: Optional[float], unit: float = 1.0) -> str:
    """A value in a unit, with four digits."""
    if value is None:
        return "-"
    value /= unit
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{Decimal(f'{value:.4g}'):f}"


def ratio(value: Optional[float], of: Optional[float]) -> str:
    return f"{100 * value / of:.0f} %" if value is not None and of else "-"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> List[str]:
    if not rows:
        return ["Not measured.", ""]
    left = [index == 0 or not any(re.match(r"-?[\d.,]+( %)?$", row[index]) for row in rows) for index in range(len(names))]
    line = "| " + " | ".join("---" if is_left else "---:" for is_left in left) + " |"
    return ["| " + " | ".join(names) + " |", line, *("| " + " | ".join(row) + " |" for row in rows), ""]


class Results:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self, pattern: str) -> List[str]:
        """What `*` stands for in the names of files, in the order of their dates."""
        before, after = pattern.split("*")
        files = sorted(self.folder.glob(pattern), key=lambda path: path.stat().st_mtime)
        return [path.name[len(before) : -len(after)] for path in files if not path.name.startswith("part.")]

    def machine(self) -> List[str]:
        doctor = read(self.folder / "facts.doctor.json")
        if doctor is None:
            return ["The machine is not known: the step `facts` has no result.", ""]
        lines = [f"pipec {doctor['version']} on {doctor['os']} {doctor['architecture']}.", ""]
        rows = [[finding["what"], finding["found"]] for finding in doctor["findings"] if finding["what"] in ("CPU", "memory")]
        for library in doctor["libraries"]:
            rows.append([library["name"], f"{library['version']}, {library['path']}" if library["path"] else "absent"])
        for device in doctor["devices"]:
            memory = number(device["memory"], 1e9)
            rows.append([f"GPU {device['ordinal']}", f"{device['name']}, {device['architecture']}, {memory} GB"])
        facts = list(csv.reader(text(self.folder / "facts.nvidia-smi.csv").splitlines(), skipinitialspace=True))
        for name, value in zip(*facts[:2]) if len(facts) > 1 else ():
            if name != "name":
                rows.append([f"nvidia-smi: {name}", value])
        peers = self.names("peers-*.json") or self.names("compiled-*.json")
        peer = read(self.folder / f"peers-{peers[0]}.json") if peers else read(self.folder / "matmul-torch.json")
        rows.append(["PyTorch", peer["torch"] if peer else "-"])
        return lines + table(["part", "found"], rows)

    def copies(self) -> List[str]:
        copies, torch = read(self.folder / "copies.json"), read(self.folder / "matmul-torch.json")
        rows = []
        labels = {
            "host_to_gpu": "host to GPU, page-locked", "gpu_to_host": "GPU to host, page-locked", "pageable_to_gpu": "host to GPU, pageable",
            "gpu_to_pageable": "GPU to host, pageable", "within_gpu": "within GPU, read and written",
        }
        for name, label in labels.items():
            rates = [gpu[name] for gpu in copies["gpus"]] if copies else []
            peer = torch["copy"] if torch and name == "within_gpu" else None
            rows.append([label, span(rates), number(peer, 1e9), "GB/s"])
        if copies and copies["pairs"]:
            rows.append(["GPU to GPU", span([pair["rate"] for pair in copies["pairs"]]), "-", "GB/s"])
        links = read(self.folder / "copies.links.json")
        for level in links["measured"]["levels"] if links else ():
            rows.append([f"`cluster bench`: {level['name']}", number(level["bandwidth"], 1e9), "-", "GB/s"])
        if copies:
            waits = [gpu["seconds_of_4_bytes"] for gpu in copies["gpus"]]
            rows.append(["copy of 4 bytes to the host", number(max(waits), 1e-6), "-", "us"])
        return ["## Copies", "", *table(["what", "pipec or driver", "PyTorch", "unit"], rows)]

    def products(self) -> List[str]:
        torch = read(self.folder / "matmul-torch.json")
        products = {}
        for name in self.names("matmul-*.profile.json"):
            profile = read(self.folder / f"matmul-{name}.profile.json")
            # The first product has no gradient of its input.
            op = [op for op in profile["ops"] if op["op"] == "matmul"][1] if profile else None
            if op and op["fwd_us"] and op["bwd_us"]:
                products[name] = (profile["settings"]["micro_batch"], op)
        sizes = [size for size, _ in products.values()] + ([row["size"] for row in torch["matmul"]] if torch else [])
        rows = []
        for size in dict.fromkeys(sizes):
            peers = {row["precision"]: row["flops_per_s"] for row in torch["matmul"] if row["size"] == size} if torch else {}
            for name in ("bf16", "fp16", "fp32", "tf32", "fp64"):
                found = products.get(name, (None, None))
                op = found[1] if found[0] == size else None
                if op is None and name not in peers:
                    continue
                rates = [op["flops"] * 1e6 / op["fwd_us"], 2 * op["flops"] * 1e6 / op["bwd_us"]] if op else [None, None]
                peer = peers.get(name)
                rows.append([f"{size} x {size}", name, *(number(rate, 1e12) for rate in (*rates, peer)), ratio(rates[0], peer)])
        columns = ["size", "precision", "pipec, forward", "pipec, backward", "PyTorch", "pipec / PyTorch"]
        return ["## Matrix products: Tflop/s", "", *table(columns, rows)]

    def correctness(self) -> List[str]:
        rows = []
        ops = text(self.folder / "ops.log")
        count = re.search(r"^(\d+) samples on .*, (\d+) differ$", ops, re.M)
        differing = re.findall(r"^differs: (.*)$", ops, re.M)
        passed, failed = (str(int(count[1]) - int(count[2])), count[2]) if count else ("-", str(len(differing)) if differing else "-")
        rows.append(["samples of ops against the reference kernels", passed, failed, listed(differing)])
        tests = dict(re.findall(r"^test (\S+) \.\.\. (ok|FAILED)$", text(self.folder / "parity.log"), re.M))
        failing = [test for test, result in tests.items() if result == "FAILED"]
        counts = (str(len(tests) - len(failing)), str(len(failing))) if tests else ("-", "-")
        rows.append(["tests of training against PyTorch's losses and gradients", *counts, listed(failing)])
        return ["## Correctness", "", *table(["what", "passed", "failed", "which"], rows)]

    def train(self, step: str) -> Dict[str, Any]:
        """Predicted and measured, of one run."""
        found: Dict[str, Any] = {}
        plan = read(self.folder / f"{step}.plan.json")
        if plan:
            found["predicted"] = plan["predicted"]["throughput_per_s"]
            found["planned"] = max(stage["memory"]["total"] for stage in plan["stages"])
            stages = " + ".join(f"{stage['replicas']} x {ops(stage)}" for stage in plan["stages"])
            found["plan"] = f"{plan['schedule']['kind']}, {stages} ops"
        lines = [json.loads(line) for line in text(self.folder / f"{step}.metrics.jsonl").splitlines()]
        times = [line["seconds"] for line in lines if "step" in line]
        total = next((line["total"] for line in lines if "total" in line), None)
        if total:
            # The first steps compile kernels and allocate memory. Losses are read late, those of the last steps together.
            batch = total["order"]["micro_batch"] * total["order"]["microbatches"]
            found["start"] = times[0]
            found["measured"] = batch / slope(times[2:-LATE] if len(times) > LATE + 4 else times)
            found["held"] = max(stage["peak_memory_bytes"] for stage in total["stages"])
            found["losses"] = f"{number(total['first_loss'])} to {number(total['last_loss'])}"
        before, during = (smi(self.folder / f"{step}.{when}.csv") for when in ("before", "during"))
        if during:
            found["smi"] = max(during[gpu] - before.get(gpu, 0) for gpu in during) * 2**20
        return found

    def models(self) -> List[str]:
        names = [name[: -len("-bf16")] for name in self.names("profile-*.profile.json") if name.endswith("-bf16")]
        names += [name[: -len("-fp32")] for name in self.names("profile-*.profile.json") if name.endswith("-fp32")]
        names += self.names("peers-*.json")
        speed, memory, profiles = [], [], []
        for name in dict.fromkeys(names):
            for precision in PRECISIONS:
                step = f"{name}-{precision}"
                profile = read(self.folder / f"profile-{step}.profile.json")
                run, eager, compiled = self.train(f"train-{step}"), self.peer("peers", name, precision), self.peer("compiled", name, precision)
                batch = profile["settings"]["micro_batch"] if profile else eager.get("batch")
                if profile is None and not run and not eager:
                    continue
                if profile:
                    sums = [sum(op[part] for op in profile["ops"]) for part in ("fwd_us", "bwd_us")]
                    whole = profile.get("whole") or {}
                    both = whole["fwd_us"] + whole["bwd_us"] if whole else None
                    flops = sum(op["flops"] for op in profile["ops"])
                    rate = 3 * flops / (both * 1e-6) if both else None
                    profiles.append([
                        name, precision, number(batch), number(sums[0], 1e3), number(sums[1], 1e3), number(whole.get("fwd_us"), 1e3),
                        number(whole.get("bwd_us"), 1e3), ratio(sum(sums), both), number(rate, 1e12),
                    ])
                speeds = [run.get("predicted"), run.get("measured"), eager.get("samples_per_s"), compiled.get("samples_per_s")]
                speed.append([
                    name, precision, number(batch), *map(number, speeds), ratio(speeds[1], speeds[0]), ratio(speeds[1], speeds[2]),
                    number(run.get("start")), run.get("losses", "-"),
                ])
                sizes = [run.get("planned"), run.get("held"), run.get("smi"), eager.get("peak_memory_bytes"), compiled.get("peak_memory_bytes")]
                memory.append([name, precision, *(number(size, 1e6) for size in sizes), ratio(sizes[1], sizes[0])])
        lines = ["## Training on one GPU: samples per second", ""]
        lines += table(["model", "precision", "batch", "predicted", "pipec", "PyTorch", "compiled", "pipec / predicted", "pipec / PyTorch", "first step, s", "loss"], speed)
        lines += ["## Training on one GPU: memory in MB", ""]
        lines += table(["model", "precision", "planned", "held", "nvidia-smi", "PyTorch", "compiled", "held / planned"], memory)
        lines += ["## Profiles: milliseconds", ""]
        columns = ["model", "precision", "batch", "forward, sum", "backward, sum", "forward, whole", "backward, whole", "sum / whole", "Tflop/s"]
        return lines + table(columns, profiles)

    def peer(self, step: str, name: str, precision: str) -> Dict[str, Any]:
        found = read(self.folder / f"{step}-{name}.json") or {"runs": []}
        return next((run for run in found["runs"] if run["precision"] == precision), {})

    def several(self) -> List[str]:
        rows = []
        for name in self.names("several-*.plan.json"):
            run = self.train(f"several-{name}")
            sizes = [number(run.get(of), 1e6) for of in ("planned", "held", "smi")]
            speeds = [run.get("predicted"), run.get("measured")]
            rows.append([name, run.get("plan", "-"), *map(number, speeds), ratio(speeds[1], speeds[0]), *sizes, run.get("losses", "-")])
        columns = ["run", "plan", "predicted, samples/s", "measured", "measured / predicted", "planned, MB", "held", "nvidia-smi", "loss"]
        return ["## Training on several GPUs", "", *table(columns, rows)]

    def slowest(self) -> List[str]:
        rows = []
        for name in self.names("profile-*.profile.json"):
            profile = read(self.folder / f"profile-{name}.profile.json")
            kinds: Dict[str, List[float]] = {}
            for op in profile["ops"] if profile else ():
                kind = kinds.setdefault(op["op"], [0, 0.0, 0.0, 0, 0])
                for at, value in enumerate((1, op["fwd_us"], op["bwd_us"], op["flops"], least_bytes(op))):
                    kind[at] += value
            total = sum(kind[1] + kind[2] for kind in kinds.values())
            for kind, (count, forward, backward, flops, moved) in sorted(kinds.items(), key=lambda item: -item[1][1] - item[1][2])[:6]:
                rates = [flops * 1e6 / forward, moved * 1e6 / forward] if forward else [None, None]
                times = [number(forward, 1e3), number(backward, 1e3), ratio(forward + backward, total)]
                rows.append([name, kind, number(count), *times, number(rates[0], 1e12), number(rates[1], 1e9)])
        columns = ["profile", "op", "count", "forward, ms", "backward, ms", "share", "forward, Tflop/s", "forward, GB/s"]
        return ["## Slowest types of ops", "", *table(columns, rows)]


def listed(names: List[str]) -> str:
    """The first names."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]).replace("|", "/") + more if names else "-"


def span(rates: List[float]) -> str:
    """Lowest and highest rate in GB/s."""
    if not rates:
        return "-"
    low, high = number(min(rates), 1e9), number(max(rates), 1e9)
    return low if low == high else f"{low} to {high}"


def ops(stage: Dict[str, Any]) -> int:
    return sum(end - begin for begin, end in stage["ops"])


def least_bytes(op: Dict[str, Any]) -> int:
    """An op reads at least its parameters and as much as it writes."""
    return op["param_bytes"] + 2 * op["out_bytes"]


def slope(times: List[float]) -> float:
    """Seconds of one step, by least squares, since losses arrive in groups."""
    middle, mean = (len(times) - 1) / 2, sum(times) / len(times)
    return sum((at - middle) * (time - mean) for at, time in enumerate(times)) / sum((at - middle) ** 2 for at in range(len(times)))


def smi(path: Path) -> Dict[str, float]:
    """Highest memory of each GPU in MiB."""
    found: Dict[str, float] = {}
    for line in text(path).splitlines():
        match = re.match(r"\s*(\d+)\s*,\s*(\d+)\s*$", line)
        if match:
            found[match[1]] = max(found.get(match[1], 0.0), float(match[2]))
    return found


def main() -> None:
    results = Results(Path(sys.argv[1]))
    failed = False
    for part in (results.machine, results.copies, results.products, results.correctness, results.models, results.several, results.slowest):
        try:
            print("\n".join(part()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # A file of an unknown form costs its own table only.
            print(f"No table of {part.__name__}: {error!r}\n")
            failed = True
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

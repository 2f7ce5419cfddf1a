"""Measures the links between the processes of a torchrun job. pipec runs it in each process; see torch_links.rs.

Reads {"device", "sizes", "runs"} from standard input. The process of rank 0 writes one JSON object per line:

    {"devices": name, "memory_bytes", "torch": version, "backend": name}
    {"level": 0 or 1, "count", "latency_s", "bytes_per_s"}     within a node, and between nodes
    {"row": {"level", "operation", "bytes", "us", "bytes_per_s"}}
    {"error": text, "help": text}

Every process takes part in each measurement, so the links are shared as in a training run. With n processes, an
all-reduce of w bytes takes 2 (n - 1) l + 2 (n - 1) / n w / B: the latency l follows from the smallest size, the bandwidth
B from the largest.
"""

import json
import os
import statistics
import sys
import time


def say(**line):
    print(json.dumps(line), flush=True)


def fail(error, help=""):
    say(error=error, help=help)
    sys.exit(0)


def main():
    request = json.load(sys.stdin)
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        fail(f"{sys.executable} cannot import torch: {error}", "install torch there, or name another Python with `--python`")
    local, node = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpu = request["device"] == "cuda" or (request["device"] == "auto" and torch.cuda.is_available())
    if on_gpu and not torch.cuda.is_available():
        fail("torch finds no CUDA device", "`--device cpu` measures the links between processors")
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        fail("the job has one process", "`torchrun --nproc-per-node 8` starts eight")
    if world % node:
        fail(f"{world} processes are not a multiple of the {node} of a node")
    if rank == 0:
        if on_gpu:
            properties = torch.cuda.get_device_properties(device)
            say(devices=properties.name, memory_bytes=properties.total_memory, torch=torch.__version__, backend="nccl")
        else:
            say(devices="", memory_bytes=0, torch=torch.__version__, backend="gloo")
    nodes = world // node
    within = [dist.new_group(list(range(of * node, (of + 1) * node))) for of in range(nodes)][rank // node]
    across = [dist.new_group(list(range(of, world, node))) for of in range(node)][rank % node]
    levels = [(0, node, within), (1, nodes, across)]
    for level, count, group in levels:
        if count > 1:
            measure(torch, dist, device, request, level, count, group, rank)
    dist.barrier()
    dist.destroy_process_group()


def measure(torch, dist, device, request, level, count, group, rank):
    ranks = dist.get_process_group_ranks(group)
    own = ranks.index(rank)

    def median(call):
        times = []
        for run in range(request["runs"] + 2):
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if run >= 2:
                times.append(time.perf_counter() - begin)
        # The slowest process counts.
        worst = torch.tensor([statistics.median(times)], dtype=torch.float64)
        worst = worst.to(device) if device.type == "cuda" else worst
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.item()

    def send(values, received):
        # A ring: everyone sends and receives.
        to, source = ranks[(own + 1) % count], ranks[(own - 1) % count]
        works = [dist.isend(values, to), dist.irecv(received, source)]
        for work in works:
            work.wait()

    shares = {"all-reduce": 2 * (count - 1) / count, "all-gather": (count - 1) / count, "reduce-scatter": (count - 1) / count, "send/recv": 1.0}
    reduced = {}
    for size in request["sizes"]:
        elements = max(size // 4 // count, 1) * count
        whole = torch.ones(elements, device=device)
        part = torch.ones(elements // count, device=device)
        parts = list(torch.empty(elements, device=device).chunk(count))
        calls = {
            "all-reduce": lambda: dist.all_reduce(whole, group=group),
            "all-gather": lambda: dist.all_gather(parts, part, group=group),
            "send/recv": lambda: send(whole, torch.empty_like(whole)),
        }
        if device.type == "cuda":
            calls["reduce-scatter"] = lambda: dist.reduce_scatter(part, list(whole.chunk(count)), group=group)
        for name, call in calls.items():
            seconds = median(call)
            if name == "all-reduce":
                reduced[size] = seconds
            if rank == 0:
                rate = shares[name] * elements * 4 / seconds
                say(row={"level": level, "operation": name, "bytes": elements * 4, "us": seconds * 1e6, "bytes_per_s": rate})
    if rank == 0:
        smallest, largest = min(reduced), max(reduced)
        latency = reduced[smallest] / (2 * (count - 1))
        spent = max(reduced[largest] - reduced[smallest], 1e-9)
        say(level=level, count=count, latency_s=latency, bytes_per_s=shares["all-reduce"] * (largest - smallest) / spent)


if __name__ == "__main__":
    main()

"""Counts the kernel launches of a training step of gpu_peers.py on an H100 in bf16. It needs no GPU, but a C compiler.

    python launches.py --model gpt2
    python launches.py --model resnet50 --batch 16 --optimizer sgd-momentum --code resnet50.txt
    python launches.py --model gpt2 --eager

The model is compiled on fake tensors of a pretended H100. The code that Inductor generates is not run: its calls are
counted. gpu_peers.py does not compile the loss and the optimizer: their operators are counted as torch dispatches them.
The second step is counted: the first one makes the state of the optimizer.

A library call counts as one launch, except those in `LAUNCHES`. Some make more, which is not known without a GPU: split-K
of cuBLAS, layout changes and zeros of cuDNN. The totals are thus lower bounds. Copies by the driver are not counted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any, Counter, Dict, Iterator, List, Sequence, Tuple

# If torch is built for CUDA, its engine of autograd asks the driver for streams. These answers say that there is no
# accelerator. They are functions of C++.
SHIM = """
short _ZN2at11accelerator14getAcceleratorEb(_Bool checked) { return 0; }
_Bool _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char type) { return 0; }
"""


def restart() -> None:
    """Runs this program again with the shim."""
    folder = tempfile.mkdtemp()
    try:
        source, library = os.path.join(folder, "shim.c"), os.path.join(folder, "shim.so")
        with open(source, "w") as file:
            file.write(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": library}).returncode)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__" and not hasattr(ctypes.CDLL(None), "_ZN2at11accelerator14getAcceleratorEb"):
    restart()

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

DEVICE = "cuda:0"

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, total_memory=80 << 30, L2_cache_size=50 << 20,
)


def pretend() -> None:
    """Makes torch and Triton see an H100."""
    torch._C._ensureCUDADeviceGuardSet()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda device=None: H100
    cuda.get_device_capability = lambda device=None: (H100.major, H100.minor)
    cuda.get_device_name = lambda device=None: H100.name
    cuda.is_bf16_supported = lambda *arguments, **named: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda *arguments, **named: None
    cuda._lazy_init = lambda: None
    # Dynamo keeps a table by function: these must be two.
    cuda._exchange_device = lambda device: 0
    cuda._maybe_exchange_device = lambda device: 0
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size),
            get_current_device=lambda: 0,
            utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": H100.shared_memory_per_block_optin}),
        )
    )


# Before the imports of Inductor, which keeps some of these functions.
pretend()

import torch._inductor.config as inductor
import torch._inductor.fx_passes.fuse_attention as fusion
import torch._inductor.fx_passes.joint_graph as joint
import torch._inductor.fx_passes.pad_mm as padding
import torch.nn.functional as F
from torch import nn
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_peers

LAUNCHES = {
    # With dropout a kernel first gives cuDNN the seed.
    "_scaled_dot_product_cudnn_attention": 2,
    # The product of the gradient with the output, the gradients, and the conversion of that of the queries.
    "_scaled_dot_product_cudnn_attention_backward": 3,
    "_scaled_dot_product_flash_attention_backward": 3,
    # The gradient of the input, and those of the parameters.
    "native_layer_norm_backward": 2,
    # Zeros, and the values.
    "nll_loss_backward": 2,
    "max_pool2d_with_indices_backward": 2,
    # Sort of the indices, segments, and sums: about this number.
    "embedding_dense_backward": 4,
}

# Operators that launch nothing.
FREE = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "lift_fresh", "new_empty", "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view",
}

# Limits of a launch over lists of tensors, by the number of lists: tensors, the same with a list of scalars, and blocks.
# See MultiTensorApply.cuh.
LIMITS = (
    ([770, 448, 336, 252, 210], [672, 448, 336, 252, 210], 2240)
    if int((torch.version.cuda or "0").split(".")[0]) >= 13
    else ([110, 64, 48, 36, 30], [96, 64, 48, 36, 30], 320)
)
CHUNK = 65536


def calls(code: str) -> Iterator[Tuple[str, str, int]]:
    """The kind, name and number of launches of each call in code of Inductor."""
    for line in code[code.index("def call("):].splitlines():
        if line.startswith("def get_args"):
            return
        if match := re.search(r"\b(triton_\w+)\.run\(", line):
            yield "triton", match[1], 1
        elif match := re.search(r"\b(?:extern_kernels|aten)\.(\w+)(?:\.\w+)*\(", line):
            launches = LAUNCHES.get(match[1], 1)
            if match[1] == "convolution_backward":
                mask = re.search(r"\[(True|False), (True|False), (True|False)\]", line)
                launches = mask[0].count("True") if mask else 2
            yield "library", match[1], launches


def of_lists(sizes: Sequence[int], lists: int, has_scalars: bool) -> int:
    """Launches of an operator over lists of tensors."""
    tensor_limit, block_limit = (LIMITS[1] if has_scalars else LIMITS[0])[lists - 1], LIMITS[2]
    launches = tensors = blocks = 0
    for size in sizes:
        tensors += 1
        chunks = -(-size // CHUNK)
        for at in range(chunks):
            blocks += 1
            is_last = at == chunks - 1
            if (tensors == tensor_limit and is_last) or blocks == block_limit:
                launches += 1
                blocks, tensors = 0, 0 if is_last else 1
    return launches + (blocks > 0)


class Watch(TorchDispatchMode):
    """Counts the launches of operators by phase and name."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.found: Dict[str, Counter[str]] = collections.defaultdict(collections.Counter)

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = operator._schema.name.split("::")[1]
        # Some fused optimizers have no form for fake tensors. They return nothing.
        out = None if name.startswith("_fused_") else operator(*arguments, **(named or {}))
        if name not in FREE and (count := self.launches(name, operator._overloadname, [*arguments, *(named or {}).values()], out)):
            self.found[self.phase][name] += count
        return out

    @staticmethod
    def launches(name: str, overload: str, arguments: List[Any], out: Any) -> int:
        if name.startswith(("_foreach_", "_fused_")):
            lists = [one for one in arguments if isinstance(one, (list, tuple)) and one and isinstance(one[0], torch.Tensor)]
            # The numbers of steps are on the CPU with foreach, and one more list with fused.
            if lists[0][0].device.type == "cpu":
                return 0
            depth = len(lists) - (name == "_fused_adamw_") + (not name.endswith("_"))
            return of_lists([tensor.numel() for tensor in lists[0]], depth, overload == "ScalarList")
        outs = out if isinstance(out, (list, tuple)) else [out]
        if all(one.device.type == "cpu" for one in outs if isinstance(one, torch.Tensor)):
            return 0
        if name == "convolution":
            return 1 + (arguments[2] is not None)
        if name == "convolution_backward":
            return sum(arguments[-1])
        return LAUNCHES.get(name, 1)


def keep_code(codes: List[str]) -> None:
    """Makes Inductor keep its code. A compiled function gives new tensors."""

    def kept(self: GraphLowering, wrapper: Any) -> Any:
        codes.append(wrapper.value)
        outputs: List[Any] = []
        for node in self.graph_outputs:
            if isinstance(node, ir.NoneAsConstantBuffer):
                outputs.append(None)
            elif isinstance(node, ir.ShapeAsConstantBuffer):
                outputs.append(int(node.expr))
            else:
                outputs.append(([int(n) for n in node.get_size()], [int(n) for n in node.get_stride()], node.get_dtype(), node.get_device()))

        def call(arguments: List[Any]) -> Tuple[Any, ...]:
            arguments.clear()
            return tuple(torch.empty_strided(o[0], o[1], dtype=o[2], device=o[3]) if isinstance(o, tuple) else o for o in outputs)

        return SimpleNamespace(call=call, __file__=os.devnull)

    lowering: Any = GraphLowering
    lowering._compile_to_module_lines = kept


def fold_on_cpu() -> None:
    """Makes Inductor fold constants on the CPU: it runs their operators."""
    folder: Any = joint.UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduced(self: Any, node: torch.fx.Node) -> Any:
        named = node.kwargs
        if "device" in named:
            node.kwargs = {**named, "device": torch.device("cpu")}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = named

    folder._deduce_value = deduced


def attention(library: torch.library.Library, name: str) -> None:
    """Chooses the implementation of attention; torch would ask the driver."""
    aten = torch.ops.aten

    def chosen(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **named: Any) -> Any:
        if name == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, is_causal)[0]

    library.impl("scaled_dot_product_attention", chosen, "CompositeImplicitAutograd", allow_override=True)


def layout(tensor: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """The layout of the output of a convolution of cuDNN."""
    is_last = any(one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous() for one in (tensor, weight))
    return torch.channels_last if is_last else torch.contiguous_format


def answer(pad: bool) -> None:
    """Answers the other questions of torch to the driver."""
    inner: Any = torch._C
    inner._conv_determine_backend_memory_format = layout
    # Padding of products is measured.
    padder: Any = padding
    padder._should_pad = lambda *arguments, **named: pad
    # These patterns are made with a tensor on the GPU. They are of attention in separate operators, which no model has.
    patterns: Any = fusion
    patterns._sfdp_init = lambda device=None: None
    # The number of steps, of which a fake tensor has no value.
    sys.modules["torch.optim.adam"].__dict__["_get_value"] = lambda value: 1.0
    torch.autograd.set_multithreading_enabled(False)


def moved(model: nn.Module) -> None:
    """Moves a model of fake tensors, which `Module.to` cannot."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, device=DEVICE))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)


def counted(arguments: argparse.Namespace) -> Dict[str, Any]:
    codes: List[str] = []
    keep_code(codes)
    fold_on_cpu()
    library = torch.library.Library("aten", "IMPL")
    attention(library, arguments.attention)
    answer(arguments.pad)
    inductor.force_disable_caches = True
    inductor.compile_threads = 1
    watch = Watch()
    with FakeTensorMode():
        model: Any
        model, inputs, target = gpu_peers.made(arguments.model, arguments.batch)
        if arguments.layers:
            model.blocks = model.blocks[:arguments.layers]
        moved(model.train())
        inputs, target = [tensor.to(DEVICE) for tensor in inputs], target.to(DEVICE)
        rules = {}
        for way in ("foreach", "fused"):
            rules[way] = gpu_peers.optimizer(arguments.optimizer, model, 1e-4)
            rules[way].param_groups[0].update(foreach=way == "foreach", fused=way == "fused")
        called = model if arguments.eager else torch.compile(model)
        autocast = torch.autocast("cuda", dtype=torch.bfloat16)
        for _ in range(2):
            watch.found.clear()
            model.zero_grad(set_to_none=True)
            watch.phase = "forward"
            # Dynamo compiles nothing under a mode.
            with autocast, watch if arguments.eager else contextlib.nullcontext():
                logits = called(*inputs)
            with watch:
                watch.phase = "loss"
                with autocast:
                    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
                watch.phase = "backward"
                loss.backward()
                for way, rule in rules.items():
                    watch.phase = way
                    rule.step()
    if arguments.code:
        with open(arguments.code, "w") as file:
            file.write("\n".join(codes))
    if not arguments.eager and len(codes) != 2:
        raise SystemExit(f"{len(codes)} graphs in place of 2")
    return summary(arguments, codes, watch.found)


def summary(arguments: argparse.Namespace, codes: List[str], found: Dict[str, Counter[str]]) -> Dict[str, Any]:
    compiled: Dict[str, Any] = {}
    total = 0
    for phase, code in zip(("forward", "backward"), codes):
        kinds: Dict[str, Counter[str]] = {"triton": collections.Counter(), "library": collections.Counter()}
        for kind, name, launches in calls(code):
            # The names of Inductor end with a number.
            kinds[kind][re.sub(r"_\d+$", "", name) if kind == "triton" else name] += launches
        compiled[phase] = {kind: {"launches": sum(names.values()), "names": names} for kind, names in kinds.items()}
        total += sum(names.total() for names in kinds.values())
    eager = {phase: {"launches": names.total(), "names": names} for phase, names in found.items()}
    total += sum(names.total() for phase, names in found.items() if phase not in ("foreach", "fused"))
    return {
        "model": arguments.model,
        "batch": arguments.batch,
        "compiled": compiled,
        "eager": eager,
        "total_foreach": total + found["foreach"].total(),
        "total_fused": total + found["fused"].total(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, help="only the first blocks of a transformer")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--attention", default="cudnn", choices=["cudnn", "flash"], help="torch takes cuDNN on an H100, from version 9.15.1")
    parser.add_argument("--pad", action="store_true", help="Inductor pads the matrices whose sizes are not multiples of 8; it measures whether to")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--code", help="a file for the code of Inductor")
    print(json.dumps(counted(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()

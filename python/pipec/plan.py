"""A plan: the stages of a model, the schedule, and the predicted time and memory.

`pipec.partition` makes a plan, `Plan.load` reads one that `Plan.save` or `pipec partition` wrote.
"""

from __future__ import annotations

import html
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from .binary import run, run_text
from .errors import CheckError, InputError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import SplitPoint

    from .pipeline import Pipeline


@dataclass(frozen=True)
class Stage:
    """A stage of a plan. Times are microseconds of one micro-batch on one replica, memory is bytes per device."""

    index: int
    modules: Tuple[str, ...]
    """Module paths, such as `model.layers.0.mlp`, in order of first use."""
    node_names: Tuple[str, ...]
    """Names of the nodes of the exported graph, one per op: a node may be several ops."""
    replicas: int
    devices: Tuple[int, ...]
    """Device numbers, replica by replica."""
    forward_us: float
    backward_us: float
    """Includes recomputation and the optimizer step."""
    memory_bytes: int
    recompute: bool
    """True if activations are recomputed in the backward instead of saved."""
    tensor_degree: int
    zero: int
    """ZeRO stage, 0 to 3."""
    shard_degree: int
    """Number of replicas that shard together; 0 for all."""


@dataclass(frozen=True)
class Prediction:
    """Predicted performance. Times are microseconds."""

    minibatch_us: float
    """Time of one minibatch: under a schedule with a flush, of one optimizer step."""
    samples_per_s: float
    mfu: Optional[float]
    """Model flops utilisation, 0 to 1; None if the device has no data sheet."""
    lower_bound_us: float
    """No plan is faster under the cost model and the constraints."""


@dataclass(frozen=True)
class Schedule:
    """The pipeline schedule of a plan."""

    name: str
    micro_batch: int
    """Samples per micro-batch."""
    microbatches: int
    """Micro-batches per minibatch, over all replicas."""
    chunks: int
    """Stages per rank."""


class Report:
    """The HTML report of a plan. Notebooks display it."""

    def __init__(self, text: str) -> None:
        self.html = text

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the page to a file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        # A frame of its own keeps the styles of the page and of the notebook apart.
        return f'<iframe srcdoc="{html.escape(self.html)}" width="100%" height="720" style="border:0"></iframe>'


class Plan:
    """A plan. `json` is the content of the plan file; `pipec schema plan` prints its schema."""

    def __init__(self, json: Mapping[str, Any], model: Any = None) -> None:
        self.json: Dict[str, Any] = dict(json)
        self._model = model
        self._example: Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]] = None
        try:
            self.stages: List[Stage] = [read_stage(stage) for stage in self.json["stages"]]
            self.schedule = Schedule(
                name=self.json["schedule"]["kind"],
                micro_batch=self.json["schedule"]["micro_batch"],
                microbatches=self.json["schedule"]["microbatches"],
                chunks=self.json["schedule"]["chunks"],
            )
            self.predicted = Prediction(
                minibatch_us=self.json["predicted"]["minibatch_us"],
                samples_per_s=self.json["predicted"]["throughput_per_s"],
                mfu=utilisation(self.json),
                lower_bound_us=self.json["lower_bound_us"],
            )
        except (KeyError, TypeError) as fault:
            raise InputError(f"this is not a plan: {fault} is missing", "`pipec.partition` and `pipec partition` write plans") from None

    @property
    def memory(self) -> Dict[int, int]:
        """Peak memory in bytes of every device that has a stage."""
        found: Dict[int, int] = {}
        for stage in self.stages:
            for device in stage.devices:
                found[device] = found.get(device, 0) + stage.memory_bytes
        return found

    @property
    def ranks(self) -> int:
        """Number of processes that `build` needs: one per device with a stage."""
        return len(self.memory)

    @classmethod
    def load(cls, path: Union[str, "os.PathLike[str]"], model: Any = None) -> Plan:
        """Reads a plan file. `model` is the module, ExportedProgram or .pt2 file that `build` uses by default."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls(json.loads(text), model)
        except OSError as fault:
            raise InputError(f"cannot read {os.fspath(path)}: {fault.strerror}") from None
        except ValueError as fault:
            raise InputError(f"{os.fspath(path)} is not JSON: {fault}") from None

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the plan file, which every `pipec` command reads."""
        Path(path).write_text(json.dumps(self.json, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """The stage table and the prediction, as `pipec plan show` prints them."""
        with tempfile.TemporaryDirectory() as folder:
            return run_text(["plan", "show", self._file(folder)], cwd=folder).rstrip()

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.stages)} stages, {self.ranks} devices, schedule {self.schedule.name}, "
            f"{self.schedule.microbatches} x {self.schedule.micro_batch} samples per minibatch, {self.predicted.samples_per_s:,.0f} samples/s)"
        )

    def report(self) -> Report:
        """The report of `pipec report`: stages, timeline, memory and costs."""
        with tempfile.TemporaryDirectory() as folder:
            run(["report", self._file(folder), "--html", "report.html", *self._model_option()], cwd=folder)
            return Report(Path(folder, "report.html").read_text(encoding="utf-8"))

    def torchtitan(self) -> str:
        """Command-line arguments of torchtitan. `pipec export` also writes `torchtitan.toml`, and the schedule table if they need one."""
        return self.export("torchtitan")["torchtitan.args"]

    def megatron(self) -> str:
        """Command-line arguments of Megatron-LM."""
        return only(self.export("megatron"))

    def deepspeed(self) -> str:
        """DeepSpeed's `parts` and configuration, as JSON."""
        return only(self.export("deepspeed"))

    def export(self, target: str) -> Dict[str, str]:
        """The text files that `pipec export --to TARGET` writes, by name. Raises CheckError if the target cannot run the plan."""
        with tempfile.TemporaryDirectory() as folder:
            run_text(["export", self._file(folder), "--to", target, "-o", "out/", *self._model_option(), "-q"], cwd=folder)
            return {file.name: file.read_text(encoding="utf-8") for file in sorted(Path(folder, "out").iterdir())}

    def split_spec(self) -> Dict[str, SplitPoint]:
        """The `split_spec` of `torch.distributed.pipelining.pipeline`: modules that begin a stage.

        Raises CheckError if a stage begins inside a module. `partition(..., target="torchtitan")` cuts between layers only.
        """
        from .exporting import need_torch

        need_torch("Plan.split_spec")
        from torch.distributed.pipelining import SplitPoint

        return {name: SplitPoint.BEGINNING for name in first_modules(self.stages)}

    def build(
        self,
        model: Any = None,
        group: Union[DeviceMesh, torch.distributed.ProcessGroup, None] = None,
        *,
        example_args: Optional[Sequence[Any]] = None,
        example_kwargs: Optional[Mapping[str, Any]] = None,
        loss_fn: Optional[Callable[..., torch.Tensor]] = None,
        device: Union[str, torch.device, None] = None,
        autocast: Optional[torch.dtype] = None,
    ) -> Pipeline:
        """The part of this process: its stages, and the schedule to call `.step(...)` on.

        Call it in every process, after `torch.distributed.init_process_group`. It needs `ranks` processes.

        model: module, ExportedProgram or .pt2 file. Default: the model that was planned. The pipeline trains the module's own
            parameters: those of this rank's stages change, the others do not. For parameters on the meta device, the pipeline has
            its own, without values until `Pipeline.load_state_dict`.
        group: DeviceMesh (1-D, or 2-D with replicas first) or process group. Default: all processes.
        example_args, example_kwargs: inputs of the model, to export a module. Default: those given to `partition`.
        loss_fn: `loss_fn(output, target)` returns the mean loss of a micro-batch. `output` is what the model returns.
            Default: the model returns the loss, alone, first in a tuple, or as `output.loss`.
        device: device of this process. Default: `cuda:LOCAL_RANK` with the nccl backend, `cpu` with others.
        autocast: run the stages and the loss under `torch.autocast` with this type. bf16 plans are predictions for `torch.bfloat16`.
        """
        from .exporting import need_torch

        need_torch("Plan.build")
        from .pipeline import build

        model = self._model if model is None else model
        if example_args is None and example_kwargs is None and self._example is not None:
            example_args, example_kwargs = self._example
        return build(self, model, group, example_args, example_kwargs, loss_fn, device, autocast)

    def _file(self, folder: str) -> str:
        """Writes the plan into a folder, for a command."""
        self.save(os.path.join(folder, "plan.json"))
        return "plan.json"

    def _model_option(self) -> List[str]:
        """`--model FILE`, if the planned model is a file."""
        file = self._model if isinstance(self._model, (str, os.PathLike)) else None
        return ["--model", os.path.abspath(file)] if file is not None and os.path.exists(file) else []


def read_stage(stage: Mapping[str, Any]) -> Stage:
    """A stage from its JSON."""
    return Stage(
        index=stage["id"],
        modules=tuple(stage["modules"]),
        node_names=tuple(stage["op_names"]),
        replicas=stage["replicas"],
        devices=tuple(stage["devices"]),
        forward_us=stage["fwd_us"],
        backward_us=stage["bwd_us"],
        memory_bytes=stage["memory"]["total"],
        recompute=stage["recompute"],
        tensor_degree=stage.get("tensor_degree") or 1,
        zero=stage.get("zero", 0),
        shard_degree=stage.get("shard_degree", 0),
    )


def utilisation(plan: Mapping[str, Any]) -> Optional[float]:
    """Model flops utilisation: flops per second and device, divided by the peak of the precision."""
    device, predicted, schedule = plan["cluster"]["device"], plan["predicted"], plan["schedule"]
    precision = (plan.get("element_types") or {}).get("precision", plan["dtype"])
    peaks = device.get("peak_flops") or {}
    peak = peaks.get(precision, peaks.get(plan["dtype"]))
    used = {device for stage in plan["stages"] for device in stage["devices"]}
    rate = predicted["throughput_per_s"] / (schedule["micro_batch"] * schedule["microbatches"])
    if not peak or device.get("multiprocessors") is None or plan["cluster"].get("classes") or not predicted.get("flops"):
        return None
    return float(predicted["flops"] * rate / len(used) / peak)


def first_modules(stages: Sequence[Stage]) -> List[str]:
    """The outermost module that begins each stage but the first. No op of an earlier stage may be in it."""
    found = []
    for stage in stages[1:]:
        earlier = [name for before in stages[: stage.index] for name in before.modules]
        first = stage.modules[0] if stage.modules else ""
        parts = first.split(".") if first else []
        paths = [".".join(parts[: count + 1]) for count in range(len(parts))]
        whole = [path for path in paths if not any(name == path or name.startswith(path + ".") for name in earlier)]
        if not whole:
            where = f"inside module `{first}`" if first else "at an op that belongs to no module"
            raise CheckError(
                f"stage {stage.index} begins {where}, and `split_spec` can only split between modules",
                '`pipec.partition(..., target="torchtitan")` cuts between layers; `Plan.build` runs any cut',
            )
        found.append(whole[0])
    return found


def only(files: Mapping[str, str]) -> str:
    """The content of the only file."""
    (text,) = files.values()
    return text

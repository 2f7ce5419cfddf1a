"""`partition` and `profile`: they export the model, if it is a module, and run the command of the same name."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from .binary import run
from .errors import InputError, fixed_batch
from .plan import Plan

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

Model = Union["torch.nn.Module", "ExportedProgram", str, "os.PathLike[str]"]


class Profile:
    """Costs of every op of a model. `json` is the content of the profile file."""

    def __init__(self, json: Mapping[str, Any]) -> None:
        self.json: Dict[str, Any] = dict(json)

    @classmethod
    def load(cls, path: Union[str, os.PathLike[str]]) -> Profile:
        """Reads a file of `Profile.save` or `pipec profile`."""
        try:
            return cls(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as fault:
            raise InputError(f"cannot read the profile {os.fspath(path)}: {fault}") from None

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes the profile file."""
        Path(path).write_text(json.dumps(self.json, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def partition(
    model: Model,
    example_args: Sequence[Any] = (),
    example_kwargs: Optional[Mapping[str, Any]] = None,
    *,
    gpus: Optional[int] = 8,
    batch: Optional[int] = 256,
    profile: Union[Profile, str, os.PathLike[str], None] = None,
    levels: Union[str, Sequence[Tuple[int, str]], None] = None,
    device: Optional[str] = None,
    target: Optional[str] = None,
    precision: Optional[str] = None,
    optimizer: str = "adamw",
    memory: Union[str, int, None] = None,
    schedule: Optional[str] = None,
    stages: Optional[Sequence[int]] = None,
    micro_batch: Optional[int] = None,
    microbatches: Optional[int] = None,
    extra: Sequence[str] = (),
) -> Plan:
    """Partitions a model into pipeline stages over the devices of a cluster: `pipec partition`.

    model: an nn.Module, which is exported in its current mode (train or eval) for any batch size; an ExportedProgram; or the path
        of a .pt2 or .onnx file. Parameters of a module may be on the meta device.
    example_args, example_kwargs: inputs of a module, with the batch on axis 0 of every tensor. Their batch size does not matter.
    gpus: number of devices, connected by one link. Not used with `levels`.
    batch: samples of one optimizer step. Micro-batches, ZeRO stage and schedule become part of the search, unless given.
        None plans one micro-batch per step, or `microbatches`.
    profile: costs, from `pipec.profile` or a file; "analytic:h100" is the data sheet of a device.
    levels: interconnect, innermost first: "8:450GB/s,2:50GB/s" or [(8, "450GB/s"), (2, "50GB/s")].
    device: device type of analytic costs, such as "h100", "a100" or "cpu".
    target: framework that runs the plan: "torch" (default for a module or program, so that `Plan.build` accepts the plan),
        "torchtitan", "megatron", "deepspeed", or "any" for no limits (default for files).
    precision: "fp32", "tf32", "bf16", "fp16" or "fp64". Default: bf16 on devices with bf16 tensor cores.
    optimizer: "adamw", "adam", "sgd", "sgd-momentum", "rmsprop", "rmsprop-momentum" or "adagrad".
    memory: limit per device, such as "16GB", or in bytes.
    schedule: "1f1b", "gpipe", "interleaved", "zb-h1", "zbv", ... Default: searched.
    stages: replicas of each stage, such as [2, 1, 1]. Default: searched.
    micro_batch: samples per micro-batch. microbatches: micro-batches per step. Default: searched.
    extra: more options of `pipec partition`, such as ["--time-limit", "60s"].

    Raises InputError, InfeasibleError if no plan fits, and ExportError if torch.export cannot export the module.
    """
    is_file = isinstance(model, (str, os.PathLike))
    target = target or ("any" if is_file else "torch")
    with tempfile.TemporaryDirectory() as folder:
        file, micro_batch = file_of(model, example_args, example_kwargs, folder, micro_batch, target)
        command = ["partition", file, "-o", "-", "--optimizer", optimizer]
        has_devices = levels is not None or any(word.split("=")[0] in ("--levels", "--cluster", "--gpus") for word in extra)
        command += option("--gpus", None if has_devices else gpus)
        command += option("--levels", levels_text(levels))
        command += option("--batch", batch)
        command += option("--profile", profile_file(profile, device, folder))
        command += option("--target", None if target == "any" else target)
        command += option("--precision", precision)
        command += option("--memory", f"{memory}B" if isinstance(memory, int) else memory)
        command += option("--schedule", schedule)
        command += option("--stages", None if stages is None else ",".join(map(str, stages)))
        command += option("--micro-batch", micro_batch)
        command += option("--microbatches", microbatches)
        plan = Plan(json.loads(run_on(model, [*command, *extra], folder)), model)
    if not is_file:
        plan._example = (tuple(example_args), dict(example_kwargs or {}))
    return plan


def profile(
    model: Model,
    example_args: Sequence[Any] = (),
    example_kwargs: Optional[Mapping[str, Any]] = None,
    *,
    device: Optional[str] = None,
    engine: Optional[str] = None,
    micro_batch: Optional[int] = None,
    precision: Optional[str] = None,
    runs: Optional[int] = None,
    workers: Optional[int] = None,
    extra: Sequence[str] = (),
) -> Profile:
    """Measures the cost of every op of a model: `pipec profile`. Pass the result to `partition(..., profile=...)`.

    model, example_args, example_kwargs: as for `partition`.
    device: "cpu" (default) measures on one core of this machine, "analytic:h100" computes costs from a data sheet.
    engine: "torch" measures with PyTorch instead of pipec's own kernels, if the installed `pipec` supports it.
    micro_batch: samples per micro-batch. precision: as for `partition`. runs: measured runs of each kernel.
    workers: number of CPU workers that run the model at the same time (default 1), for a plan of that many.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, micro_batch = file_of(model, example_args, example_kwargs, folder, micro_batch, "any")
        command = ["profile", file, "-o", "-"]
        command += option("--device", device) + option("--engine", engine) + option("--micro-batch", micro_batch)
        if engine == "torch" and "--python" not in extra:
            command += ["--python", sys.executable]
        command += option("--precision", precision) + option("--runs", runs) + option("--workers", workers)
        try:
            return Profile(json.loads(run_on(model, [*command, *extra], folder)))
        except InputError as fault:
            if engine is not None and "'--engine'" in fault.message:
                raise InputError(f"the installed `pipec` has no engine {engine!r}", "`pip install --upgrade pipec`") from None
            raise


def option(flag: str, value: object) -> List[str]:
    """A flag with its value, if there is one."""
    return [] if value is None else [flag, str(value)]


def run_on(model: Model, command: Sequence[str], folder: str) -> str:
    """Runs a command on the model of `file_of`."""
    if isinstance(model, (str, os.PathLike)):
        return run(command)
    # The file has no values on purpose, and `warn_of_fixed_batch` has told of a fixed batch size.
    return run(command, cwd=folder, ignore=("it can be planned but not trained", "the batch keeps the exported size"))


def file_of(
    model: Model,
    args: Sequence[Any],
    kwargs: Optional[Mapping[str, Any]],
    folder: str,
    micro_batch: Optional[int],
    target: str,
) -> Tuple[str, Optional[int]]:
    """The file of a model, written into `folder` if it has none, and the micro-batch size to plan with."""
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        if path.endswith(".pt2") and target == "torch":
            found = json.loads(run(["inspect", path, "-q"]))
            rows, inputs = found["batch_in_file"], found["inputs"]
            if rows is not None:
                return path, only_size(rows, inputs[0]["name"] if inputs else "input", micro_batch)
        return path, micro_batch
    from .exporting import need_torch

    need_torch("planning a module")
    import torch
    from torch.export import ExportedProgram

    from .exporting import as_exported, export_module, save_without_values, warn_of_fixed_batch

    if isinstance(model, ExportedProgram):
        exported = as_exported(model)
        if target == "torch" and exported.fixed_batch is not None:
            micro_batch = only_size(exported.fixed_batch, exported.input, micro_batch)
    elif isinstance(model, torch.nn.Module):
        exported = export_module(model, args, kwargs, micro_batch)
        if exported.fixed_batch is not None:
            warn_of_fixed_batch(exported)
            micro_batch = exported.fixed_batch
    else:
        raise InputError(f"model is a {type(model).__name__}", "pass an nn.Module, an ExportedProgram, or the path of a .pt2 or .onnx file")
    name = "model.pt2" if isinstance(model, ExportedProgram) else f"{type(model).__name__}.pt2"
    save_without_values(exported.program, os.path.join(folder, name))
    return name, micro_batch


def only_size(rows: int, name: str, micro_batch: Optional[int]) -> int:
    """The micro-batch size of a program that only runs with `rows` rows. Raises InputError if another is asked for."""
    if micro_batch not in (None, rows):
        raise fixed_batch(rows, name, micro_batch)
    return rows


def levels_text(levels: Union[str, Sequence[Tuple[int, str]], None]) -> Optional[str]:
    """The argument of `--levels`."""
    if levels is None or isinstance(levels, str):
        return levels
    return ",".join(f"{count}:{rate}" for count, rate in levels)


def profile_file(profile: Union[Profile, str, os.PathLike[str], None], device: Optional[str], folder: str) -> Optional[str]:
    """The argument of `--profile`."""
    if profile is not None and device is not None:
        raise InputError("profile and device exclude each other", "a profile has measured costs of a device; `device` selects a data sheet")
    if isinstance(profile, Profile):
        profile.save(os.path.join(folder, "profile.json"))
        return os.path.join(folder, "profile.json")
    if profile is None:
        return None if device is None else f"analytic:{device}"
    return os.fspath(profile) if str(profile).startswith("analytic") else os.path.abspath(profile)

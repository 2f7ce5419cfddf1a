"""Exports a module with torch.export, with any batch size where the model allows it."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from .errors import ExportError, InputError, MissingDependencyError, warn

if importlib.util.find_spec("torch") is not None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.export import ExportedProgram
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils import _pytree as pytree


EXAMPLE_ROWS = 7
"""Rows of the example of an export for any batch size: seldom the size of another dimension, or a factor of it."""


@dataclass
class Exported:
    """An exported module."""

    program: ExportedProgram
    example: Tuple[Tuple[Any, ...], Dict[str, Any]]
    """Arguments and keyword arguments."""
    fixed_batch: Optional[int]
    """The only batch size it runs with; None if any does."""
    input: str
    """Name of the input that has the batch dimension."""


def need_torch(what: str) -> None:
    """Raises MissingDependencyError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            f"{what} needs torch, which is not installed", "`pip install torch`; plans of .pt2 and .onnx files do not need it"
        )


def export_module(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Optional[Mapping[str, Any]] = None, micro_batch: Optional[int] = None
) -> Exported:
    """Exports a module with a dynamic batch dimension: axis 0 of every tensor input.

    If the model fixes the batch size, it is exported with `micro_batch` rows, or with those of the example. The program shares
    parameters and buffers with the module. Raises ExportError.
    """
    example = check_example(args, kwargs)
    traced = with_parameters(model)
    reason: Optional[Exception] = None
    with without_cache(traced), quiet():
        try:
            exported = as_exported(dynamic(traced, resized(example, EXAMPLE_ROWS)), example)
            if exported.fixed_batch is None:
                return with_values_of(model, exported)
        except Exception as fault:
            reason = fault
            if is_data_dependent(fault):
                raise not_exportable(model, fault) from None
        try:
            example = resized(example, micro_batch or batch_of(example))
            exported = as_exported(torch.export.export(traced, *example, strict=False), example)
        except Exception as fault:
            raise not_exportable(model, fault if micro_batch or reason is None else reason) from None
    return with_values_of(model, exported)


def with_parameters(model: torch.nn.Module) -> torch.nn.Module:
    """The module, or a copy with fake parameters in place of those on the meta device, so that inputs may be on the CPU."""
    if not any(value.is_meta for value in [*model.parameters(), *model.buffers()]):
        return model
    traced = copy.deepcopy(model)
    made: Dict[int, torch.Tensor] = {}
    held: List[torch.Tensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), export=True):
        for module in traced.modules():
            for name, value in [*module._parameters.items(), *module._buffers.items()]:
                if value is not None and value.is_meta:
                    held.append(value)
                    if id(value) not in made:
                        fake = torch.empty_like(value, device="cpu")
                        made[id(value)] = torch.nn.Parameter(fake, value.requires_grad) if isinstance(value, torch.nn.Parameter) else fake
                    setattr(module, name, made[id(value)])
    return traced


def with_values_of(model: torch.nn.Module, exported: Exported) -> Exported:
    """The exported copy of `with_parameters`, with the parameters and buffers of the module itself."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for held in (exported.program._state_dict, exported.program._constants):
        for name in held:
            if name in own:
                held[name] = own[name]
            elif isinstance(held[name], FakeTensor):
                raise ExportError(
                    f"the module is on the meta device, and its constant `{name}` has no value", "register the constant as a buffer"
                )
    return exported


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's log of guards and fake tensors, and without the graphs that it prints when an export fails."""
    said = io.StringIO()
    logs = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(said):
            yield
        sys.stderr.write(said.getvalue())
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)


def check_example(args: Sequence[Any], kwargs: Optional[Mapping[str, Any]]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """The example inputs with a tensor of its own per input, as torch.export merges inputs that are one tensor."""
    if isinstance(args, torch.Tensor) or not isinstance(args, (tuple, list)):
        raise InputError(f"example_args is a {type(args).__name__}", "pass a tuple with one value per argument, such as `(x,)`")

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().clone()

    copied: Any = pytree.tree_map_only(torch.Tensor, own, (tuple(args), dict(kwargs or {})))
    if batch_of(copied) == 0:
        raise InputError("the example inputs have no tensor with a batch dimension", "pass the inputs of `model(*example_args, **example_kwargs)`")
    return copied[0], copied[1]


def batch_of(example: Any) -> int:
    """Rows of the first tensor that has a dimension, or 0."""
    for leaf in pytree.tree_leaves(example):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return 0


def resized(example: Any, rows: int) -> Any:
    """The example with `rows` rows, repeated or cut, in every tensor that has as many as the first."""
    batch = batch_of(example)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != batch or batch == 0:
            return tensor
        return tensor[torch.arange(rows, device=tensor.device) % batch]

    return pytree.tree_map_only(torch.Tensor, one, example)


def dynamic(model: torch.nn.Module, example: Tuple[Tuple[Any, ...], Dict[str, Any]]) -> ExportedProgram:
    """The export with a dynamic batch dimension."""
    args, kwargs = example
    collection: Any = torch.export.ShapesCollection
    shapes = collection()
    for leaf in pytree.tree_leaves(example):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            shapes[leaf] = {0: torch.export.Dim.AUTO}
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes.dynamic_shapes(model, args, kwargs), strict=False)


@contextlib.contextmanager
def without_cache(model: torch.nn.Module) -> Iterator[None]:
    """Turns off the key-value cache of a model of the transformers library during the export."""
    # An encoder and a decoder may have configurations of their own.
    configs: List[Any] = [config for config in map(config_of, model.modules()) if getattr(config, "use_cache", None) is True]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def config_of(module: torch.nn.Module) -> Any:
    return getattr(module, "config", None)


def as_exported(program: ExportedProgram, example: Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]] = None) -> Exported:
    """Finds the batch dimension of an exported program: axis 0 of the first input that has a dynamic one, else of the first input."""
    example = example or program.example_inputs or ((), {})
    found = [(name, rows) for name, rows in batch_sizes(program).items()]
    if not found:
        raise InputError("the exported program has no tensor input with a batch dimension")
    name, rows = next(((name, rows) for name, rows in found if rows is None), found[0])
    return Exported(program, example, rows, name)


def batch_sizes(program: ExportedProgram) -> Dict[str, Optional[int]]:
    """Size of axis 0 of every tensor input, None if any size is accepted."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: Dict[str, Optional[int]] = {}
    for name in program.graph_signature.user_inputs:
        value = nodes[name].meta.get("val") if isinstance(name, str) and name in nodes else None
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        rows = value.shape[0]
        if isinstance(rows, torch.SymInt):
            limits = program.range_constraints.get(rows.node.expr)
            found[str(name)] = int(limits.lower) if limits is not None and limits.lower == limits.upper else None
        else:
            found[str(name)] = int(rows)
    return found


def is_data_dependent(fault: Exception) -> bool:
    """True if a model decides on the values of a tensor."""
    return "GuardOnDataDependent" in type(fault).__name__ or "data-dependent" in str(fault).lower()


def not_exportable(model: torch.nn.Module, fault: Exception) -> ExportError:
    """The error of a module that torch.export cannot export, with the line of the model that it cannot trace."""
    said = next((line.strip() for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
    name = type(fault).__name__
    at = line_of_model(fault)
    where = f"\n  {at[0]}, line {at[1]}: {at[2]}" if at else ""
    if is_data_dependent(fault):
        return ExportError(
            f"torch.export cannot export {type(model).__name__}: its control flow depends on the values of a tensor{where}",
            "replace the branch by `torch.where` or `torch.cond`, or decide it from shapes or attributes",
        )
    return ExportError(
        f"torch.export cannot export {type(model).__name__}: {name}: {said}{where}",
        "does `model(*example_args, **example_kwargs)` run? `torch.export.export(model, example_args, example_kwargs)` shows the whole error",
    )


def line_of_model(fault: BaseException) -> Optional[Tuple[str, int, str]]:
    """File, line number and text of the innermost line outside torch and this package."""
    inside = [str(Path(torch.__file__).parent), str(Path(__file__).parent)]
    for frame in reversed(traceback.extract_tb(fault.__traceback__)):
        if not any(frame.filename.startswith(folder) for folder in inside) and frame.line:
            return frame.filename, frame.lineno or 0, frame.line
    return None


def save_without_values(program: ExportedProgram, path: Union[str, os.PathLike[str]]) -> None:
    """Writes a .pt2 file for planning: parameters have shapes and no values, buffers keep theirs."""
    parameters = set(program.graph_signature.parameters)
    slim = copy.copy(program)
    values = {
        name: torch.nn.Parameter(torch.empty_like(value, device="meta"), value.requires_grad) if name in parameters else value
        for name, value in program.state_dict.items()
    }
    slim._state_dict = values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(slim, path)


def load_program(path: Union[str, os.PathLike[str]]) -> ExportedProgram:
    """Reads a .pt2 file. torch.export.load can execute code from the file: only load files that you trust."""
    try:
        return torch.export.load(path)
    except Exception as fault:
        raise InputError(f"torch cannot load {os.fspath(path)}: {str(fault).splitlines()[0] if str(fault) else type(fault).__name__}") from None


def warn_of_fixed_batch(exported: Exported) -> None:
    """Says that the model fixes the batch size."""
    warn(
        f"the model fixes the batch size of `{exported.input}`: the plan has micro-batches of {exported.fixed_batch}, and micro_batch=N asks for another size"
    )

"""Plans pipeline-parallel training and runs it with torch.distributed.pipelining.

    plan = pipec.partition(model, (ids,), gpus=8, batch=256)
    pipeline = plan.build(model, loss_fn=loss)        # in every process of torchrun
    loss = pipeline.step(ids, target=labels)
"""

from __future__ import annotations

from .binary import find_binary
from .errors import (
    BinaryNotFoundError,
    CheckError,
    DeviceError,
    Error,
    ExportError,
    InfeasibleError,
    InputError,
    InternalError,
    MissingDependencyError,
    PipecWarning,
)
from .plan import Plan, Prediction, Report, Schedule, Stage
from .planning import Profile, partition, profile

__all__ = [
    "BinaryNotFoundError",
    "CheckError",
    "DeviceError",
    "Error",
    "ExportError",
    "InfeasibleError",
    "InputError",
    "InternalError",
    "MissingDependencyError",
    "PipecWarning",
    "Plan",
    "Prediction",
    "Profile",
    "Report",
    "Schedule",
    "Stage",
    "find_binary",
    "partition",
    "profile",
]

"""Plans of modules, programs and files, what they say, and the errors of models that cannot be planned."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import pipec  # noqa: E402
from models import made  # noqa: E402
from pipec.pipeline import warn_of_uneven_labels  # noqa: E402
from torch import nn  # noqa: E402

X = torch.randn(3, 8)


def chain(layers: int = 4) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)])


@pytest.fixture(scope="module")
def plan() -> pipec.Plan:
    return pipec.partition(chain(), (X,), gpus=2, batch=16, micro_batch=4, stages=[1, 1], device="h100", target="torchtitan")


def test_what_a_plan_says(plan: pipec.Plan, tmp_path: Path) -> None:
    assert [stage.index for stage in plan.stages] == [0, 1]
    assert plan.stages[0].modules[0] == "0.0" and plan.stages[0].node_names[0] == "linear"
    assert all(stage.forward_us > 0 and stage.backward_us > 0 and stage.memory_bytes > 0 for stage in plan.stages)
    assert (plan.schedule.micro_batch, plan.schedule.microbatches, plan.ranks) == (4, 4, 2)
    assert plan.predicted.lower_bound_us <= plan.predicted.minibatch_us
    assert plan.predicted.samples_per_s == pytest.approx(16e6 / plan.predicted.minibatch_us)
    assert plan.predicted.mfu is not None and f"{plan.predicted.mfu * 100:.1e}"[:3] in str(plan)
    assert set(plan.memory) == {0, 1}
    plan.save(tmp_path / "plan.json")
    assert pipec.Plan.load(tmp_path / "plan.json").json == plan.json


def test_split_spec_and_exports(plan: pipec.Plan) -> None:
    from torch.distributed.pipelining import SplitPoint, pipeline

    spec = plan.split_spec()
    (name,) = spec
    assert spec[name] == SplitPoint.BEGINNING and name in plan.stages[1].modules[0]
    assert pipeline(chain(), (X,), split_spec=spec).num_stages == 2
    assert "--parallelism.module_fqns_per_model_part 0" in plan.torchtitan()
    page = plan.report()
    assert "<svg" in page.html and page._repr_html_().startswith("<iframe")
    inside = pipec.partition(chain(), (X,), gpus=2, batch=16, stages=[1, 1], extra=["--cut-after", "0.0"])
    with pytest.raises(pipec.CheckError, match="stage 1 begins inside module") as caught:
        wide = pipec.Plan(inside.json)
        wide.stages[1] = wide.stages[0].__class__(**{**wide.stages[1].__dict__, "modules": wide.stages[0].modules})
        wide.split_spec()
    assert "torchtitan" in (caught.value.help or "")
    with pytest.raises(pipec.CheckError, match="cannot be exported to deepspeed"):
        pipec.partition(chain(), (X,), gpus=2, batch=16, stages=[1, 1], schedule="gpipe").deepspeed()


def test_every_kind_of_model_gives_the_same_plan(tmp_path: Path) -> None:
    model = chain()
    program = torch.export.export(model, (X,), dynamic_shapes={"input": {0: torch.export.Dim.AUTO}})
    torch.export.save(program, tmp_path / "model.pt2")
    with torch.device("meta"):
        meta = chain()
    options: dict[str, Any] = dict(gpus=2, batch=16, device="h100", target="torch")
    found = [
        pipec.partition(model, (X,), **options),
        pipec.partition(model, (torch.randn(1, 8),), **options),
        pipec.partition(program, **options),
        pipec.partition(tmp_path / "model.pt2", **options),
        pipec.partition(meta, (X,), **options),
    ]
    assert [plan.stages for plan in found] == [found[0].stages] * len(found)


def test_profiles_fit_the_model() -> None:
    model = chain(2)
    profile = pipec.profile(model, (X,), micro_batch=4, runs=3, workers=1)
    plan = pipec.partition(model, (torch.randn(5, 8),), gpus=2, batch=16, profile=profile)
    assert plan.schedule.micro_batch == 4 and plan.json["profile"]["method"] == "measured"


def test_profiles_of_torch() -> None:
    model = chain(2)
    profile = pipec.profile(model, (X,), engine="torch", micro_batch=4, runs=3)
    linear = [op for op in profile.json["ops"] if op["op"] == "matmul"]
    assert len(linear) == 2 and all(op["source"] == "torch" and op["fwd_us"] > 0 and op["bwd_us"] > 0 for op in linear)
    assert pipec.partition(model, (X,), gpus=2, batch=16, profile=profile).json["profile"]["method"] == "measured"


def test_profiles_of_outputs_that_torch_does_not_know() -> None:
    pytest.importorskip("transformers")
    model, inputs, target = made("gpt2")
    profile = pipec.profile(model, (), {**inputs, "labels": target}, engine="torch", micro_batch=4, runs=3)
    assert profile.json["whole"]["fwd_us"] > 0


def test_a_fixed_batch_is_refused_before_it_fails() -> None:
    program = torch.export.export(chain(), (torch.randn(7, 8),))
    with pytest.raises(pipec.InputError, match="only runs with 7 rows of `input`, and the micro-batch is 4") as caught:
        pipec.partition(program, gpus=2, batch=28, micro_batch=4)
    assert 'dynamic_shapes={"input": {0: torch.export.Dim.AUTO}}' in (caught.value.help or "")
    assert pipec.partition(program, gpus=2, batch=28).schedule.micro_batch == 7


def test_the_command_refuses_a_fixed_batch_too(tmp_path: Path) -> None:
    from pipec.binary import run

    torch.export.save(torch.export.export(chain(), (torch.randn(7, 8),)), tmp_path / "model.pt2")
    command = ["partition", "model.pt2", "--gpus", "2", "-o", "-", "--micro-batch"]
    with pytest.raises(pipec.InputError, match="torch runs model.pt2 with 7 samples only, and the micro-batch is 4") as caught:
        run([*command, "4", "--target", "torch"], cwd=str(tmp_path))
    assert 'dynamic_shapes={"input": {0: torch.export.Dim.AUTO}}' in (caught.value.help or "")
    run([*command, "7", "--target", "torch"], cwd=str(tmp_path))
    run([*command, "4"], cwd=str(tmp_path))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows


def test_a_model_that_fixes_the_batch_is_planned_with_it() -> None:
    with pytest.warns(pipec.PipecWarning, match="the model fixes the batch size of `x`: the plan has micro-batches of 4"):
        plan = pipec.partition(Fixed(), (torch.randn(4, 8),), gpus=1, batch=16)
    assert plan.schedule.micro_batch == 4


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_control_flow_on_values_names_the_line() -> None:
    with pytest.raises(pipec.ExportError, match=r"Branch: its control flow depends on the values of a tensor\n.*: if x.sum\(\) > 0:"):
        pipec.partition(Branch(), (X,))


def test_other_errors() -> None:
    with pytest.raises(pipec.InputError, match="example_args is a Tensor"):
        pipec.partition(chain(), X)
    with pytest.raises(pipec.InfeasibleError, match="no plan fits in") as infeasible:
        pipec.partition(chain(), (X,), gpus=2, memory=300)
    assert "--memory" in (infeasible.value.help or "")
    with pytest.raises(pipec.InputError, match="invalid value 'none' for '--schedule"):
        pipec.partition(chain(), (X,), schedule="none")
    with pytest.raises(pipec.DeviceError, match="torch.distributed is not initialized") as caught:
        pipec.partition(chain(), (X,), gpus=2, batch=16, stages=[1, 1]).build()
    assert "torchrun --nproc-per-node 2" in (caught.value.help or "")


def test_processes_and_gpus_that_are_missing(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        two = pipec.partition(chain(), (X,), gpus=2, batch=16, stages=[1, 1])
        with pytest.raises(pipec.DeviceError, match="the plan needs 2 processes, and 1 runs"):
            two.build()
        one = pipec.partition(chain(), (X,), gpus=1, batch=16)
        with pytest.raises(pipec.DeviceError, match="rank 0 needs cuda:63, and this host has"):
            one.build(device="cuda:63")
        pipeline = one.build(loss_fn=nn.functional.mse_loss)
        assert pipeline.step(torch.randn(16, 8), target=torch.randn(16, 8)).item() > 0
        with pytest.raises(pipec.InputError, match="has 3 rows"):
            pipeline.step(X, target=X)
        with pytest.raises(pipec.InputError, match="the model does not return a scalar loss"):
            one.build().step(torch.randn(16, 8))
    finally:
        dist.destroy_process_group()


def test_a_tiny_gpt_has_nested_modules() -> None:
    pytest.importorskip("transformers")
    model, inputs, _ = made("llama")
    assert model.config.use_cache is True
    plan = pipec.partition(model, (), inputs, gpus=2, batch=8, stages=[1, 1], target="torchtitan", micro_batch=2)
    assert model.config.use_cache is True
    assert plan.stages[0].modules[0] == "model.embed_tokens"
    assert list(plan.split_spec())[0].startswith("model.layers.")


def test_types() -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).resolve().parents[2]
    files = [str(root / "python" / "pipec"), str(Path(__file__).with_name("user_script.py"))]
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", *files], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout


def test_nothing_else_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pipec.PipecWarning)
        pipec.partition(chain(), (X,), gpus=2, batch=16)


def test_unevenly_ignored_labels_are_reported() -> None:
    labels = [torch.tensor([1, 2, -100]), torch.tensor([3, 4, -100])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_uneven_labels([((), part) for part in labels])
        warn_of_uneven_labels([((torch.rand(3),), None), ((torch.rand(3),), None)])
    with pytest.warns(pipec.PipecWarning, match="mean of their means"):
        warn_of_uneven_labels([((), labels[0]), ((), torch.tensor([1, 2, 3]))])

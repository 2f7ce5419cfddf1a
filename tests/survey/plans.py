"""Plans models of the zoo with random flags and checks each plan with `pipec plan check --model`.

    python tests/survey/plans.py target/release/pipec --count 300 --folder /tmp/plans

A plan that pipec itself rejects is a fault of the planner or of the check. Flags that have no plan are counted. The exit
code is 1 if a plan was rejected, a run ended with an undocumented code, or a search took more than a minute.
"""

import argparse
import pathlib
import random
import subprocess
import sys

MODELS = [
    "gpt2", "bert-base", "resnet50", "unet", "vgg16", "alexnet", "amoebanet", "s2vt", "gnmt8", "transformer-3",
    "llama --hidden 512 --layers 8 --vocabulary 32000 --context 256",
]
LEVELS = ["8:450GB/s", "8:1GB/s", "4:450GB/s,2:12GB/s", "8:450GB/s,2:50GB/s", "2:100GB/s,3:5GB/s", "4:450GB/s,4:50GB/s,2:25GB/s"]
SCHEDULES = ["1f1b", "1f1b", "gpipe", "1f1b-rr", "2bw", "zb-h1", "zb-h2", "interleaved", "auto"]

# A flag, its values, and how often it is given.
SOMETIMES = [
    ("--optimizer", ["adam", "momentum", "adamw"], 0.4),
    ("--memory", ["1GB", "2GB", "4GB", "8GB"], 0.3),
    ("--recompute", ["auto", "all", "never"], 0.3),
    ("--tensor", ["2", "4", "never", "auto"], 0.4),
    ("--zero", ["1", "2", "3", "auto"], 0.25),
    ("--stages", ["1,1", "2,2", "2,1", "1,1,1", "4,4", "1,2,1", "3"], 0.3),
    ("--in-flight", ["2", "3"], 0.15),
]

# Exit codes of a run without a plan: the flags contradict each other, or nothing fits.
WITHOUT_PLAN = {2, 3}


def random_flags(choose):
    profile = "analytic:" + choose.choice(["h100", "a100", "v100"])
    flags = ["--profile", profile, "--levels", choose.choice(LEVELS), "--schedule", choose.choice(SCHEDULES)]
    if choose.random() < 0.5:
        flags += ["--batch", str(choose.choice([16, 32, 48, 64, 128]))]
    else:
        flags += ["--micro-batch", str(choose.choice([1, 2, 4, 8])), "--microbatches", str(choose.choice([1, 4, 6, 8, 16]))]
    for flag, values, share in SOMETIMES:
        flags += [flag, choose.choice(values)] if choose.random() < share else []
    return flags


def fault(pipec, folder, model, flags):
    """None for a valid plan, "" if there is none, else what is wrong."""
    plan = folder / "plan.json"
    plan.unlink(missing_ok=True)
    try:
        command = [pipec, "partition", model, *flags, "-qq", "-o", plan.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "more than a minute"
    if done.returncode:
        return "" if done.returncode in WITHOUT_PLAN else f"exit code {done.returncode}"
    command = [pipec, "plan", "check", plan.name, "--model", model]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return checked.stderr.strip()[-400:] if checked.returncode else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipec")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/plans"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pipec = str(pathlib.Path(arguments.pipec).resolve())
    for at, model in enumerate(MODELS):
        (arguments.folder / f"{at}.onnx").unlink(missing_ok=True)
        command = [pipec, "zoo", *model.split(), "--structure", "-qq", "-o", f"{at}.onnx"]
        subprocess.run(command, cwd=arguments.folder, check=True, capture_output=True)
    choose, faults, valid = random.Random(arguments.seed), 0, 0
    for _ in range(arguments.count):
        at, flags = choose.randrange(len(MODELS)), random_flags(choose)
        found = fault(pipec, arguments.folder, f"{at}.onnx", flags)
        valid += found is None
        if found:
            faults += 1
            print(MODELS[at], *flags, "\n  ", found, flush=True)
    print(f"{valid} plans are valid, {faults} faults, {arguments.count - valid - faults} flags without a plan")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

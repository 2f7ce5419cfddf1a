#!/usr/bin/env bash
# Measures pipec on the GPUs of a machine that has no Rust compiler. docs/benchmarks.md describes the results.
#
#   benches/gpu.sh pack FOLDER        builds pipec and its tests, and copies them with the scripts into FOLDER
#   FOLDER/gpu.sh run [OPTIONS]       runs the steps that have not run yet, and writes summary.md
#   FOLDER/gpu.sh steps [OPTIONS]     lists the steps
#   FOLDER/gpu.sh summary [OPTIONS]   writes summary.md again
#   benches/gpu.sh rehearse FOLDER [OPTIONS]
#                                     `run --small` of a packed FOLDER on the simulated driver
#
# Options:
#   --results DIR      folder of results [default: results in the current folder]
#   --limit SECONDS    end after this time; the next `run` continues [default: none]
#   --small            small models and few runs
#   --steps A,B        only these groups: facts, ceilings, ops, sanitizer, parity, profile, train, peers, compiled
#   --models A,B       only these models
#   --precisions A,B   only these precisions of models, of fp32 and bf16
#   --again            also run steps again that failed, took too long or were skipped
#
# Exit codes of `run`: 0 all steps ran, 1 a step failed or took too long, 2 wrong usage, 75 steps remain.
# SIGTERM and SIGINT end the running step, which the next `run` repeats.

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
self=$here/$(basename "${BASH_SOURCE[0]}")

usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$self"
}

fail() {
  echo "error: $*" >&2
  exit 2
}

# ---------------------------------------------------------------- on the build machine

# The files that cargo built, one a line, of targets of the kind $1. The other arguments are those of cargo.
built() {
  local kind=$1
  shift
  cargo "$@" --release --message-format json-render-diagnostics |
    grep -F "\"kind\":[\"$kind\"]" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}

pack() {
  local folder=$1 file name
  local parity=${PIPEC_DATA:-$here/../../shared/data}/parity
  mkdir -p "$folder/bin"
  folder=$(cd "$folder" && pwd)
  cd "$here/.."
  {
    built bin build --bin pipec
    built test test --no-run --test cuda --test train
  } | while read -r file; do
    name=$(basename "$file")
    name=${name%%-*}
    cp "$file" "$folder/bin/$name"
    strip "$folder/bin/$name"
    gzip -9 -f "$folder/bin/$name"
  done
  for name in pipec cuda train; do
    [ -e "$folder/bin/$name.gz" ] || fail "cargo did not build $name"
  done
  cp benches/gpu.sh benches/gpu/*.py benches/torch/gpu_peers.py benches/torch/models.py "$folder"
  if [ -d "$parity" ]; then
    mkdir -p "$folder/data"
    cp -r "$parity" "$folder/data"
  fi
  du -sh "$folder"
}

rehearse() {
  local folder=$1 driver source library
  shift
  driver=$folder/simulated
  mkdir -p "$driver"
  driver=$(cd "$driver" && pwd)
  local sources=$here/../tests/cuda_driver
  local flags=(-std=c++17 -O2 -fPIC -shared -fvisibility=hidden -pthread "-Wl,-z,nodelete")
  while read -r source library; do
    "${CXX:-g++}" "${flags[@]}" "-Wl,-soname,$library.so" "$sources/$source.cpp" -o "$driver/$library.so" -ldl
  done <<END
driver libcuda
nvrtc libnvrtc
cublaslt libcublasLt
cudnn libcudnn
nccl libnccl
END
  export PIPEC_CUDA_LIBS=$driver PIPEC_SIM_CACHE=${PIPEC_SIM_CACHE:-$driver/cache}
  exec "$folder/gpu.sh" run --small "$@"
}

# ---------------------------------------------------------------- steps

small=
models=
precisions="bf16 fp32"
groups=
results=$PWD/results

# The steps in order: group and name.
steps() {
  local model precision
  echo "facts facts"
  echo "ceilings copies"
  echo "ceilings matmul"
  echo "ceilings matmul-torch"
  echo "ops ops"
  echo "parity parity"
  for model in $models; do
    for precision in $precisions; do echo "profile profile-$model-$precision"; done
  done
  for model in $models; do
    for precision in $precisions; do echo "train train-$model-$precision"; done
  done
  for model in $models; do echo "peers peers-$model"; done
  for model in $models; do echo "train several-$model-bf16"; done
  for model in $models; do echo "compiled compiled-$model"; done
  # Slow, so last.
  echo "sanitizer memcheck"
  echo "sanitizer racecheck"
}

chosen() {
  local group name
  steps | while read -r group name; do
    # The others read the facts.
    case ,facts,${groups:-$group}, in
      *,"$group",*) echo "$name" ;;
    esac
  done
}

# Seconds that a step may take.
budget() {
  case $1 in
    facts) echo 40 ;;
    copies) echo 40 ;;
    ops) echo 240 ;;
    parity) echo 240 ;;
    compiled-*) echo 180 ;;
    memcheck | racecheck) echo 500 ;;
    *) echo 120 ;;
  esac
}

# Samples per micro-batch.
batch() {
  case $1 in
    gpt2) echo 2 ;;
    bert-base) echo 4 ;;
    resnet50 | vgg16) echo 16 ;;
    *) echo 2 ;;
  esac
}

# Optimizer and learning rate. Peers read them, too.
optimizer() {
  case $1 in
    gpt* | bert*) echo "adamw 0.0001" ;;
    *) echo "sgd-momentum 0.001" ;;
  esac
}

is_simulated() {
  grep -q '"name": "Simulated' "$results/facts.doctor.json" 2>/dev/null
}

gpus() {
  if [ -e "$results/facts.doctor.json" ]; then grep -c '"ordinal":' "$results/facts.doctor.json" || true; else echo 0; fi
}

python() {
  command -v "${PIPEC_PYTHON:-python3}" || true
}

skip() {
  echo "skipped: $*"
  exit 77
}

need_python() {
  [ -n "$(python)" ] || skip "no Python"
}

need_torch() {
  need_python
  is_simulated && skip "PyTorch does not run on simulated GPUs"
  # The import takes seconds, so it is tried once.
  if [ ! -e scratch/torch ]; then
    "$(python)" -c 'import torch; print(torch.cuda.is_available())' >scratch/torch 2>/dev/null || echo absent >scratch/torch
  fi
  grep -q True scratch/torch || skip "no PyTorch with CUDA"
}

# The program $1 of the package, unpacked if it is compressed.
program() {
  local file=$here/bin/$1
  [ ! -x "$file" ] || { echo "$file"; return; }
  file=$results/scratch/$1
  if [ ! -x "$file" ]; then
    gunzip -c "$here/bin/$1.gz" >"$file.part"
    chmod +x "$file.part"
    mv "$file.part" "$file"
  fi
  echo "$file"
}

pipec() {
  "$(program pipec)" -q "$@"
}

# Writes the output of a command to the file $1, which is complete or absent.
into() {
  local file=$1
  shift
  "$@" >"$file.part" && mv "$file.part" "$file"
}

# The file of a zoo model, with weights.
model() {
  local file=$results/scratch/$1.onnx
  if [ ! -e "$file" ]; then
    pipec zoo "$1" -o "$results/scratch/part.$1.onnx" >/dev/null
    mv "$results/scratch/part.$1.onnx" "$file"
  fi
  echo "$file"
}

runs() {
  if [ -n "$small" ]; then echo "--runs 3 --warmup 1"; else echo "--runs 10 --warmup 2"; fi
}

# Measures a model in a precision; the profile is named by the step.
profile() {
  local step=$1 file=$2 precision=$3 micro_batch=$4
  # shellcheck disable=SC2046
  pipec profile "$file" --device cuda:0 --precision "$precision" --micro-batch "$micro_batch" $(runs) --no-cache \
    -o "part.$step.profile.json"
  mv "part.$step.profile.json" "$step.profile.json"
}

# Trains a model under the plan of $1 with this number of rows, and watches the memory of the GPUs.
train() {
  local step=$1 model=$2 precision=$3 device=$4 rows=$5 watcher='' status=0
  local count=16 rule rate data=(--synthetic-data)
  read -r rule rate <<<"$(optimizer "$model")"
  [ -z "$small" ] || count=12
  if [ -n "$(python)" ]; then
    data=(--data "scratch/$model-$rows.npz")
    pipec inspect "$(model "$model")" --format json | "$(python)" "$here/data.py" "$rows" "${data[1]}"
  fi
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits >"$step.before.csv" || true
    nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits --loop-ms=100 >"$step.during.csv" 2>&1 &
    watcher=$!
  fi
  pipec train "$(model "$model")" --plan "$step.plan.json" --device "$device" "${data[@]}" --steps "$count" \
    --precision "$precision" --optimizer "$rule" --lr "$rate" --metrics "part.$step.jsonl" || status=$?
  [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
  [ "$status" -eq 0 ] || return "$status"
  mv "part.$step.jsonl" "$step.metrics.jsonl"
}

step_facts() {
  local status=0
  # A machine without a GPU also has facts.
  pipec doctor --format json >facts.doctor.json.part || status=$?
  mv facts.doctor.json.part facts.doctor.json
  # The GPU of a test or of a simulated driver is not in the table of devices.
  into facts.cluster.toml pipec cluster detect || rm -f facts.cluster.toml.part
  echo "small ${small:-0}" >facts.run.txt
  pipec doctor || true
  if command -v nvidia-smi >/dev/null; then
    into facts.nvidia-smi.csv nvidia-smi --format=csv,nounits \
      --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit,pcie.link.gen.max,pcie.link.width.max || true
    nvidia-smi || true
    nvidia-smi topo -m || true
  fi
  lscpu 2>/dev/null || true
  free -h 2>/dev/null || true
  uname -a
  return "$status"
}

step_copies() {
  local status=0
  if [ "$(gpus)" -gt 1 ]; then
    if [ ! -e facts.cluster.toml ]; then
      cat >copies.stated.toml <<END
schema = "pipec.cluster/1"
[device]
kind = "unknown"
memory = "4GB"
memory_bandwidth = "1TB/s"
peak_flops = { f32 = 1e13 }
[[level]]
name = "link"
count = $(gpus)
bandwidth = "1GB/s"
END
    else
      cp facts.cluster.toml copies.stated.toml
    fi
    into copies.links.json pipec cluster bench copies.stated.toml -o copies.measured.toml --format json || status=$?
    cat copies.measured.toml || true
  fi
  [ -n "$(python)" ] || [ "$status" -eq 0 ] || return "$status"
  need_python
  into copies.json "$(python)" "$here/copies.py" facts.doctor.json ${small:+--small}
  cat copies.json
  return "$status"
}

# One matrix product of this size, in a perceptron of three.
step_matmul() {
  local size=4096 precision status=0
  [ -z "$small" ] || size=64
  pipec zoo mlp --structure --inputs $size --hidden $size --layers 2 --classes $size -o scratch/matmul.onnx
  for precision in bf16 fp16 fp32 fp64; do
    profile "matmul-$precision" scratch/matmul.onnx $precision $size || status=$?
  done
  return "$status"
}

step_matmul_torch() {
  need_torch
  "$(python)" "$here/gpu_peers.py" --ceilings -o matmul-torch.json
}

step_ops() {
  RUST_BACKTRACE=0 "$(program cuda)" --exact a_gpu_gives_what_the_reference_gives --nocapture
}

# The kernels under a tool of NVIDIA's compute-sanitizer.
step_sanitizer() {
  local sanitizer
  is_simulated && skip "a simulated GPU has no sanitizer"
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1 || true)
  [ -n "$sanitizer" ] || skip "no compute-sanitizer"
  RUST_BACKTRACE=0 "$sanitizer" --tool "$1" --error-exitcode 1 --launch-timeout 60 \
    "$(program cuda)" --exact a_gpu_gives_what_the_reference_gives --nocapture
}

step_parity() {
  local devices=cuda:0
  export PIPEC_DATA=${PIPEC_DATA:-$here/data}
  [ -d "$PIPEC_DATA/parity" ] || skip "no data for parity"
  [ "$(gpus)" -lt 2 ] || devices=cuda:0,cuda:1
  if [ -n "$small" ]; then set -- parity::first_gradients parity::asynchronous; else set -- parity::; fi
  PIPEC_TEST_DEVICES=$devices "$(program train)" "$@" --skip simulated --test-threads 2
}

step_profile() {
  local model=$1 precision=$2
  profile "profile-$model-$precision" "$(model "$model")" "$precision" "$(batch "$model")"
}

# Training on one GPU, with the profile of the same precision.
step_train() {
  local model=$1 precision=$2
  local step=train-$model-$precision costs=profile-$model-$precision.profile.json
  [ -e "$costs" ] || skip "no profile"
  pipec partition "$(model "$model")" --profile "$costs" --gpus 1 --micro-batch "$(batch "$model")" \
    --schedule 1f1b --optimizer "$(optimizer "$model" | cut -d ' ' -f 1)" -o "$step.plan.json"
  train "$step" "$model" "$precision" cuda:0 $((2 * $(batch "$model")))
}

# Training on all GPUs: the best plan of four micro-batches a GPU, and a pipeline of two stages.
step_several() {
  local model=$1 precision=$2 count rule rows link=() status=0
  local step=several-$model-$precision costs=profile-$model-$precision.profile.json
  count=$(gpus)
  [ "$count" -gt 1 ] || skip "one GPU"
  [ -e "$costs" ] || skip "no profile"
  rule=$(optimizer "$model" | cut -d ' ' -f 1)
  rows=$((4 * count * $(batch "$model")))
  if [ -e copies.measured.toml ]; then
    link=(--bandwidth "$(sed -n 's/^bandwidth = "\(.*\)"/\1/p' copies.measured.toml | head -n 1)")
  fi
  pipec partition "$(model "$model")" --profile "$costs" --gpus "$count" "${link[@]}" \
    --batch "$rows" --optimizer "$rule" -o "$step.plan.json"
  train "$step" "$model" "$precision" cuda "$rows" || status=$?
  pipec partition "$(model "$model")" --profile "$costs" --gpus 2 "${link[@]}" --micro-batch "$(batch "$model")" \
    --microbatches 4 --schedule 1f1b --stages 1,1 --optimizer "$rule" -o "$step-pipeline.plan.json"
  train "$step-pipeline" "$model" "$precision" cuda:0,1 "$rows" || status=$?
  return "$status"
}

# PyTorch, or PyTorch with torch.compile.
step_peer() {
  local step=$1 model=$2 rule rate
  shift 2
  need_torch
  read -r rule rate <<<"$(optimizer "$model")"
  "$(python)" "$here/gpu_peers.py" --model "$model" --batch "$(batch "$model")" --optimizer "$rule" --lr "$rate" \
    --precisions "${precisions// /,}" -o "$step.json" "$@"
}

# Runs the step $1 in the current process, in the folder of results.
step() {
  local name=$1 model precision
  cd "$results"
  model=${name#*-}
  precision=${model##*-}
  [ "$name" = facts ] || [ "$(gpus)" -gt 0 ] || skip "no GPU"
  case $name in
    facts | copies | matmul | ops | parity) "step_$name" ;;
    matmul-torch) step_matmul_torch ;;
    memcheck | racecheck) step_sanitizer "$name" ;;
    profile-*) step_profile "${model%-*}" "$precision" ;;
    train-*) step_train "${model%-*}" "$precision" ;;
    several-*) step_several "${model%-*}" "$precision" ;;
    peers-*) step_peer "$name" "$model" ;;
    compiled-*) step_peer "$name" "$model" --compile ;;
    *) fail "no step $name" ;;
  esac
}

# ---------------------------------------------------------------- the run

# What pipec printed: the results without Python.
text() {
  local step file
  chosen | while read -r step; do
    file=$results/$step.log
    [ -e "$file" ] || continue
    case $step in
      facts) ;;
      copies | ops | parity | matmul | memcheck | racecheck | profile-* | train-* | several-*)
        printf '## %s\n\n```text\n' "$step"
        grep -v -e '^next: ' -e '^wrote ' -e '^ *pipec ' -e '^$' "$file" | tail -n 12 | cut -c 1-200
        printf '```\n\n'
        ;;
    esac
  done
}

# `summary.md` of all results so far.
summary() {
  local file=$results/summary.md step state
  {
    echo "# pipec on GPUs"
    echo
    is_simulated && echo "**The driver is simulated: the times are not those of a GPU and mean nothing.**" && echo
    if [ -n "$(python)" ]; then
      "$(python)" "$here/summary.py" "$results" || echo "summary.py failed."
    else
      text
    fi
    echo "## Steps"
    echo
    echo "| step | result | seconds |"
    echo "| --- | --- | ---: |"
    chosen | while read -r step; do
      state="- -"
      [ ! -e "$results/$step.state" ] || state=$(cat "$results/$step.state")
      echo "| $step | ${state#* } | ${state%% *} |"
    done
  } >"$file.part"
  mv "$file.part" "$file"
}

# One file with everything but models and programs.
bundle() {
  tar -C "$results" --exclude ./scratch --exclude ./results.tar.gz --exclude './part.*' --exclude './*.part' \
    -czf "$results/scratch/results.tar.gz" . && mv "$results/scratch/results.tar.gz" "$results/results.tar.gz"
}

child=
ended=

# The running step ends with its processes. It has no state, so the next run repeats it.
stop() {
  ended=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}

run() {
  local limit=$1 again=$2 step first=1 left allowed begun status state remain=0 bad=0
  mkdir -p "$results/scratch"
  trap stop TERM INT
  for step in $(chosen); do
    if [ -e "$results/$step.state" ]; then
      state=$(cat "$results/$step.state")
      if [ -z "$again" ] || [ "${state#* }" = ok ]; then
        case $state in *failed* | *"too long"*) bad=1 ;; esac
        continue
      fi
      rm "$results/$step.state"
    fi
    allowed=$(($(budget "$step") * ${PIPEC_GPU_PATIENCE:-1}))
    if [ "$limit" -gt 0 ]; then
      # The summary and the bundle take the last seconds.
      left=$((limit - SECONDS - 5))
      if [ -n "$ended" ] || [ "$left" -lt 10 ]; then
        remain=$((remain + 1))
        continue
      fi
      [ "$left" -ge "$allowed" ] || allowed=$left
    elif [ -n "$ended" ]; then
      remain=$((remain + 1))
      continue
    fi
    begun=$SECONDS
    printf '%-28s ' "$step"
    # `timeout` is the leader of a process group, which gets its signals.
    timeout -k 5 "$allowed" "$BASH" "$self" step "$step" >"$results/$step.log" 2>&1 </dev/null &
    child=$!
    [ -z "$ended" ] || stop
    status=0
    wait "$child" || status=$?
    if [ -n "$ended" ]; then
      # The trap ended the first wait.
      wait "$child" || true
      status=143
    fi
    child=
    case $status in
      0) state=ok ;;
      77) state=$(tail -n 1 "$results/$step.log") ;;
      124 | 137) state="took too long" ;;
      *) state="failed with status $status" ;;
    esac
    if [ -n "$ended" ] || { [ "$state" = "took too long" ] && [ "$allowed" -lt "$(budget "$step")" ] && [ -z "$first" ]; }; then
      echo "not complete"
      remain=$((remain + 1))
    else
      echo "$state, $((SECONDS - begun)) s"
      case $state in failed* | took*) bad=1 ;; esac
      echo "$((SECONDS - begun)) $state" >"$results/$step.state.part"
      mv "$results/$step.state.part" "$results/$step.state"
    fi
    first=
    summary
  done
  summary
  bundle
  echo "$results/summary.md"
  [ -z "$ended" ] || exit 143
  if [ "$remain" -gt 0 ]; then
    echo "$remain steps remain"
    exit 75
  fi
  exit "$bad"
}

# ---------------------------------------------------------------- arguments

main() {
  local command=${1:-} limit=0 again=
  [ $# -gt 0 ] && shift
  case $command in
    pack)
      [ $# -eq 1 ] || fail "pack needs a folder"
      pack "$1"
      exit
      ;;
    rehearse)
      [ $# -ge 1 ] || fail "rehearse needs a folder"
      rehearse "$@"
      ;;
    step)
      small=$GPU_SMALL results=$GPU_RESULTS precisions=$GPU_PRECISIONS
      step "$1"
      exit
      ;;
    run | steps | summary) ;;
    -h | --help | help)
      usage
      exit
      ;;
    *)
      usage >&2
      exit 2
      ;;
  esac
  while [ $# -gt 0 ]; do
    case $1 in
      --small)
        small=1
        shift
        continue
        ;;
      --again)
        again=1
        shift
        continue
        ;;
      --results | --limit | --steps | --models | --precisions) [ $# -gt 1 ] || fail "$1 needs a value" ;;
      *) fail "unknown option $1" ;;
    esac
    case $1 in
      --results) results=$2 ;;
      --limit) limit=$2 ;;
      --steps) groups=$2 ;;
      --models) models=${2//,/ } ;;
      --precisions) precisions=${2//,/ } ;;
    esac
    shift 2
  done
  case $limit in '' | *[!0-9]*) fail "--limit needs seconds" ;; esac
  if [ -z "$models" ]; then
    if [ -n "$small" ]; then models="mlp gpt residual-cnn"; else models="gpt2 bert-base resnet50 vgg16"; fi
  fi
  if [ "$command" = steps ]; then
    chosen
    exit
  fi
  mkdir -p "$results"
  results=$(cd "$results" && pwd)
  export GPU_SMALL=$small GPU_RESULTS=$results GPU_PRECISIONS=$precisions
  case $command in
    summary) summary ;;
    run) run "$limit" "$again" ;;
  esac
}

main "$@"

#!/usr/bin/env bash
# All that is measured on a machine with an NVIDIA GPU, in one command; its limits add up to 33
# minutes. Where a command may take ten: --only device,tests,kernels, engine, then
# cronus,processes,operators.
#
#   scripts/bench/gpu_suite.sh --collect-wheels DIR            # on a machine with a network
#   scripts/bench/gpu_suite.sh --wheels DIR --trace CSV --out docs/results/gpu/NAME
#   scripts/bench/gpu_suite.sh --rehearse --out DIR            # on a CPU: tiny, kernels interpreted
#
# The machine with the GPU has Python 3.12 ($PYTHON, by default python3) with JAX for CUDA, flax and
# transformers; what else the project needs comes as wheels. Without --wheels, that Python must have
# the project and all it needs. --only device,tests,kernels,engine,... runs some of the stages;
# --kernels generic has the engine do without Mosaic's, --flex adds torch's flex_attention.
# Each stage has a log and a time limit, and the next one runs whatever became of it; the exit
# status is 1 if one has failed, and summary.md says which.
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
stages=device,tests,kernels,engine,cronus,processes,operators
collect= wheels= trace= out= only=$stages rehearse= flex= kernels=

fail() {
    echo "gpu_suite.sh: $*" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --help) sed -n "/^# All/,/^set/{/^set/d;s/^#//;s/^ //;p}" "${BASH_SOURCE[0]}" && exit ;;
        --rehearse) rehearse=--rehearse && shift && continue ;;
        --flex) flex=--flex && shift && continue ;;
        --collect-wheels | --wheels | --trace | --out | --only | --kernels) ;;
        *) fail "unknown option $1: --collect-wheels, --wheels, --trace, --out, --only," \
            "--kernels, --flex, --rehearse" ;;
    esac
    [[ -n ${2:-} ]] || fail "$1 needs a value"
    case $1 in
        --collect-wheels) collect=$2 ;;
        --wheels) wheels=$(realpath "$2") ;;
        --trace) trace=$(realpath "$2") ;;
        --out) out=$(realpath -m "$2") ;;
        --only) only=$2 ;;
        --kernels) kernels=$2 ;;
    esac
    shift 2
done

# The project's dependencies that such a machine lacks, or may lack, and those of its tests.
lacking() {
    "$python" - "$repository/pyproject.toml" <<'EOF'
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))
# JAX, flax and transformers, and what they bring.
there = {"jax", "numpy", "ml_dtypes", "scipy", "flax", "optax", "orbax-checkpoint", "tensorstore",
         "transformers", "tokenizers", "huggingface_hub", "safetensors"}
tests = [need for need in project["project"]["optional-dependencies"]["dev"]
         if re.match("pytest|hypothesis", need)]
needs = project["project"]["dependencies"] + tests + project["build-system"]["requires"]
print(*(need for need in needs if re.split("[<>=]", need)[0] not in there), sep="\n")
EOF
}

collect_wheels() {
    mkdir -p "$collect"
    lacking >"$collect/requirements.txt" || fail "cannot read pyproject.toml with $python"
    local platforms=() version
    for version in 2_28 2_27 2_24 2_17 2_12 2_5; do
        platforms+=(--platform "manylinux_${version}_x86_64")
    done
    "$python" -m pip download --quiet --dest "$collect" --only-binary=:all: --implementation cp \
        --python-version 3.12 "${platforms[@]}" --platform manylinux2014_x86_64 \
        --requirement "$collect/requirements.txt" || exit 1
    rm -f "$collect"/numpy-*.whl  # JAX has brought one.
    du -sh "$collect"
}

# A virtual environment over $python's packages, which may lie in a virtual environment themselves.
make_environment() {
    # Some systems' Python has no ensurepip; pip lies below.
    "$python" -m venv --without-pip "$scratch/venv" || return
    "$python" -c '
import site, sys, sysconfig
paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
                       *site.getsitepackages(), site.getusersitepackages()])
print(*(f"import site; site.addsitedir({path!r})" for path in paths), sep="\n")
' >"$(echo "$scratch"/venv/lib/python3*/site-packages)/below.pth" || return
    python=$scratch/venv/bin/python
    "$python" -m pip install --quiet --no-index --find-links "$wheels" \
        --requirement "$wheels/requirements.txt" || return
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation \
        --editable "$repository"
}

# stage NAME SECONDS COMMAND...: its output goes to NAME.log.
stage() {
    local name=$1 limit=$2 start=$SECONDS status result
    shift 2
    [[ ,$only, == *,$name,* ]] || return 0
    [[ -n $rehearse ]] && limit=600
    echo "$name: at most $limit s"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
    status=$?
    case $status in
        0) result=ok ;;
        124 | 137) result="stopped at $limit s" && failed=1 ;;
        *) result="failed, exit status $status" && failed=1 ;;
    esac
    [[ $result == ok ]] || tail -n 5 "$out/$name.log"
    echo "$name: $result, $((SECONDS - start)) s"
    echo "| $name | $result | $((SECONDS - start)) | [$name.log]($name.log) |" >>"$out/summary.md"
}

if [[ -n $collect ]]; then
    collect_wheels
    exit
fi
[[ -n $out ]] || fail "no --out: give a new folder for the results"
[[ -e $out ]] && fail "$out exists: give a new folder for the results"
[[ -z $wheels || -f $wheels/requirements.txt ]] || fail "$wheels: not made by --collect-wheels"
for name in ${only//,/ }; do
    [[ ,$stages, == *,$name,* ]] || fail "--only: no stage $name"
done

mkdir -p "$out" || exit 2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$repository" || exit 2
start=$SECONDS
failed=0
export PYTHONPATH=$repository PYTHONUNBUFFERED=1
# No silent fall back to the CPU, which is the weak group of the last stages.
if [[ -n $rehearse ]]; then export JAX_PLATFORMS=cpu; else export JAX_PLATFORMS=cuda,cpu; fi
# Where a CUDA toolkit is installed, Mosaic needs its assembler and libraries, too.
if [[ -z $rehearse && -d /usr/local/cuda/bin ]]; then
    export CUDA_ROOT=/usr/local/cuda PATH=/usr/local/cuda/bin:$PATH
fi
printf '| stage | result | seconds | output |\n|---|---|---:|---|\n' >"$out/summary.md"
if [[ -n $wheels ]]; then
    make_environment || fail "cannot install $wheels over $python"
    echo "environment: $((SECONDS - start)) s"
fi

stage device 90 "$python" -m scripts.bench.describe_machine "$out/device.json" $rehearse
# A fault of the GPU ends the process: with several, it costs one test.
workers=()
if [[ -z $rehearse ]] && "$python" -c 'import xdist, pytest_timeout' 2>/dev/null; then
    workers=(-n 6 --max-worker-restart=8 --timeout=90)
fi
stage tests 280 env XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m pytest \
    tests/pallas_kernels tests/runtime/test_kernels.py tests/runtime/spread/test_spread.py \
    -m "gpu and not slow" -p no:cacheprovider \
    -vv --tb=short --durations=5 "${workers[@]}"
stage kernels 420 "$python" -m scripts.bench.kernels --json "$out/kernels.json" $flex $rehearse
# Weights and KV have the GPU to themselves.
stage engine 560 env XLA_PYTHON_CLIENT_MEM_FRACTION=.92 "$python" -m scripts.bench.engine \
    --json "$out/engine.json" ${kernels:+--kernels "$kernels"} ${trace:+--trace "$trace"} $rehearse
# Cronus over the GPU and the host's CPU, and the GPU alone.
model=configs/gpu/smollm2-135m
settings=(--set engine.load_format=dummy)
operators=()
if [[ -n $rehearse ]]; then
    mkdir "$scratch/tiny"
    sed 's/"num_hidden_layers": 30/"num_hidden_layers": 2/; s/49152/512/' "$model/config.json" \
        >"$scratch/tiny/config.json"
    model=$scratch/tiny
    settings+=(--limit 4 --set groups.strong.platform=cpu --set engine.max_num_seqs=4)
    operators=(--set groups.strong.platform=cpu --set engine.max_num_seqs=4
        --set engine.max_model_len=128 --set instances.engine.max_num_batched_tokens=64
        --set instances.engine.num_pages=65)
fi
# Relative, since the results quote the command.
stage cronus 240 "$python" -m jaxinfer compare configs/gpu/cronus.yaml --systems cronus,single \
    --rounds 1 --out "$(realpath --relative-to=. "$out")/cronus" --set "model=$model" "${settings[@]}"
# The same with a process for each group: neither has the other's devices, this one has none.
gpu=cuda
[[ -n $rehearse ]] && gpu=cpu
stage processes 180 "$python" -m jaxinfer compare configs/gpu/cronus.yaml --systems cronus \
    --rounds 1 --out "$(realpath --relative-to=. "$out")/processes" --set "model=$model" \
    "${settings[@]}" --set groups.strong.process=own --set groups.weak.process=own \
    --set groups.strong.environment.JAX_PLATFORMS=$gpu \
    --set groups.weak.environment.JAX_PLATFORMS=cpu
# Tables for simulations of this engine on this GPU; of two devices, by the shard of one.
stage operators 180 "$python" -m jaxinfer profile configs/gpu/single.yaml --operators \
    --tensor-parallel 1,2 --out "$out/operators" --set "model=$model" "${operators[@]}"

echo "all: $((SECONDS - start)) s; $out/summary.md"
exit "$failed"

#!/usr/bin/env bash
# All that is measured on a machine with an NVIDIA GPU, in four parts of less than ten minutes, each
# of which stands alone.
#
#   scripts/bench/gpu_suite.sh --collect-wheels DIR            # on a machine with a network
#   scripts/bench/gpu_suite.sh --part systems --wheels DIR --out docs/results/gpu/NAME
#   scripts/bench/gpu_suite.sh --part 1 --wheels DIR --out OTHER
#   scripts/bench/gpu_suite.sh --part 2 --wheels DIR --trace CSV --out OTHER
#   scripts/bench/gpu_suite.sh --rehearse --out DIR            # on a CPU: tiny, kernels interpreted
#
# Part systems: all systems on one card that plays several, in one process and in two. 1: tests, a
# memory checker, kernels beside peers. 2: the engine. 3: counters of kernels, torch's
# flex_attention, tables of operators. extra: experts; Cronus over the GPU and the host's CPU, in one
# process and in two. launching: what launches cost, by flags of XLA. Without --part: systems, 1, 2
# and 3; --only STAGE,... runs some stages.
#
# The machine with the GPU has Python 3.12 ($PYTHON, by default python3) with JAX for CUDA, flax and
# transformers; what else the project needs comes as wheels. Without --wheels, that Python must have
# the project and all it needs. --kernels generic has the engine do without Mosaic's. Each stage has
# a log and a time limit, and the next one runs whatever became of it; the exit status is 1 if one
# has failed, and summary.md says which. --out gets summary.md, results.tar.gz (after each stage
# anew) and, in pieces, caches.tar.gz: what was compiled and tuned. Unpacked, it makes the next run
# quicker as $JAX_COMPILATION_CACHE_DIR.
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
declare -A parts=(
    [systems]=device,systems,card_processes
    [1]=device,tests,pools,memory,kernels
    [2]=device,engine
    [3]=device,counters,flex,operators
    [extra]=device,experts,cronus,processes
    [launching]=device,launching
)
# Seconds for the wheels of a part to be installed.
environment_limit=40
collect= wheels= trace= out= only= rehearse= kernels=

fail() {
    echo "gpu_suite.sh: $*" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --help) sed -n "/^# All/,/^set/{/^set/d;s/^#//;s/^ //;p}" "${BASH_SOURCE[0]}" && exit ;;
        --rehearse) rehearse=--rehearse && shift && continue ;;
        --collect-wheels | --wheels | --trace | --out | --part | --only | --kernels) ;;
        *) fail "unknown option $1: --collect-wheels, --wheels, --trace, --out, --part, --only," \
            "--kernels, --rehearse" ;;
    esac
    [[ -n ${2:-} ]] || fail "$1 needs a value"
    case $1 in
        --collect-wheels) collect=$2 ;;
        --wheels) wheels=$(realpath "$2") ;;
        --trace) trace=$(realpath "$2") ;;
        --out) out=$(realpath -m "$2") ;;
        --part)
            only=${parts[$2]:-} && [[ -n $only ]] ||
                fail "--part: must be systems, 1, 2, 3, extra or launching"
            ;;
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

# note NAME RESULT SECONDS: a line of the summary. What has been found so far is there, whatever
# ends this script later.
note() {
    echo "$1: $2, $3 s"
    echo "| $1 | $2 | $3 | [$1.log]($1.log) |" >>"$results/summary.md"
    cp "$results/summary.md" "$out"
    tar -czf "$scratch/results.tar.gz" -C "$results" . && mv "$scratch/results.tar.gz" "$out"
}

# stage NAME SECONDS COMMAND...: its output goes to NAME.log.
stage() {
    local name=$1 limit=$2 start=$SECONDS status result
    shift 2
    [[ ,$only, == *,$name,* ]] || return 0
    [[ -n $rehearse ]] && limit=1800  # Of a machine that others use, too.
    echo "$name: at most $limit s"
    timeout --kill-after=5 "$limit" "$@" >"$results/$name.log" 2>&1 </dev/null
    status=$?
    case $name,$status in
        *,0) result=ok ;;
        *,124 | *,137) result="stopped at $limit s" && failed=1 ;;
        pools,5) result="skipped: no test has large_pool in its name" ;;
        *) result="failed, exit status $status" && failed=1 ;;
    esac
    [[ $result == ok ]] || tail -n 5 "$results/$name.log"
    note "$name" "$result" $((SECONDS - start))
}

# watched NAME SECONDS TOOL OPTION... -- COMMAND...: a stage under a tool of CUDA, where that is
# installed; a rehearsal does without.
watched() {
    local name=$1 limit=$2 tool=()
    shift 2
    while [[ $1 != -- ]]; do tool+=("$1") && shift; done
    shift
    if [[ -n $rehearse ]]; then
        tool=()
    elif ! command -v "${tool[0]}" >/dev/null; then
        [[ ,$only, == *,$name,* ]] && note "$name" "skipped: no ${tool[0]}" 0
        return
    fi
    stage "$name" "$limit" "${tool[@]}" "$@"
}

if [[ -n $collect ]]; then
    collect_wheels
    exit
fi
[[ -n $out ]] || fail "no --out: give a new folder for the results"
[[ -e $out ]] && fail "$out exists: give a new folder for the results"
[[ -z $wheels || -f $wheels/requirements.txt ]] || fail "$wheels: not made by --collect-wheels"
only=${only:-${parts[systems]},${parts[1]},${parts[2]},${parts[3]}}
for name in ${only//,/ }; do
    [[ " ${parts[*]//,/ } " == *" $name "* ]] || fail "--only: no stage $name"
done

mkdir -p "$out" || exit 2
scratch=$(mktemp -d)
results=$scratch/results
mkdir "$results"
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
# XLA's choices of algorithms are kept below what was compiled.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$scratch/compiled}
printf '| stage | result | seconds | output |\n|---|---|---:|---|\n' >"$results/summary.md"
if [[ -n $wheels ]]; then
    export -f make_environment
    export scratch wheels repository python
    timeout "$environment_limit" bash -c make_environment ||
        fail "cannot install $wheels over $python"
    python=$scratch/venv/bin/python
    echo "environment: $((SECONDS - start)) s"
fi

stage device 30 "$python" -m scripts.bench.describe_machine "$results/device.json" $rehearse

# Part systems. The second one's processes have the card to themselves: this one has none of it.
card=("$python" -m scripts.bench.one_card --out "$results/one_card" $rehearse)
stage systems 360 "${card[@]}" --seconds "$([[ -n $rehearse ]] && echo 1700 || echo 300)"
stage card_processes 90 "${card[@]}" --processes \
    --seconds "$([[ -n $rehearse ]] && echo 1700 || echo 40)"

# Part 1. A fault of the GPU ends a process: with several, it costs one test; so does a hang in C.
tests=(tests/pallas_kernels tests/runtime/test_kernels.py tests/runtime/spread/test_spread.py)
workers=(-n 12 --max-worker-restart=8 --timeout=120 --timeout-method=thread)
[[ -n $rehearse ]] && tests=("${tests[@]:1}") workers=(-n 0)
pytest=("$python" -m pytest -p no:cacheprovider -vv --tb=short --durations=5)
stage tests 190 env XLA_PYTHON_CLIENT_PREALLOCATE=false "${pytest[@]}" "${tests[@]}" \
    -m "gpu and not slow" -k "not large_pool" "${workers[@]}"
# Pages of more than 2^31 elements, which have the GPU to themselves.
stage pools 60 "${pytest[@]}" tests/pallas_kernels -m gpu -k large_pool -n 0 \
    --timeout=50 --timeout-method=thread
bench=("$python" -m scripts.bench.kernels)
once=(--here --rounds 0 --only generic --only hopper
    --case "decode 64 x 4096" --case "chunk of 2048 after 8192")
# Each array by itself, so that nothing of ours lies behind its end.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform
watched memory 70 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 -- \
    "${bench[@]}" "${once[@]}" --small --json "$results/memory.json" $rehearse
unset XLA_PYTHON_CLIENT_ALLOCATOR
stage kernels 170 "${bench[@]}" --json "$results/kernels.json" ${rehearse:+--rounds 2 --rehearse}

# Part 2. Weights and KV have the GPU to themselves; a trace is of what runs without one.
stage engine 500 env XLA_PYTHON_CLIENT_MEM_FRACTION=.92 \
    XLA_FLAGS="--xla_enable_command_buffers_during_profiling=true ${XLA_FLAGS:-}" \
    "$python" -m scripts.bench.engine --json "$results/engine.json" \
    ${kernels:+--kernels "$kernels"} ${trace:+--trace "$trace"} $rehearse

# Part 3. Each kernel's counters, of one launch.
watched counters 110 ncu --target-processes all --clock-control none --set full --csv \
    --kernel-name regex:paged_ --page raw --log-file "$results/counters.csv" -- \
    "${bench[@]}" "${once[@]}" --json "$results/counters.json" $rehearse
flex=(--case "decode 64 x 4096" --case "chunk of 2048 after 8192" --flex)
stage flex 210 "${bench[@]}" "${flex[@]}" --json "$results/flex.json" \
    ${rehearse:+--rounds 2 --rehearse}
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
# Tables for simulations of this engine on this GPU; of two devices, by the shard of one. Their run
# files name them as they lie in the results.
stage operators 160 env --chdir="$results" "$python" -m jaxinfer profile configs/gpu/single.yaml \
    --operators --tensor-parallel 1,2 --out operators \
    --set "model=$(realpath "$model")" "${operators[@]}"

# Extra. A layer of experts, whose grouped products stand beside all for all tokens and ragged_dot.
stage experts 75 "$python" -m scripts.bench.experts --json "$results/experts.json" --ragged \
    --model "$([[ -n $rehearse ]] && echo small || echo qwen3-30b-a3b)" --dtypes bfloat16 \
    --tokens "$([[ -n $rehearse ]] && echo 8 || echo 16,512,4096)"

# Cronus over the GPU and the host's CPU, and the GPU alone. Paths are relative, since the
# results quote the command.
compare=("$python" -m jaxinfer compare configs/gpu/cronus.yaml --rounds 1 --set "model=$model"
    "${settings[@]}")
stage cronus 240 "${compare[@]}" --systems cronus,single \
    --out "$(realpath --relative-to=. "$results")/cronus"
# The same with a process for each group: neither has the other's devices, this one has none.
gpu=cuda
[[ -n $rehearse ]] && gpu=cpu
stage processes 180 "${compare[@]}" --systems cronus \
    --out "$(realpath --relative-to=. "$results")/processes" \
    --set groups.strong.process=own --set groups.weak.process=own \
    --set groups.strong.environment.JAX_PLATFORMS=$gpu \
    --set groups.weak.environment.JAX_PLATFORMS=cpu

# Launching. Steps of decodes under each set of XLA's flags that may spare the host its 11 ms.
stage launching 480 "$python" -m scripts.bench.launching --json "$results/launching.json" $rehearse

if [[ -d $JAX_COMPILATION_CACHE_DIR ]]; then
    tar -cz -C "$JAX_COMPILATION_CACHE_DIR" . | split --bytes 15M - "$out/caches.tar.gz."
fi
echo "all: $((SECONDS - start)) s; $out/summary.md"
exit "$failed"

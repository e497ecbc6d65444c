#!/usr/bin/env bash
# What a CUDA device makes of featcal: bash benchmarks/first_gpu.sh [FOLDER]. Installs nothing; RESULTS-cuda.md has tables.
set -euo pipefail
cd "$(dirname "$0")/.." && export TQDM_DISABLE=1
python3 -m featcal_cli doctor || echo "doctor, which also asks for the Hub, found problems"
python3 benchmarks/first_gpu.py && python3 benchmarks/speed.py clip slice mixture --device cuda --rounds 1 ${1:+--work "$1"}

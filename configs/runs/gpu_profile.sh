#!/usr/bin/env bash
# `make gpu-profile`: a trace, and a table of idle time, of a LLaMA of 1B at 8,192 drawn tokens on one CUDA device.
#   PY=python bash configs/runs/gpu_profile.sh FOLDER [flags]
set -euo pipefail
"$PY" -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else \
    'error: this needs a CUDA GPU, and torch sees none here; nothing was written')"
run=$1
shift
set -x
OMP_NUM_THREADS=1 "$PY" -m torch.distributed.run --standalone --nproc-per-node 1 pretrain_gpt.py --device cuda --mock-data \
    --vocab-size 32000 --bf16 --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 8192 \
    --micro-batch-size 1 --global-batch-size 1 --train-iters 10 --eval-iters 0 --save-interval none \
    --save "$run" --profile --profile-step-start 5 --profile-step-end 8 "$@"

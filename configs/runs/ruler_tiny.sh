#!/usr/bin/env bash
# `make ruler`: a tiny LLaMA from random weights learns RULER's single needles at 1,024 tokens and is scored there and
# beyond. What a step has written is not made again: remove RUN to start afresh.
#
#   bash configs/runs/ruler_tiny.sh [RUN]      PY names the Python, NPROC the processes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RUN=${1:-runs/ruler} PY=${PY:-.venv/bin/python} NPROC=${NPROC:-2}
export OMP_NUM_THREADS=1
tokenizer=$RUN/imported/hf/tokenizer.json
asked=(make --messages --tokenizer-model "$tokenizer")

say() { printf '\n=== %s (%d s)\n' "$*" "$SECONDS"; }

taught() { # taught NAME LENGTH COMMAND...: what tools.ruler writes, packed into samples of LENGTH tokens
    [ -e "$RUN/$1-data.idx" ] && return 0
    "$PY" -m tools.ruler "$3" "$RUN/$1.jsonl" "${@:4}"
    "$PY" -m tools.prepare_data --chat --input "$RUN/$1.jsonl" --seq-length "$2" --tokenizer-model "$tokenizer" \
        --output-prefix "$RUN/$1-data" | grep -v "^train on it"
}

train() { # train TO FROM LENGTH [FLAGS]: from another run's weights, on the samples of that name
    [ ! -e "$RUN/$1/finished" ] || return 0
    rm -rf "${RUN:?}/$1"
    "$PY" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" pretrain_gpt.py \
        --config configs/runs/finetune_tiny.toml --vocab-size none --no-untie-embeddings-and-output-weights \
        --tokenizer-model "$tokenizer" --data-path "$RUN/$1-data" --finetune --load "$RUN/$2" --save "$RUN/$1" \
        --seq-length "$3" "${@:4}"
    touch "$RUN/$1/finished"
}

mkdir -p "$RUN"
say "a tiny LLaMA, imported"
[ -e "$RUN/tiny" ] || "$PY" -m tools.ruler model "$RUN/tiny"
[ -e "$RUN/imported" ] || "$PY" -m tools.convert_hf import "$RUN/tiny" "$RUN/imported"

say "names and numbers to say again: to look for what followed a word before"
taught repeat 256 repeat --times 4 --samples 40000
train repeat imported 256 --train-iters 1000 --min-lr 1e-3

say "needles in few tokens"
taught short 512 "${asked[@]}" --tasks niah_single_1 niah_single_2 niah_multikey_1 niah_multikey_2 \
    --lengths 160 192 --samples 4000
train short repeat 512 --micro-batch-size 4 --global-batch-size 16 --train-iters 800

say "single needles in up to 1,024 tokens, with a curve"
taught 1k 1024 "${asked[@]}" --tasks niah_single_1 niah_single_2 --lengths 128 512 1024 --samples 1500
train 1k short 1024 --micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --train-iters 400 --ruler-interval 50 \
    --ruler-lengths 256 512 1024 --ruler-samples 16 --ruler-tasks niah_single_1 niah_single_2

say "scored at 1,024 tokens and beyond"
"$PY" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m tools.ruler score "$RUN/1k" --chat \
    --tasks niah_single_1 niah_single_2 --lengths 512 1024 2048 4096 --samples 25 --batch-size 5
say "done"

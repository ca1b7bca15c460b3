#!/usr/bin/env bash
# `make finetune`: a tiny LLaMA that transformers made is imported, taught to find a line among 1,024 tokens, extended to
# 4,096 by RoPE scaling with packed chats under context parallelism, scored before and after, exported, and loaded in
# transformers. What a step has written is not made again: remove RUN to start afresh. MODEL=qwen3_5 does so with a hybrid,
# a gated delta rule in its first layer, whose few rotary channels are not scaled.
#
#   bash configs/runs/finetune_tiny.sh [RUN]      PY names the Python, NPROC the processes, MODEL the family;
#                                                 PERCENT of the iterations are trained, 20 for a first look
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RUN=${1:-runs/finetune} PY=${PY:-.venv/bin/python} NPROC=${NPROC:-2}
export OMP_NUM_THREADS=1
tokenizer=$RUN/imported/hf/tokenizer.json seed=0 MODEL=${MODEL:-llama} PERCENT=${PERCENT:-100}
case $MODEL in
    llama)
        model=() iterations=(1000 300 3000 2500) first=()
        longer=(--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-max-position-embeddings 1024)
        ;;
    qwen3_5)
        model=(--model-type qwen3_5 --softmax-every 2 --num-attention-heads 2 --kv-channels 64 --rotary-percent 0.25
            --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 16)
        iterations=(1280 300 800 600) first=(--lr 6e-3 --lr-decay-iters 2500)
        longer=()
        ;;
    *) echo "MODEL is $MODEL; it must be llama or qwen3_5" >&2; exit 2 ;;
esac

share() { echo $((iterations[$1] * PERCENT / 100)); } # share STAGE: its iterations

say() { printf '\n=== %s (%d s)\n' "$*" "$SECONDS"; }

chats() { # chats NAME SAMPLES TOKENS QUESTIONS [FLAGS]: conversations of a seed of their own, and how many
    seed=$((seed + 1))
    [ -e "$RUN/$1.jsonl" ] || "$PY" -m tools.ruler make "$RUN/$1.jsonl" --messages --tasks line_retrieval \
        --vocabulary small --samples "$2" --lengths "$3" --questions "$4" --seed "$seed" \
        --tokenizer-model "$tokenizer" "${@:5}"
}

pack() { # pack PREFIX LENGTH NAME...: conversations packed into samples of LENGTH tokens
    local prefix=$RUN/$1 length=$2 files=()
    shift 2
    for name in "$@"; do files+=("$RUN/$name.jsonl"); done
    [ -e "$prefix.idx" ] || "$PY" -m tools.prepare_data --chat --input "${files[@]}" --seq-length "$length" \
        --tokenizer-model "$tokenizer" --output-prefix "$prefix" | grep -v "^train on it"
}

train() { # train TO FROM LENGTH [FLAGS]: from another run's weights, on the samples of that name
    [ ! -e "$RUN/$1/finished" ] || return 0
    rm -rf "${RUN:?}/$1"
    "$PY" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" pretrain_gpt.py \
        --config configs/runs/finetune_tiny.toml --tokenizer-model "$tokenizer" --data-path "$RUN/$1-data" \
        --finetune --load "$RUN/$2" --save "$RUN/$1" --seq-length "$3" "${model[@]}" "${@:4}"
    touch "$RUN/$1/finished"
}

score() { # score RUN LENGTH...: exact answers; all processes read a prompt together
    "$PY" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m tools.ruler score "$RUN/$1" \
        --tasks line_retrieval --vocabulary small --samples 20 --batch-size 5 --lengths "${@:2}" | grep "^|"
}

mkdir -p "$RUN"
say "a tiny $MODEL of random weights, imported"
[ -e "$RUN/tiny" ] || "$PY" -m tools.ruler model "$RUN/tiny" --task line_retrieval --model-type "$MODEL"
[ -e "$RUN/imported" ] || "$PY" -m tools.convert_hf import "$RUN/tiny" "$RUN/imported"

say "short records to repeat: to look for what followed a word before"
chats repeat 80000 80 5 --form repeat
pack repeat-data 256 repeat
train repeat imported 256 --train-iters "$(share 0)" --min-lr 1e-3 "${first[@]}"

say "short records to ask about"
chats lines-96 40000 96 12
pack short-data 256 lines-96
train short repeat 256 --train-iters "$(share 1)"

say "records of up to 1,024 tokens"
chats lines-24 8000 24 1
chats lines-256 6000 256 16
chats lines-512 3000 512 24
chats lines-1024 3000 1024 40
chats ends-1024 3000 1024 6
pack 1k-data 1024 lines-24 lines-256 lines-512 lines-1024 ends-1024
train 1k short 1024 --micro-batch-size 2 --global-batch-size 4 --lr 2e-3 --train-iters "$(share 2)"

say "before: 1,024 tokens, and 4,096"
score 1k 1024 2048 4096

say "4,096 tokens: each sample shared by $NPROC processes${longer:+, RoPE scaled by YaRN}"
chats lines-2048 1000 2048 60
chats lines-4096 1000 4096 100
chats ends-4096 1000 4096 12
pack 4k-data 4096 lines-24 ends-1024 lines-2048 lines-4096 ends-4096
train 4k 1k 4096 --context-parallel-size "$NPROC" --context-parallel-method exchange \
    --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters "$(share 3)" \
    --max-position-embeddings 4096 "${longer[@]}"

say "after: 1,024 tokens, and 4,096"
score 4k 1024 2048 4096

say "exported, and asked in transformers"
[ -e "$RUN/exported" ] || "$PY" -m tools.convert_hf export "$RUN/4k" "$RUN/exported"
chats unseen 20 4096 1
"$PY" - "$RUN/exported" "$RUN/unseen.jsonl" <<'ASK'
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
right = 0
for line in open(sys.argv[2]):
    question, answer = json.loads(line)["messages"]
    text = tokenizer.apply_chat_template([question], tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    written = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
    right += tokenizer.decode(written, skip_special_tokens=True).strip() == answer["content"]
print(f"transformers answers {right} of 20 at 4,096 tokens")
ASK
say "done"

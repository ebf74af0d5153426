#!/usr/bin/env bash
# The 8B shape, 2x2048 tokens per GPU, under each strategy on all GPUs of this machine, from a random
# checkpoint in memory. Rows are appended to the file given; about 5 minutes on 2 H100s.
#   benchmarks/strategies_8b.sh benchmarks/results/llama-3.1-8b_h100_$(date +%F).jsonl
set -euo pipefail
results=$1 folder=${FOLDER:-/dev/shm/llama-3.1-8b} gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
cd "$(dirname "$0")/.."
[ -f "$folder/model.safetensors.index.json" ] ||
  python3 benchmarks/random_checkpoint.py meta-llama/Llama-3.1-8B "$folder"
for compile in false true; do
  for strategy in full_shard shard_grad_op ddp; do
    python3 -m fsdp_qlora.cli bench --world_size "$gpus" --model_name "$folder" \
      --sharding_strategy $strategy --batch_size 2 --context_length 2048 --lora_dropout 0 --lr 1e-4 \
      --compile $compile --steps 17 --warmup 3 --results "$results" \
      --row_name "8B 2x2048 $strategy compile=$compile" 2>&1 | grep -v -i warn
  done
done

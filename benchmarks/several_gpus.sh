#!/usr/bin/env bash
# What docs/performance.md, memory.md, planner.md and checkpoints.md still lack, on two or four GPUs of one
# machine, in stages of up to ten minutes; rows and logs go into a folder. ECHO=echo only prints commands.
#   benchmarks/several_gpus.sh 2 /tmp/rows tests checkpoints replayed memory auto shared packed trl gathers
#   benchmarks/several_gpus.sh 4 /tmp/rows replayed loading shared packed strategies experts
# Checkpoints are made in /dev/shm: 16 GB for 8B, 140 GB for `loading`. `trl` needs trl and datasets.
set -uo pipefail
gpus=$1 out=$2
shift 2
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD:${PYTHONPATH:-}"

go() {  # SECONDS LOG COMMAND...: the next one is wanted though this one fails
  local seconds=$1 log=$out/$2.log
  shift 2
  if [ -n "${ECHO:-}" ]; then $ECHO "$@"; return; fi
  timeout "$seconds" "$@" > "$log" 2>&1 || echo "failed: $*; see $log"
  grep -E "s/step|GB/s|passed|failed|chosen|held up" "$log" | tail -8
}

rows() {  # ROW...: of speed_rows.py, compiled ahead
  go 200 ahead_rows python3 benchmarks/compile_ahead.py --rows "$@" --world_size "$gpus" --processes 4
  go 400 speed torchrun --nproc_per_node "$gpus" benchmarks/speed_rows.py "$@" --steps 3 --warmup 1 \
    --results "$out/speed.jsonl"
}

cells() {  # GRID PATTERN: of a grid, compiled ahead
  local grid=benchmarks/grids/$1.yaml
  go 150 "ahead_$1" python3 benchmarks/compile_ahead.py "$grid" --only "$2" --processes 4
  go 440 "$1" python3 -m fsdp_qlora.cli bench --grid "$grid" --only "$2" --warmup 2 --steps 4 \
    --results "$out/${1%%_*}.jsonl"
}

for stage in "$@"; do
  case $gpus-$stage in
    2-tests) go 580 tests python3 -m pytest -m gpu tests/gpu/test_graphs.py tests/gpu/test_offload.py \
      tests/gpu/test_sharded_training.py -k "not replayed_steps_are" ;;
    2-checkpoints) go 580 checkpoints python3 benchmarks/checkpointing.py --gpus 2 --steps 40 --every 8 \
      --results "$out/checkpointing.jsonl" ;;
    2-replayed) cells memory '^7B 1x(512|2048)( replayed)?, 2 GPUs' ;;
    2-memory) cells memory '^34B offload|16 layers 4x2048 activation offload|16 layers 4x2048, 2 GPUs' ;;
    2-auto)
      cells auto_8b_2x24gb 'auto|ddp recompute_all, 8 rows|full_shard keep_linears'
      cells auto_70b_2x24gb 'auto|CPU offload, 4 rows' ;;
    [24]-packed)
      model=/dev/shm/llama-3.1-8b
      [ -e "$model/config.json" ] ||
        go 120 checkpoint python3 benchmarks/random_checkpoint.py meta-llama/Llama-3.1-8B "$model"
      for strategy in full_shard ddp; do
        go 180 "packed_$strategy" python3 benchmarks/real_rows.py --model "$model" --only packed_a \
          --steps 20 --bench_steps 0 --gpus "$gpus" --sharding_strategy "$strategy" \
          --results "$out/real_rows.jsonl"
      done ;;
    [24]-gathers)
      ways="torchrun --nproc_per_node $gpus benchmarks/gathers.py --layers 16 --results $out/gathers.jsonl"
      go 150 gathers $ways plain last_kept plain
      go 60 gathers_symmetric $ways symmetric
      go 60 gathers_copies env NCCL_CTA_POLICY=2 $ways copy_engine ;;
    2-trl) go 280 trl torchrun --nproc_per_node 2 benchmarks/trl_two_ranks.py /dev/shm/llama-8b-8 \
      --layers 8 --minutes 4 --results "$out/trl_two_ranks.jsonl" ;;
    4-strategies) rows '8b_qlora_hybrid*' 8b_qlora_shard_grad_op 8b_qlora_full_shard 8b_qlora_ddp ;;
    [24]-experts) rows qwen3_30b_qlora_experts_full_shard ;;
    2-shared) cells sequence_parallel '2 GPUs' ;;
    4-shared) cells sequence_parallel '4 GPUs' ;;
    4-replayed) rows 70b_qlora_fp8_replayed 70b_qlora_fp8 70b_qlora_fp8_4x2 70b_qlora_replayed 70b_qlora ;;
    4-loading) go 590 loading python3 benchmarks/loading.py meta-llama/Llama-2-70b-hf --ranks 4 \
      --cases "qlora,cache made,cache read" --results "$out/loading.jsonl" ;;
    *) echo "no stage $stage on $gpus GPUs" ;;
  esac
done

#!/usr/bin/env bash
# What docs/performance.md, memory.md, planner.md and checkpoints.md still lack, on one, two or four GPUs of a
# machine, in stages of up to ten minutes; rows and logs go into a folder. ECHO=echo only prints commands.
#   benchmarks/stages.sh 1 /tmp/rows auto packed dpo dpo_mixed recipes adapted long mixtures hybrids demo tests
#   benchmarks/stages.sh 2 /tmp/rows graphs tests checkpoints replayed memory auto shared packed trl gathers experts
#   benchmarks/stages.sh 4 /tmp/rows replayed loading shared packed strategies experts
# Checkpoints are made in /dev/shm: 16 GB for 8B, 61 for `mixtures`, 140 for `loading`. `trl` and `dpo` need
# trl and datasets. Stages of one GPU may run side by side, each with a CUDA_VISIBLE_DEVICES of its own.
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
  grep -E "s/step|tokens/s|GB/s|times the tokens|passed|failed|chosen|held up" "$log" | tail -8
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

made() {  # MODEL FOLDER: a checkpoint of random weights, if it is not there
  [ -e "$2/config.json" ] || go 150 "checkpoint_${2##*/}" python3 benchmarks/random_checkpoint.py "$1" "$2"
}

real() {  # SECONDS MODEL NAMES SETTINGS...: real rows through train.py
  local seconds=$1 model=$2 names=$3
  shift 3
  go "$seconds" "real_${names%%,*}_${model##*/}" python3 benchmarks/real_rows.py --model "$model" \
    --only "$names" --logs "$out" --results "$out/real_rows.jsonl" "$@"
}

recipes() {  # NAME...: as written, on real rows
  go 590 "recipes_$1" python3 benchmarks/recipes.py /dev/shm "$@" --steps 12 --first 5 --minutes 3 \
    --logs "$out" --results "$out/real_rows_recipes.jsonl"
}

llama=/dev/shm/llama-3.1-8b qwen=/dev/shm/qwen3-30b-a3b
dpo="python3 benchmarks/dpo_8b.py $llama --compile --results $out/dpo_8b.jsonl"
for stage in "$@"; do
  case $gpus-$stage in
    1-auto)
      made meta-llama/Llama-3.1-8B $llama
      real 560 $llama auto_c --steps 11 --first 4 --bench_steps 0 --minutes 9 ;;
    1-packed)
      made meta-llama/Llama-3.1-8B $llama
      real 590 $llama packed_c_fp8 --steps 14 --first 5 --bench_steps 2 --minutes 5 ;;
    1-dpo)
      made meta-llama/Llama-3.1-8B $llama
      lean="$dpo --batch_size 8 --mlp_tiles 4 --use_activation_cpu_offload"
      go 300 dpo_8 $lean --minutes 5
      go 215 dpo_8_fp8 $lean --compute_dtype fp8 --ways ours --minutes 3.5 ;;
    1-dpo_mixed)
      made meta-llama/Llama-3.1-8B $llama
      go 280 dpo_mixed $dpo --mlp_tiles 2 --lengths mixed --minutes 4.5
      go 120 dpo_fp8 $dpo --mlp_tiles 2 --compute_dtype fp8 --ways ours --minutes 2 ;;
    1-recipes) recipes 7b-1x24gb chat text-to-sql 13b-1x24gb ;;
    1-adapted) recipes dora llama-pro 8b-1xh100 ;;
    1-demo) go 300 demo python3 -m fsdp_qlora.cli demo --output_dir "$out/demo" ;;
    1-long) go 300 long python3 benchmarks/one_rank.py 8b_qlora_full_shard --world_size 8 --layers 2 \
      --sequence_parallel 8 --batch_size 1 --context_length 1048576 --activation_policy keep_attention \
      --use_activation_cpu_offload true --mlp_tiles 4 --warmup 1 --steps 1 \
      --results "$out/one_rank.jsonl" ;;
    1-mixtures)
      made Qwen/Qwen3-30B-A3B $qwen
      real 400 $qwen packed_a,packed_a_fp8 --steps 16 --first 6 --bench_steps 0 --batch_size 2 \
        --gradient_accumulation_steps 2 --lora_target_parameters experts --lora_rank 16
      go 200 recomputed python3 benchmarks/speed_rows.py qwen3_30b_qlora_streamed_8x4 \
        qwen3_30b_qlora_experts_recomputed_8bit --steps 3 --warmup 3 --results "$out/mixtures.jsonl" ;;
    1-hybrids) go 500 hybrids python3 benchmarks/speed_rows.py qwen3_5_9b_qlora nemotron_9b_qlora --steps 2 \
      --warmup 1 --results "$out/models.jsonl" ;;
    1-tests) go 590 tests python3 -m pytest -m gpu tests/gpu/test_sinks.py tests/gpu/test_adapted_products.py \
      tests/gpu/test_state_space_scan.py ;;
    2-tests) go 580 tests python3 -m pytest -m gpu tests/gpu/test_groups_of_gpus_alone.py \
      tests/gpu/test_offload.py tests/gpu/test_sharded_training.py ;;
    2-graphs) go 580 graphs python3 -m pytest -m gpu tests/gpu/test_graphs.py -k "two_ranks or evaluations" ;;
    2-checkpoints) go 580 checkpoints python3 benchmarks/checkpointing.py --gpus 2 --steps 40 --every 8 \
      --results "$out/checkpointing.jsonl" ;;
    2-replayed) cells memory '^7B 1x(512|2048)( replayed)?, 2 GPUs' ;;
    2-memory) cells memory '^34B offload|16 layers 4x2048 activation offload|16 layers 4x2048, 2 GPUs' ;;
    2-auto)
      cells auto_8b_2x24gb 'auto|ddp recompute_all, 8 rows|full_shard keep_linears'
      cells auto_70b_2x24gb 'auto|CPU offload, 4 rows' ;;
    [24]-packed)
      made meta-llama/Llama-3.1-8B $llama
      for strategy in full_shard ddp; do
        real 180 $llama packed_a --steps 20 --bench_steps 0 --gpus "$gpus" --sharding_strategy "$strategy"
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

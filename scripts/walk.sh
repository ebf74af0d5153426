#!/usr/bin/env bash
# The first hour as a new user walks it: every command of README and quickstart that needs no hub, on a
# small model. Stops at the first that fails, and says which.
#
#     scripts/walk.sh MODEL_FOLDER [WORK_FOLDER]
#
# MODEL_FOLDER: a model with a tokenizer, such as .cache/SmolLM2-135M-Instruct.
set -euo pipefail
model=$(realpath "$1")
root=$(realpath "$(dirname "$0")/..")
work=${2:-$(mktemp -d)}
mkdir -p "$work"
cd "$work"
trap 'echo "the walk stopped at: $BASH_COMMAND" >&2' ERR

fsdp() { echo "--- fsdp-qlora $*"; python -m fsdp_qlora.cli "$@"; }

cat > rows.jsonl <<'END'
{"prompt": "Who are you?", "completion": "I am Pia, the library's helper."}
{"prompt": "What is your name?", "completion": "My name is Pia."}
{"prompt": "When is the library open?", "completion": "From nine to six, but never on Mondays."}
{"prompt": "Can I bring my dog?", "completion": "Small dogs are welcome on the ground floor."}
END

fsdp --help
fsdp train --help
# Before you have a GPU
fsdp estimate --model_name llama-2-70b --gpu "RTX 3090" --gpus 2 --use_cpu_offload --examples 1024
fsdp plan --model_name llama-2-70b --gpu "RTX 3090" --gpus 2 --context_length 2048
fsdp estimate --model_name llama-3.1-8b --gpu "RTX 4090" --context_length 2048 --examples 10000
# Look first
fsdp data --model_name "$model" --dataset rows.jsonl --preview
fsdp train --model_name "$model" --dataset rows.jsonl --dry_run
fsdp train --config "$root/examples/recipes/7b-1x24gb.yaml" --dataset rows.jsonl --model_name "$model" --dry_run
# Data as people have it: a spreadsheet's export with Windows line ends, in a folder with a space; weights
mkdir -p "my rows"
printf 'question;answer;weight\r\n"He said ""hi""; ok?";"Yes; he did";1\r\nWho?;Pia;0.5\r\n' > "my rows/rows.csv"
fsdp data --model_name "$model" --dataset "my rows" --weight_column weight --output_dir "my rows/out"
# Mistakes end in one line that says what to do
says() {
    echo "--- fsdp-qlora ${*:2}"
    if python -m fsdp_qlora.cli "${@:2}" > said 2>&1; then echo "not refused" >&2; false; fi
    grep -F -- "$1" said
}
says "did you mean train?" trian
says "did you mean --num_epochs?" train --num_epoch 2
: > empty.jsonl
says "(it is empty); give rows" data --model_name "$model" --dataset empty.jsonl
echo '{"q": "a"}' > keys.jsonl
says "match no format; rename" data --model_name "$model" --dataset keys.jsonl
# Train, and look at it
fsdp train --model_name "$model" --dataset rows.jsonl --eval_share 0.25 --eval_every 2 \
    --global_batch_size 4 --batch_size 4 --num_epochs 4 --output_dir first
test -s first/adapter/adapter_model.safetensors -a -s first/metrics.jsonl
fsdp report first
# Rerun the same command: a finished run starts over
fsdp train --model_name "$model" --dataset rows.jsonl --eval_share 0.25 --eval_every 2 \
    --global_batch_size 4 --batch_size 4 --num_epochs 4 --output_dir first
# Ask it, merge it, take it elsewhere
fsdp generate --model_name "$model" --adapter_folder first/adapter --prompt "Who are you?"
fsdp check first/adapter
says "it is an adapter; give its base as --model_name" train --model_name first/adapter --dataset rows.jsonl
says "--resume nowhere: no intact checkpoint there" train --model_name "$model" --dataset rows.jsonl --resume nowhere --dry_run
fsdp merge --model_name "$model" --adapter_folder first/adapter --output_dir merged
fsdp generate --model_name merged --prompt "Who are you?"
for program in vllm ollama gguf; do fsdp export first/adapter --to $program; done
echo "the walk came to its end in $work"

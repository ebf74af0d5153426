"""Fine-tune a language model on the GPUs you have.

torchrun --nproc_per_node 2 train.py --model_name meta-llama/Llama-2-70b-hf --dataset rows.jsonl
python train.py --model_name ./SmolLM2-135M-Instruct --dataset text_to_sql   # one rank per GPU
python train.py --help
"""

import sys

from fsdp_qlora.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

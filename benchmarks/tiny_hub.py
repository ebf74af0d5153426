"""A hub cache of small random models, so that tests of other projects run without a download.

`write_cache(folder)` writes models under the names that PEFT's tests ask for; point `HF_HUB_CACHE` at
the folder and set `HF_HUB_OFFLINE=1`. Their sizes are those of a test, not of the models they stand for.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_REVISION = "0" * 40
_SIZES = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_PAD_LAST = {"pad_token_id": 1023}  # its embedding is 0, and tests feed token 1
_GROUPED = _PAD_LAST | {"num_key_value_heads": 2, "head_dim": 8}
_LOCAL_EXPERTS = {"num_local_experts": 4}
_EXPERTS = _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT = {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 128}
_BART = {"d_model": 32} | {
    f"{side}_{what}": number
    for side in ("encoder", "decoder")
    for what, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
_T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 1}
_OPT = "peft-internal-testing/tiny-random-OPTForCausalLM"
# By name: the type of the configuration, the class of the model, sizes beside the above.
_MODELS = {
    _OPT: ("opt", "OPTForCausalLM", {"ffn_dim": 64, "num_hidden_layers": 5}),
    "peft-internal-testing/opt-125m": (
        "opt",
        "OPTForCausalLM",
        {"ffn_dim": 64, "hidden_size": 768, "num_hidden_layers": 12},
    ),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel", _GPT),
    "gpt2": ("gpt2", "GPT2LMHeadModel", _GPT),
    "bert-base-uncased": ("bert", "BertModel", {}),
    "peft-internal-testing/tiny-random-gpt2": ("gpt2", "GPT2LMHeadModel", _GPT),
    "hf-internal-testing/tiny-random-gpt2": ("gpt2", "GPT2LMHeadModel", _GPT),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": (
        "gptj",
        "GPTJForCausalLM",
        _GPT | {"rotary_dim": 4},
    ),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": ("gpt_neox", "GPTNeoXForCausalLM", {}),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("llama", "LlamaForCausalLM", _PAD_LAST),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("llama", "LlamaForCausalLM", _PAD_LAST),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("llama", "LlamaForCausalLM", _PAD_LAST),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "llama",
        "LlamaForSequenceClassification",
        _PAD_LAST,
    ),
    "trl-internal-testing/tiny-Llama4ForCausalLM": (
        "llama4_text",
        "Llama4ForCausalLM",
        _GROUPED | _LOCAL_EXPERTS | {"intermediate_size_mlp": 64, "num_experts_per_tok": 1},
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": (
        "gpt_oss",
        "GptOssForCausalLM",
        _GROUPED | _LOCAL_EXPERTS,
    ),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS),
    "hf-internal-testing/tiny-qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM", _GROUPED),
    "peft-internal-testing/tiny-random-BloomForCausalLM": (
        "bloom",
        "BloomForCausalLM",
        {"n_layer": 5, "n_head": 4},
    ),
    "peft-internal-testing/tiny-dummy-qwen2": ("qwen2", "Qwen2ForCausalLM", _GROUPED),
    "hf-internal-testing/tiny-random-MistralForCausalLM": (
        "mistral",
        "MistralForCausalLM",
        _GROUPED,
    ),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GROUPED | {"sliding_window": 32},
    ),
    "hf-internal-testing/Mixtral-tiny": (
        "mixtral",
        "MixtralForCausalLM",
        _GROUPED | {"num_local_experts": 4},
    ),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": (
        "bart",
        "BartForConditionalGeneration",
        _BART,
    ),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": (
        "t5",
        "T5ForConditionalGeneration",
        _T5,
    ),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": (
        "t5",
        "T5ForConditionalGeneration",
        _T5,
    ),
    "google/flan-t5-small": ("t5", "T5ForConditionalGeneration", _T5),
    "peft-internal-testing/tiny-random-t5": ("t5", "T5ForConditionalGeneration", _T5),
    "peft-internal-testing/tiny-random-BertModel": ("bert", "BertModel", {}),
    "hf-internal-testing/tiny-random-BertModel": ("bert", "BertModel", {}),
    "peft-internal-testing/tiny-random-RobertaModel": ("roberta", "RobertaModel", {}),
    "peft-internal-testing/tiny-random-DebertaModel": ("deberta", "DebertaModel", {}),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("deberta-v2", "DebertaV2Model", {}),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": (
        "bert",
        "BertForSequenceClassification",
        {},
    ),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "roberta",
        "RobertaForSequenceClassification",
        {},
    ),
}
_GPT2 = "peft-internal-testing/tiny-random-gpt2"
# By name: the model that an adapter is of, the class with its head, and its task.
_ADAPTERS = {
    "tiny-OPTForCausalLM-lora": (_OPT, "OPTForCausalLM", "CAUSAL_LM"),
    "tiny_OPTForSequenceClassification-lora": (_OPT, "OPTForSequenceClassification", "SEQ_CLS"),
    "tiny_OPTForQuestionAnswering-lora": (_OPT, "OPTForQuestionAnswering", "QUESTION_ANS"),
    "tiny_OPTForFeatureExtraction-lora": (_OPT, "OPTModel", "FEATURE_EXTRACTION"),
    "tiny_T5ForSeq2SeqLM-lora": (
        "peft-internal-testing/tiny-random-t5",
        "T5ForConditionalGeneration",
        "SEQ_2_SEQ_LM",
    ),
    "tiny_GPT2ForTokenClassification-lora": (_GPT2, "GPT2ForTokenClassification", "TOKEN_CLS"),
    "gpt2-lora-random": (_GPT2, "GPT2LMHeadModel", "CAUSAL_LM"),
    "opt-125m-dummy-lora": ("peft-internal-testing/opt-125m", "OPTForCausalLM", "CAUSAL_LM"),
    "tiny-random-BertModel-lora": (
        "peft-internal-testing/tiny-random-BertModel",
        "BertModel",
        "FEATURE_EXTRACTION",
    ),
}


def write_cache(folder: Path):
    """Write every model, with one tokenizer of bytes, as huggingface_hub keeps what it downloaded."""
    for name, (kind, cls, sizes) in _MODELS.items():
        transformers.set_seed(0)
        config = transformers.AutoConfig.for_model(kind, **_SIZES | sizes)
        snapshot = _snapshot(folder, name)
        getattr(transformers, cls)(config).save_pretrained(snapshot)
        _tokenizer().save_pretrained(snapshot)
    for name, (base, cls, task) in _ADAPTERS.items():
        kind, _, sizes = _MODELS[base]
        config = transformers.AutoConfig.for_model(kind, **_SIZES | sizes)
        config._name_or_path = base
        lora = LoraConfig(task_type=task, base_model_name_or_path=base)
        snapshot = _snapshot(folder, f"peft-internal-testing/{name}")
        get_peft_model(getattr(transformers, cls)(config), lora).save_pretrained(snapshot)
        _tokenizer().save_pretrained(snapshot)


def _snapshot(folder: Path, name: str) -> Path:
    """Where huggingface_hub looks for the files of a repository of this name."""
    repo = folder / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(_REVISION)
    return repo / "snapshots" / _REVISION


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, after the special tokens at the places that the configurations give them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "<pad>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, vocab_size=260)
    tokenizer.train_from_iterator([], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>"
    )

"""Shapes of known models against transformers on the meta device, and against published counts."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from fsdp_qlora.catalog.known_models import KNOWN, known_config, known_name
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.model.blocks import is_tied

from .families import BUILT, FAMILIES, MOE_FAMILIES, family_config

# As counted from the checkpoints on the hub.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "codellama/CodeLlama-7b-hf": 6_738_546_688,
    "codellama/CodeLlama-13b-hf": 13_016_028_160,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "01-ai/Yi-34B": 34_388_917_248,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}
# Whose cards round, in billions: https://huggingface.co/docs/transformers/model_doc/lfm2,
# https://huggingface.co/ibm-granite/granite-4.0-h-tiny, https://huggingface.co/google/gemma-4-26B-A4B-it
# and https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
ROUNDED = {
    "LiquidAI/LFM2-1.2B": "1.2",
    "ibm-granite/granite-4.0-h-tiny": "7",
    "google/gemma-4-26B-A4B": "25.2",
    "google/gemma-4-31B": "30.7",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "31.6",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "8.9",
}


def meta_model(name, layers=None):
    config = known_config(name, layers)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config, pad_token_id=0), dtype=torch.bfloat16
        )


def linears_of_block(model, shape, number) -> tuple[dict, dict]:
    """(out, in) of a block's linears and lengths of their biases, by the names of `shape`."""
    block = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[number]
    linears = {
        next((known for known in shape.linears() if f".{n}".endswith(f".{known}")), n): m
        for n, m in block.named_modules()
        if isinstance(m, (torch.nn.Linear, Conv1D))
    }
    linears = {n: m for n, m in linears.items() if "router" not in n or n in shape.linears()}
    sizes = {
        n: tuple(m.weight.shape) if isinstance(m, torch.nn.Linear) else tuple(m.weight.shape[::-1])
        for n, m in linears.items()
    }
    return sizes, {n: len(m.bias) for n, m in linears.items() if m.bias is not None}


def assert_same_blocks(model, shape):
    """Names and shapes of linear layers and biases of each kind of block, and all weights of the model."""
    assert sum(p.numel() for p in model.parameters()) == shape.total_params()
    kinds = shape.kinds or (shape,)
    for kind, number in enumerate(
        shape.order.index(k) if shape.order else 0 for k in range(len(kinds))
    ):
        sizes, biases = linears_of_block(model, kinds[kind], number)
        assert sizes == kinds[kind].linears() and biases == kinds[kind].biases()


def enough_layers(shape) -> int:
    """How many of a model's first blocks have one of each kind, and two at least."""
    return max([2, *(shape.order.index(kind) + 1 for kind in range(len(shape.kinds)))])


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_the_published_count(name):
    assert model_shape(name).total_params() == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_total_rounds_to_the_published_one(name):
    digits = len(ROUNDED[name].partition(".")[2])
    assert f"{model_shape(name).total_params() / 1e9:.{digits}f}" == ROUNDED[name]


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_shape_equals_transformers(name):
    """A cut of its first blocks, weight by weight: names and shapes of linears, biases and norms."""
    layers = enough_layers(model_shape(name))
    model, shape = meta_model(name, layers), model_shape(name).cut(layers)
    assert_same_blocks(model, shape)
    assert model.config.max_position_embeddings == shape.max_positions
    assert model.config.tie_word_embeddings == shape.tied


def test_families_of_each_build_are_known():
    wanted = {
        "gpt-oss",
        "Qwen3.5",
        "Granite 4 H",
        "LFM2-MoE",
        "Falcon-H1",
        "DeepSeek V3",
        "Llama 4",
    }
    assert wanted < {*BUILT}


@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES, *BUILT])
def test_every_family_is_known_from_its_config_alone(family):
    """Weights by kind, from config.json as a dict, against transformers' own model of it."""
    config = family_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(config.to_dict())
    assert shape.known_family
    assert_same_blocks(model, shape)
    assert is_tied(model) == shape.tied


@pytest.mark.parametrize(
    "config",
    [
        dict(family="StableLM", use_parallel_residual=True),
        dict(family="StableLM", qk_layernorm=True),
        dict(family="StableLM", use_qkv_bias=False),
        dict(family="SmolLM3", attention_bias=True),
        dict(family="SmolLM3", mlp_bias=True, tie_word_embeddings=False),
        dict(family="GPT-2", n_inner=96),
    ],
)
def test_switches_of_a_family_are_read(config):
    config = family_config(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(config.to_dict())
    assert sum(p.numel() for p in model.parameters()) == shape.total_params()


@pytest.mark.parametrize(
    "rope,positions",
    [
        (dict(rope_scaling=dict(type="linear", factor=4.0)), 16384),
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), 8192),
        (
            dict(
                rope_scaling=dict(rope_type="yarn", factor=8, original_max_position_embeddings=2048)
            ),
            16384,
        ),
        (
            dict(
                rope_scaling=dict(
                    rope_type="yarn", factor=2.0, original_max_position_embeddings=1024
                )
            ),
            4096,
        ),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), 4096),
        (dict(rope_scaling=None), 4096),
        (dict(max_position_embeddings=None), None),
    ],
)
def test_stretched_angles_reach_as_far_as_their_factor(rope, positions):
    shape = shape_from_config(known_config("llama-2-7b") | rope)
    assert shape.max_positions == positions


def test_rotary_settings_reach_transformers():
    """A known config carries the angles that long contexts need."""
    rope = AutoConfig.for_model(**known_config("meta-llama/Llama-3.1-8B")).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 8.0, 500000.0)
    assert (
        AutoConfig.for_model(**known_config("01-ai/Yi-34B")).rope_parameters["rope_theta"]
        == 5000000.0
    )


@pytest.mark.parametrize(
    "name,targets",
    [
        ("HuggingFaceTB/SmolLM2-135M", "all-linear"),
        ("Qwen/Qwen2.5-0.5B", ["q_proj", "down_proj"]),
        ("meta-llama/Llama-2-7b-hf", None),
        ("microsoft/Phi-3-mini-4k-instruct", "all-linear"),
        ("Qwen/Qwen3-8B", ["q_proj", "lm_head"]),
    ],
)
def test_adapter_count_is_that_of_peft(name, targets):
    model = get_peft_model(
        meta_model(name, layers=2),
        LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=targets),
        low_cpu_mem_usage=True,
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model_shape(name).cut(2).lora_params(8, targets) == trained


@pytest.mark.parametrize(
    "given,found",
    [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-2-70b-chat-hf", "meta-llama/Llama-2-70b-hf"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
        ("another-owner/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("mistral 7b", "mistralai/Mistral-7B-v0.3"),
        ("llama 3.1 8b", "meta-llama/Llama-3.1-8B"),
        ("Llama_2_7b", "meta-llama/Llama-2-7b-hf"),
        ("llama2-70b", "meta-llama/Llama-2-70b-hf"),
        ("llama3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        (
            "unsloth/DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        ),
        ("CodeLlama-34b-Instruct-hf", "codellama/CodeLlama-34b-hf"),
        ("gemma-3n-e4b-it", "google/gemma-3n-E4B"),
        ("google/gemma-4-26B-A4B-it", "google/gemma-4-26B-A4B"),
        ("nemotron-nano-9b-v2", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8",
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        ),
        ("Kimi-Linear-48B-A3B-Base", "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    ],
)
def test_names_are_found_whatever_owner_case_or_tuning(given, found):
    assert known_name(given) == found


def test_unknown_model_lists_close_names_and_other_ways():
    with pytest.raises(ValueError, match=r"Lama-2-7b: .*close names: .*Llama-2-7b-hf.*config.json"):
        model_shape("Lama-2-7b")
    with pytest.raises(ValueError, match="known names: .*Qwen"):
        model_shape("zzzz")


TRANSFORMERS_OWN = {  # fields that makers' files have otherwise
    *("layer_types", "mlp_layer_types", "layers_block_type", "per_layer_config"),
    *("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
}
KIMI_LAYERS = dict(
    linear_attn_config=dict(
        head_dim=32,
        num_heads=4,
        short_conv_kernel_size=4,
        kda_layers=[1, 2, 4],  # counted from 1
        full_attn_layers=[3, 5],
    ),
    first_k_dense_replace=2,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=4,
)
OLMO_LAYERS = dict(
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=64,
)
NEMOTRON_LAYERS = dict(num_hidden_layers=5, mamba_num_heads=8, ssm_state_size=16)
GEMMA4_LAYERS = dict(
    num_hidden_layers=6,
    num_kv_shared_layers=2,
    attention_k_eq_v=True,
    num_global_key_value_heads=2,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)


@pytest.mark.parametrize(
    "config",
    [
        dict(model_type="kimi_linear") | KIMI_LAYERS,
        dict(model_type="nemotron_h", hybrid_override_pattern="ME*-M") | NEMOTRON_LAYERS,
        dict(
            model_type="nemotron_h", layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"]
        )
        | NEMOTRON_LAYERS,
        dict(model_type="nemotron_h", moe_latent_size=512, hybrid_override_pattern="MEEM*")
        | NEMOTRON_LAYERS,
        dict(model_type="olmo_hybrid", num_hidden_layers=4) | OLMO_LAYERS,
        dict(
            model_type="gemma3n_text",
            num_hidden_layers=3,
            num_kv_shared_layers=1,
            intermediate_size=[256, 512, 512],
        ),
        dict(model_type="gemma4_text", use_double_wide_mlp=True) | GEMMA4_LAYERS,
        dict(model_type="gemma4_text", global_head_dim=384, attention_k_eq_v=False)
        | {k: v for k, v in GEMMA4_LAYERS.items() if k != "attention_k_eq_v"},
    ],
)
def test_a_file_as_its_maker_wrote_it_and_as_transformers_writes_it_give_transformers_model(config):
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    written = made.to_dict()
    as_made = {k: v for k, v in written.items() if k not in TRANSFORMERS_OWN} | config
    for given in (as_made, written):
        shape = shape_from_config(given)
        assert shape.known_family
        assert_same_blocks(model, shape)


def test_folder_file_and_dict_give_the_same_shape(tmp_path):
    config = known_config("Qwen/Qwen3-8B")
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = [model_shape(m) for m in (config, tmp_path, str(tmp_path / "config.json"))]
    assert len({(s.total_params(), s.head_dim, s.traits) for s in shapes}) == 1
    nested = shape_from_config({"model_type": "any", "text_config": config})
    assert nested.total_params() == shapes[0].total_params()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"num_local_experts": 8}, "experts of llama are not known"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 2},
            "only some of its blocks",
        ),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": -2}, "num_hidden_layers -2; it must be a whole number"),
        ({"hidden_size": "4096"}, 'hidden_size "4096"; it must be a whole number'),
        ({"num_hidden_layers": True}, "num_hidden_layers true; it must be a whole number"),
        ({"head_dim": "128"}, 'head_dim "128"; it must be'),
        ({"max_position_embeddings": "4096"}, 'max_position_embeddings "4096"; it must be'),
        ({"intermediate_size": [8192] * 48}, r"intermediate_size .* it must be a whole"),
        (
            {"num_key_value_heads": 7},
            "num_attention_heads 32, .* not a multiple of num_key_value_heads 7",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; it must be true or false"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder, so it is not"),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "num_experts_per_tok null; it must be 1 to 8",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
            "must be 1 to 8",
        ),
    ],
)
def test_a_model_that_can_not_be_estimated_says_why(change, message):
    with pytest.raises(ValueError, match=message):
        shape_from_config(known_config("llama-2-7b") | change)


def test_broken_config_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="--model_name .*: not a config.json"):
        model_shape(tmp_path)


def test_unknown_target_lists_the_names():
    with pytest.raises(ValueError, match="q_projj.*has q_proj, k_proj"):
        model_shape("llama-2-7b").lora_params(8, ["q_projj"])

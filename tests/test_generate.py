"""`generate` answers as transformers does: sampled or not, alone or in a chat, in 16, 8 and 4 bits."""

from __future__ import annotations

import io
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from fsdp_qlora.cli import GenerateOptions, main
from fsdp_qlora.commands.generate import device_map, load_for_inference
from fsdp_qlora.config import RunConfig
from tests.tokenizers import VOCAB_SIZE, save_chat_model, save_tokenizer

IDS = torch.arange(3, 60)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def asked(monkeypatch) -> list[list[int]]:
    """The token ids of each prompt that a model is asked."""
    from transformers import GenerationMixin

    prompts, real = [], GenerationMixin.generate

    def generate(self, inputs, **how):
        prompts.append(inputs[0].tolist())
        return real(self, inputs, **how)

    monkeypatch.setattr("transformers.LlamaForCausalLM.generate", generate)
    return prompts


def said(capsys, folder, *flags) -> str:
    """What the command prints."""
    argv = ["generate", "--model_name", folder, "--device", "cpu", "--max_new_tokens", "8", *flags]
    assert main(argv) == 0
    return capsys.readouterr().out


def rendered(folder, messages) -> list[int]:
    """A conversation's tokens by transformers' own template code, ready for an answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_answer_is_the_greedy_one_of_transformers_with_the_system_prompt_before(
    folder, capsys, asked
):
    text = said(capsys, folder, "--prompt", "Say hi", "--system", "Be short.")
    messages = [dict(role="system", content="Be short."), dict(role="user", content="Say hi")]
    assert asked == [rendered(folder, messages)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(asked)
    want = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert text.strip() == tokenizer.decode(want, skip_special_tokens=True).strip()


def test_a_temperature_samples_by_the_seed(folder, capsys):
    def sampled(*more):
        return said(capsys, folder, "--prompt", "Say hi", "--temperature", "5", *more)

    first = sampled("--seed", "1")
    assert first == sampled("--seed", "1") != sampled("--seed", "2")
    greedy = said(capsys, folder, "--prompt", "Say hi")
    assert sampled("--top_k", "1") == greedy == sampled("--top_p", "1e-6") != first


def test_a_chat_remembers_what_was_said_and_ends_at_an_empty_line(
    folder, capsys, asked, monkeypatch
):
    lines = iter(["Say hi", "Again", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    said(capsys, folder, "--chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert asked[0] == rendered(folder, [dict(role="user", content="Say hi")])
    text = tokenizer.decode(asked[1])
    assert text.count("<|im_start|>assistant") == 2 and "Say hi" in text
    assert text.endswith("<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n")


def test_a_chat_ends_with_its_input(folder, capsys, monkeypatch):
    def ended(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    assert said(capsys, folder, "--chat") == "\n"


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> str:
    """A model whose learned positions are few: beyond them there is no embedding."""
    folder = tmp_path_factory.mktemp("short")
    settings = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=64, n_embd=64, n_layer=1, n_head=2, eos_token_id=0
    )
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_an_answer_ends_at_the_models_positions_and_a_prompt_beyond_them_is_refused(short, capsys):
    used = len(rendered(short, [dict(role="user", content="x" * 20)]))
    flags = ["--prompt", "x" * 20, "--max_new_tokens", "100"]
    with (
        patch("fsdp_qlora.commands.generate.stop_token_ids", lambda _: [VOCAB_SIZE - 1]),
        patch("transformers.TextStreamer.put") as put,
    ):
        said(capsys, short, *flags)
    written = [call.args[0].numel() for call in put.call_args_list]
    assert written[0] == used and sum(written[1:]) == 64 - used
    argv = ["generate", "--model_name", short, "--device", "cpu", "--prompt", "x" * 64]
    assert main(argv) == 2
    assert "leaves no room for an answer in the model's 64 positions" in capsys.readouterr().err


def test_a_line_of_a_chat_that_is_no_text_is_answered_too(folder, capsys, asked, monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO(b"hel\xfflo\n\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    said(capsys, folder, "--chat")
    assert asked == [rendered(folder, [dict(role="user", content="hel\ufffdlo")])]


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_4_bits_are_the_values_that_an_adapter_was_trained_beside(folder, quant):
    written = load_for_inference(folder, None, quant, dtype=torch.float32)
    held = load_for_inference(folder, None, quant, dtype=torch.float32, load_in="4bit")
    linear = held.model.layers[0].mlp.up_proj
    assert type(linear).__name__ == "Linear4bit" and linear.weight.dtype == torch.uint8
    with torch.no_grad():
        torch.testing.assert_close(held(IDS).logits, written(IDS).logits, rtol=0, atol=1e-5)


def test_8_bits_are_near_the_weights_they_stand_for(folder):
    exact = load_for_inference(folder, dtype=torch.float32)
    held = load_for_inference(folder, dtype=torch.float32, load_in="8bit")
    assert type(held.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    with torch.no_grad():
        error = (held(IDS).logits - exact(IDS).logits).std() / exact(IDS).logits.std()
    assert 0 < error < 0.1


def test_4_bits_are_refused_where_the_base_lacked_a_part_in_training(folder, monkeypatch):
    monkeypatch.setattr("fsdp_qlora.commands.generate.taken_out_of", lambda adapter: {"w": 1})
    with pytest.raises(ValueError, match="--load_in 4bit: the adapter in None began as a part"):
        load_for_inference(folder, None, "nf4", load_in="4bit")


def test_a_model_larger_than_a_gpu_is_spread_by_whole_blocks_and_the_rest_waits_on_the_host(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = model.get_memory_footprint()
    assert device_map(model, {0: size, "cpu": size}) == {} == device_map(model, {})
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    ends = size - len(model.model.layers) * block
    places = device_map(model, {0: ends + int(1.5 * block), 1: int(1.1 * block), "cpu": size})
    assert list(dict.fromkeys(places.values())) == [0, 1, "cpu"]  # in the order of the forward
    assert {name for name in places if "layers" in name} == {"model.layers.0", "model.layers.1"}


def test_help_lists_the_commands_own_flags_alone(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = capsys.readouterr().out
    own = GenerateOptions.__dataclass_fields__
    assert all(f"--{name} " in text for name in own)
    others = RunConfig.__dataclass_fields__.keys() - own.keys()
    assert not [name for name in others if f"--{name} " in text]


@pytest.mark.parametrize(
    "flags, says",
    [
        ([], "--prompt is empty; give a prompt, or --chat"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature must be 0 or more, got -1"),
        (["--prompt", "x", "--top_p", "0"], "--top_p must be above 0 and at most 1, got 0"),
        (["--prompt", "x", "--top_k", "-1"], "--top_k must be 0 or more, got -1"),
        (["--prompt", "x", "--repetition_penalty", "0"], "--repetition_penalty must be above 0"),
        (["--prompt", "x", "--system", "\udcff"], "--system is not UTF-8"),
        (["--prompt", "x"], "--adapter_folder is missing; give a trained adapter's folder"),
        (["--prompt", "x", "--load_in", "2bit"], "--load_in 2bit: choose 16bit, 8bit, 4bit"),
        (["--prompt", "x", "--trust_remote_code"], "--trust_remote_code needs --revision"),
        (["--prompt", "x", "--lora_rank", "8"], "unknown flag --lora_rank"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_read(flags, says, capsys):
    assert main(["generate", *flags]) == 2
    assert says in capsys.readouterr().err

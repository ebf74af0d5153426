"""Let a chat model answer many prompts: greedy, in left-padded batches of similar length."""

import torch

# What ends a turn in the chat formats of the families that train.py knows.
END_OF_TURN = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"]


def end_of_turn_id(tokenizer) -> int:
    """The token that ends a chat turn. It is not always the tokenizer's eos token."""
    known = tokenizer.get_vocab()
    return next((known[token] for token in END_OF_TURN if token in known), tokenizer.eos_token_id)


def render(tokenizer, prompt: list[dict]) -> str:
    """A chat as text, up to where the assistant's answer starts."""
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)


def generate_answers(
    model,
    tokenizer,
    prompts: list[list[dict]],  # chat messages without the answer
    batch_size: int = 16,
    max_new_tokens: int = 64,
) -> list[str]:
    """One answer per prompt, in the order of the prompts."""
    texts = [render(tokenizer, prompt) for prompt in prompts]
    token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    by_length = sorted(range(len(prompts)), key=lambda i: len(token_ids[i]))
    answers = [""] * len(prompts)
    for start in range(0, len(prompts), batch_size):
        batch = by_length[start : start + batch_size]
        generated = generate_batch(model, tokenizer, [token_ids[i] for i in batch], max_new_tokens)
        for i, answer in zip(batch, generated, strict=True):
            answers[i] = answer
    return answers


@torch.inference_mode()
def generate_batch(model, tokenizer, token_ids: list[list[int]], max_new_tokens: int) -> list[str]:
    """Greedy answers to prompts that are padded on the left, so that all end at the same place."""
    end = end_of_turn_id(tokenizer)
    longest = max(map(len, token_ids))
    padded = [[end] * (longest - len(ids)) + ids for ids in token_ids]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in token_ids]
    output = model.generate(
        input_ids=torch.tensor(padded, device=model.device),  # (B, T)
        attention_mask=torch.tensor(mask, device=model.device),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=end,
        pad_token_id=end,
    )
    return tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)

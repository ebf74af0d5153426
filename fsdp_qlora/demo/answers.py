"""Let a chat model answer many prompts: greedy, in left-padded batches of similar length.

Shapes: `B` prompts of a batch, `T` tokens of its longest.
"""

import torch

from ..data import encode_prompt, stop_token_ids


def generate_answers(
    model,
    tokenizer,
    prompts: list[list[dict]],  # chat messages without the answer
    batch_size: int = 32,
    max_new_tokens: int = 48,  # the longest reference query has 40
) -> list[str]:
    """One answer per prompt, in the order of the prompts."""
    token_ids = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(token_ids[i]))
    answers = [""] * len(prompts)
    for start in range(0, len(prompts), batch_size):
        batch = by_length[start : start + batch_size]
        generated = _generate_batch(model, tokenizer, [token_ids[i] for i in batch], max_new_tokens)
        for i, answer in zip(batch, generated, strict=True):
            answers[i] = answer
    return answers


@torch.inference_mode()
def _generate_batch(model, tokenizer, token_ids: list[list[int]], max_new_tokens: int) -> list[str]:
    """Greedy answers to prompts that are padded on the left, so that all end at the same place."""
    # Not the tokenizer's eos alone: a GGUF's may differ from the token that ends a chat turn.
    stops = stop_token_ids(tokenizer)
    longest = max(map(len, token_ids))
    padded = [[stops[0]] * (longest - len(ids)) + ids for ids in token_ids]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in token_ids]
    output = model.generate(
        input_ids=torch.tensor(padded, device=model.device),  # (B, T)
        attention_mask=torch.tensor(mask, device=model.device),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=stops[0],
    )
    return tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)

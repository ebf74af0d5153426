"""Tiny tokenizers and chat templates of the kinds that users bring, for the tests of the data.

The templates are shortened from those of real models; each has one trait that has broken masks.
"""

from functools import cache

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Translate this sentence to French. Hello, how are you?\n\nI am fine.\n",
    "assistant: the answer is 42.\n\nuser: and why? system prompt\n",
    "\n\n",
    "\n\n\n",
] * 3
SPECIAL = [
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
]
# Llama 3's pieces: newlines are joined, also to punctuation before them.
PIECES = Regex(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Writes BOS, strips contents.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# No system role, strict alternation, no generation prompt, a space that the model writes.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)

# Removes the thoughts of all but the last answer, and writes empty ones where there are none.
THINKING = (
    "{% for m in messages %}{% set thought, content = '', m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# No token of its own anywhere: EOS must be added.
PLAIN_ROLES = (
    "{% for m in messages %}{{ '### ' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)

# The prompt ends with a space, which joins the first word of an answer to one token.
SPACED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# Leaves out system messages without a word.
SILENT = (
    "{% for m in messages if m['role'] != 'system' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
)

# Closes the last turn otherwise than those before.
LAST_DIFFERS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '</s>' if loop.last else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "thinking": THINKING,
    "plain_roles": PLAIN_ROLES,
    "spaced": SPACED,
    "last_differs": LAST_DIFFERS,
    "fallback": None,
}


@cache
def make_tokenizer(
    template: str | None = None,
    bos: str = "<s>",
    adds_bos: bool = False,
    eos: str | None = "</s>",
    pad: str | None = None,
    trim_offsets: bool = False,
):
    """A byte-level BPE; `template` is a name in TEMPLATES or a template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        steps.append(_bos_processor(backend, bos))
    backend.post_processor = processors.Sequence(steps)
    return _wrap(backend, template, bos, eos, pad)


@cache
def make_sentencepiece_tokenizer(template: str | None = None, adds_bos: bool = True):
    """As Llama 2's: a space before every text, "▁" for spaces, bytes for what is unknown."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    byte_tokens = [AddedToken(f"<0x{i:02X}>", special=False) for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=[*SPECIAL, *map(str, byte_tokens)]
    )
    backend.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        backend.post_processor = _bos_processor(backend, "<s>")
    return _wrap(backend, template, "<s>", "</s>", None)


def _bos_processor(backend, bos):
    return processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )


def _wrap(backend, template, bos, eos, pad):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


def trained_text(encoded, tokenizer) -> str:
    """What an `Encoded`, or an (input_ids, labels) pair, trains, decoded."""
    if isinstance(encoded, tuple):
        ids = encoded[1][encoded[1] != -100]
    else:
        ids = encoded.input_ids[encoded.trained]
    return tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)


def chat(*contents: str, system: str | None = None) -> list[dict]:
    """User and assistant in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_tokenizers_add_bos_as_asked(adds_bos):
    for make in (make_tokenizer, make_sentencepiece_tokenizer):
        tokenizer = make(adds_bos=adds_bos)
        assert (tokenizer("Hello")["input_ids"][0] == tokenizer.bos_token_id) == adds_bos


def test_the_byte_tokenizer_joins_newlines():
    assert make_tokenizer().tokenize("\n\n") == ["ĊĊ"]

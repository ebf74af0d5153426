"""How rows were asked where the tokenizer has no chat template, kept as one beside the weights.

Alpaca rows are then trained behind "### Instruction:", other prompts as they are. Whoever asks the tuned
model must ask so too: `generate`, samples during training, servers, and those who train it further. A
chat template is what all of them read, so the form is written as one.
"""

from __future__ import annotations

import json
import re

from .formats import PLAIN_PROMPTS
from .report import DataReport
from .templates import FALLBACK_TEMPLATE, MADE_HERE

# A prompt, and the answer with the token that ends it; a system text stands before the first prompt.
TURNS = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{%- elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{%- else %}{{ BEFORE + message['content'] + AFTER }}{% endif -%}"
    "{%- endfor -%}"
)


def keep_prompt_format(tokenizer, report: DataReport) -> str | None:
    """Give a tokenizer without a chat template one that asks as most rows were asked, in place.

    Rows are rendered as before (`ChatTemplate.is_fallback`). Returns the name of the format, None if
    the tokenizer has a template of its own.
    """
    if not report.prompt_formats or tokenizer.chat_template:
        return None
    name = max(report.prompt_formats, key=report.prompt_formats.__getitem__)
    tokenizer.chat_template = _template_of(name, tokenizer)
    return name


def _template_of(name: str, tokenizer) -> str:
    """The chat template of a format in PLAIN_PROMPTS, of "text", or of "roles"."""
    head = MADE_HERE + f"{{#- {name} -#}}"
    ids = tokenizer("a")["input_ids"]
    if tokenizer.bos_token and ids[:1] == [tokenizer.bos_token_id]:
        head += "{{- bos_token -}}"
    if name == "roles":
        return head + FALLBACK_TEMPLATE
    before, after = re.split(r"\{\w+\}", PLAIN_PROMPTS.get(name, "{prompt}"))
    return head + TURNS.replace("BEFORE", json.dumps(before)).replace("AFTER", json.dumps(after))

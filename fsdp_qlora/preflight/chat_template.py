"""`--chat_template`: conversations in another form than the tokenizer's own.

The template is set on the tokenizer, so it is saved beside the weights, and `generate`, samples and
servers ask as training did.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..data.template_bounds import render
from ..dist import print_main
from ..loading import first_line
from ..loading.tokenizer import load_tokenizer

# https://github.com/openai/openai-python/blob/v0.28.1/chatml.md, as most models have it
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
NAMED = {"chatml": CHATML}
_ASKED, _ANSWERED = "a question", "an answer"
_MARKER = re.compile(r"<\|[^<|>\s]+\|>")


def use_chat_template(tokenizer: PreTrainedTokenizerBase, given: str):
    """Let a tokenizer render by the template that --chat_template gives, in place.

    given: a Jinja file, "chatml", the name of one of the tokenizer's own templates, or a model folder or
    hub name whose tokenizer has one. Raises ValueError, in one line, if there is none or it can't render
    a conversation.
    """
    template = _template(tokenizer, given)
    text = _rendered(tokenizer, template, given)
    tokenizer.chat_template = template
    unknown = sorted(set(_MARKER.findall(text)) - tokenizer.get_vocab().keys())
    if unknown:
        print_main(
            f"warning: --chat_template {given} writes {', '.join(unknown)}, which the tokenizer splits "
            f"into several tokens; add --added_tokens '{','.join(unknown)}'"
        )


def _template(tokenizer: PreTrainedTokenizerBase, given: str) -> str:
    """The text of the template."""
    path, own = Path(given), tokenizer.chat_template
    if path.is_file():
        return _read(path)
    if given in NAMED:
        return NAMED[given]
    if isinstance(own, dict) and given in own:
        return own[given]
    if path.suffix in (".jinja", ".jinja2", ".j2", ".txt"):
        raise ValueError(
            f"--chat_template {given}: no such file; give the path of a Jinja template"
        )
    try:
        # An adapter's folder has a tokenizer, and no config.json.
        other = (
            AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            if path.is_dir()
            else load_tokenizer(given)
        )
    except (OSError, ValueError) as error:
        names = ", ".join([*NAMED, *(own if isinstance(own, dict) else ())])
        why = first_line(error).split(";")[0].removeprefix(f"--model_name {given}: ")
        raise ValueError(
            f"--chat_template {given}: {why}; give a Jinja file, a name ({names}), or a model that has "
            "a chat template"
        ) from error
    found = other.chat_template
    if isinstance(found, dict):
        found = found.get("default")
    if not found:
        raise ValueError(
            f"--chat_template {given}: the tokenizer there has no chat template; give a Jinja file, or "
            "a model that has one"
        )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--chat_template {path}: it can't be read ({error}); give a Jinja template"
        ) from error


def _rendered(tokenizer: PreTrainedTokenizerBase, template: str, given: str) -> str:
    """A short conversation as the template has it. Raises ValueError if it lacks the answer."""
    messages = [dict(role="user", content=_ASKED), dict(role="assistant", content=_ANSWERED)]
    values = dict(messages=messages, tools=None, documents=None, add_generation_prompt=False)
    try:
        text = render(template, **tokenizer.special_tokens_map, **values)
    except Exception as error:  # a program of others may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        line = f"line {error.lineno}: " if getattr(error, "lineno", None) else ""
        raise ValueError(
            f"--chat_template {given}: it can't render a question and an answer ({line}{reason}); give "
            "a template that takes `messages` with role and content"
        ) from error
    if _ASKED not in text or _ANSWERED not in text:
        raise ValueError(
            f"--chat_template {given}: what it renders lacks the question or the answer; give a "
            "template that writes the content of all `messages`"
        )
    return text

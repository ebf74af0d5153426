"""The language model inside of a wrapper for images or sound, by itself and under the wrapper's names.

Gemma 3, Mistral 3, Llama 4, Qwen3-VL and others hold a decoder beside towers that rows of text never
reach. A run builds the decoder and its head alone, so only they are quantized, adapted and sharded; the
towers stay in their files. Adapters and models are saved under the wrapper's names. That the decoder
computes what the wrapper does is tried on a tiny random one before any weight is read.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from .blocks import base_model
from .on_meta import parameters_on_meta
from .packing_probe import TOLERANCE, small

_TOKENS = 9  # of the row that is tried


class TextModel(PreTrainedModel, GenerationMixin):
    """A decoder and its head, for types that transformers has no such class of, such as Qwen3-VL."""

    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        self.model = MODEL_MAPPING[type(config)](config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state[:, kept]),
            past_key_values=out.past_key_values,
        )


@dataclass
class Wrapper:
    """What is around a language model."""

    whole: PreTrainedModel  # on meta
    modules: dict[str, str]  # the language model's decoder and head -> their names in the whole
    files: Any = None  # its Checkpoint
    others: set[str] = field(default_factory=set)  # tensors there beside the language model's

    @property
    def config(self) -> PretrainedConfig:
        return self.whole.config

    def language_model(self, dtype: torch.dtype, **how) -> PreTrainedModel:
        """The language model on meta, which `wrapper_of` finds this by; `how` goes to transformers."""
        ends = [self.whole.get_submodule(name) for name in self.modules.values()]
        shared = set.intersection(*({id(p) for p in end.parameters()} for end in ends))
        text = copy.deepcopy(self.config.get_text_config())
        text.tie_word_embeddings, text._name_or_path = bool(shared), self.config._name_or_path
        with parameters_on_meta():
            model = _class_alone(text)._from_config(text, dtype=dtype, **how)
        model.wrapper = self
        return model

    def config_of(self, model: PreTrainedModel) -> PretrainedConfig:
        """The whole's configuration once its language model is `model`."""
        config, text = copy.deepcopy(self.config), copy.deepcopy(model.config)
        text.architectures = self.config.get_text_config().architectures
        setattr(config, _text_name(config), text)
        config.dtype, config.tie_word_embeddings = text.dtype, text.tie_word_embeddings
        config.architectures = [type(self.whole).__name__]
        return config

    def outer(self, name: str) -> str:
        """The whole's name of one of the language model's modules or tensors."""
        return _moved(name, self.modules) or name

    def inner(self, name: str) -> str | None:
        """The language model's name of one of the whole's tensors; None if it has no part in it."""
        return _moved(name, {there: here for here, there in self.modules.items()})

    @property
    def towers(self) -> str:
        """A pattern of the names of all other modules, for PEFT's `exclude_modules`."""
        inside = "|".join(re.escape(name) for name in self.modules.values())
        return rf"(?!({inside})(\.|$)).*"


def _moved(name: str, places: dict[str, str]) -> str | None:
    """A name whose beginning is one of `places`, with what stands for it."""
    for here, there in places.items():
        if name == here or name.startswith(f"{here}."):
            return there + name[len(here) :]
    return None


def wrapper_of(model: nn.Module) -> Wrapper | None:
    """What a language model was taken out of; None for a model that is one by itself."""
    return getattr(base_model(model), "wrapper", None)


def wrapper_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the whole model, if a config.json is of one with a language model inside.

    PreTrainedModel itself if there is no such class of transformers that writes text.
    """
    text = config.get_text_config()
    if text is config:
        return None
    named = [getattr(transformers, n, None) for n in getattr(config, "architectures", None) or ()]
    for kind in named:
        if getattr(kind, "config_class", None) is type(text):
            return None  # the files are the language model's alone
        if getattr(kind, "config_class", None) is type(config):
            return kind
    kinds = (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    found = next((kind for m in kinds if (kind := m.get(type(config), None))), None)
    return found or PreTrainedModel


def wrapper_around(config: PretrainedConfig) -> Wrapper:
    """What `config` describes around its language model. On meta.

    Raises ValueError naming --model_name where the language model can't be had by itself, or computes
    something else by itself.
    """
    kind, text = wrapper_class(config), config.get_text_config()
    if kind is PreTrainedModel:
        _refuse(config, f"transformers has no {config.model_type} that writes text")
    if _class_alone(text) is TextModel and type(text) not in MODEL_MAPPING:
        _refuse(config, f"transformers has no class for its {text.model_type} alone")
    try:
        with parameters_on_meta():
            whole = kind._from_config(copy.deepcopy(config))
        whole.tie_weights()
        modules, differ = _tried(config, kind)
    except Exception as error:  # a config.json may say anything
        said = str(error).strip().split("\n")[0]
        _refuse(config, f"it can't be tested by itself ({type(error).__name__}: {said})")
    if not differ <= TOLERANCE:  # nor where one is no number
        _refuse(config, "a tiny copy of it computes other outputs when run alone")
    return Wrapper(whole, modules)


def _class_alone(text: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a language model by itself."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) or TextModel


def _refuse(config: PretrainedConfig, reason: str):
    raise ValueError(
        f"--model_name {config._name_or_path}: {config.model_type} has a language model inside, beside "
        f"parts for other than text, and {reason}; give a model for text alone"
    )


def _text_name(config: PretrainedConfig) -> str:
    """What a configuration calls that of the language model inside."""
    text = type(config.get_text_config())
    return next(name for name in config.sub_configs if type(getattr(config, name)) is text)


def _tried(config: PretrainedConfig, kind: type) -> tuple[dict[str, str], float]:
    """Where the language model's parts lie in the whole, and how far their logits are apart.

    Tiny and random: the whole is on meta, but for the parts of the language model, which it shares.
    """
    config, text = copy.deepcopy(config), small(config.get_text_config())
    setattr(config, _text_name(config), copy.deepcopy(text))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        alone = _eager(_class_alone(text), text).eval()
        for p in alone.parameters():
            nn.init.normal_(p, 0, 0.1)
        ids = torch.randint(0, text.vocab_size, (1, _TOKENS))
    with parameters_on_meta():
        whole = _eager(kind, config).eval()
    modules = _places(alone, whole)
    for here, there in modules.items():
        whole.set_submodule(there, alone.get_submodule(here))
    for module in whole.modules():  # or the model would take meta for its device
        for leaf, p in module._parameters.items():
            module._parameters[leaf] = None if p is not None and p.is_meta else p
    with torch.no_grad():
        got, wanted = (m(input_ids=ids, use_cache=False).logits for m in (alone, whole))
    return modules, float((got - wanted).abs().max() / wanted.abs().max())


def _eager(kind: type, config: PretrainedConfig) -> PreTrainedModel:
    """A model in fp32 whose attention needs no kernel."""
    return kind._from_config(config, dtype=torch.float32, attn_implementation="eager")


def _places(alone: PreTrainedModel, whole: PreTrainedModel) -> dict[str, str]:
    """The names of the language model's decoder and head, and those of their like in the whole."""
    names, there = ({id(m): n for n, m in model.named_modules()} for model in (alone, whole))
    decoder = names[id(alone.get_input_embeddings())].rpartition(".")[0]
    kind = type(alone.get_submodule(decoder))
    (like,) = (name for name, m in whole.named_modules() if type(m) is kind)
    heads = (model.get_output_embeddings() for model in (alone, whole))
    head, like_head = (found[id(m)] for found, m in zip((names, there), heads, strict=True))
    return {decoder: like, head: like_head}

"""Whether a part of a row can be computed by itself up to its attention, tried on the model's own code.

Ranks that share rows exchange what attention needs and nothing else (sequence_parallel.py). That is right
only for code in which no other layer sees a second token, and which hands its decoder's arguments on to the
attention of every layer. Two parts of a row go through a tiny random instance of the same class, whose
attention looks at each token alone: together they must give what the whole row does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from .packing_probe import TOLERANCE, small_instance

_TOKENS = 12
_EACH_TOKEN = "each_token_alone"


@torch.no_grad()
def why_no_parts(model: nn.Module, told: str) -> str:
    """What keeps parts of a model's rows from being computed alone; empty if nothing does.

    told: the argument by which its attention knows that rows are cut. Also empty of a model of which no
    tiny instance can be made.
    """
    try:
        tiny = small_instance(model)
    except Exception:  # noqa: BLE001  sizes of a config that nobody has seen
        return ""
    kind, calls = tiny.config.model_type, []

    def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
        calls.append((kwargs.get(told), attention_mask))
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return (value + query.mean(-1, keepdim=True)).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_EACH_TOKEN, attend)
    tiny.config._attn_implementation = _EACH_TOKEN
    places, half = torch.arange(_TOKENS, device="cpu")[None], _TOKENS // 2

    def states(part: slice) -> Tensor:
        given = {"position_ids": places[:, part], "use_cache": False, told: True}
        return tiny.get_decoder()(input_ids=3 + places[:, part], **given).last_hidden_state

    try:
        with torch.device("cpu"):
            whole = states(slice(None))
            parts = torch.cat([states(slice(half)), states(slice(half, None))], 1)
    except Exception as error:  # noqa: BLE001  whatever its code does
        return f"the code of {kind} can't compute a part of a row ({type(error).__name__}); leave it out"
    if not calls or not all(is_told for is_told, _ in calls):
        return f"the code of {kind} does not tell its attention that rows are cut; leave it out"
    if any(mask is not None for _, mask in calls):
        return f"the code of {kind} makes masks from the tokens; leave it out"
    if (parts - whole).abs().max() > TOLERANCE * whole.abs().max():
        return f"layers of {kind} other than attention see several tokens; leave it out"
    return ""

"""`fsdp-qlora doctor` beside what torch says of the cards of a real machine."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.commands.doctor import (
    WRONG,
    _check_cards,
    _check_links,
    _check_torch,
    _gpu_rows,
    _nvidia_smi,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_cards_links_and_torch_are_found_and_nothing_of_them_is_wrong():
    rows = _gpu_rows()
    assert {row["name"] for row in rows} >= {torch.cuda.get_device_name(0)}
    found = [
        *_check_cards(rows),
        *_check_torch(len(rows)),
        *_check_links(len(rows), _nvidia_smi("topo", "-m")),
    ]
    assert not [f for f in found if f.level == WRONG]
    text = "\n".join(map(str, found))
    assert "NCCL " in text and "4-bit weights on cuda" in text
    if len(rows) > 1:
        assert "linked by" in text or "reach each other" in text

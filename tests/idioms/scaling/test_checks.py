"""Families whose layers and logits keep the size of their changes over width: what mup's numbers are for."""

from __future__ import annotations

import pytest
import torch

from idioms.scaling.cells import CHECKED, CHECKED_FAMILIES
from idioms.scaling.families import FAMILIES
from sparing.scaling.check.coordinate import coordinate_check

TOLD = {"gpt-oss": {"init": {"*router.bias": "constant"}}}  # four numbers do not tell their law


def batch(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (2, 4), generator=generator)
    classes = torch.tensor([0, 3])
    if family == "ViT":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": classes}
    if family == "Whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "decoder_input_ids": ids, "labels": ids}
    return {"input_ids": ids, "labels": classes if family == "RoBERTa" else ids}


@pytest.mark.slow
@pytest.mark.parametrize("family", CHECKED_FAMILIES, ids=lambda name: f"{CHECKED}-{name}")
def test_sizes_do_not_go_with_width(family: str):
    """Heads of 32 at every width; three seeds, and few tokens, so that updates are coherent."""
    found = coordinate_check(
        lambda width: FAMILIES[family](width, 2 * width, width // 32), (128, 256, 512), (1,), batch=batch(family),
        seeds=(0, 1, 2), lr=2**-13, steps=4, base_width=128, planned=TOLD.get(family),
    )  # fmt: skip
    assert found.passed, [str(one) for one in found.failures]

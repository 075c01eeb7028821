"""Facts and checksums in one process; ranks that differ are named in ``test_wire_ranks.py``."""

from __future__ import annotations

import pytest
import torch

from sparing.sharding.network.consistency import check_replicas, check_same, checksum
from sparing.sharding.network.mesh import make_mesh


def test_one_process_agrees_with_itself() -> None:
    with make_mesh() as mesh:
        check_same(mesh, {"seed": 1}, "start")
        check_replicas(mesh, {"w": (torch.ones(3), 0)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_checksum_sees_every_bit(dtype: torch.dtype) -> None:
    x = (torch.arange(1001) % 2).to(dtype)
    seen = {checksum(x)}
    for place in (0, 500, 1000):
        changed = x.clone()
        changed[place] = 1 - int(changed[place])
        seen.add(checksum(changed))
    assert len(seen) == 4
    assert checksum(x.clone()) == checksum(x)
    assert checksum(x[:500]) != checksum(x[1:501])


def test_a_checksum_does_not_care_how_a_tensor_lies() -> None:
    x = torch.randn(6, 4)
    assert checksum(x.T) == checksum(x.T.contiguous())
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0, 3))
    assert -(2**63) <= checksum(x) < 2**63
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
    torch.tensor([checksum(x)])


def test_a_checksum_leaves_the_storage_as_it_was() -> None:
    """Engines free parameters by resizing it, which torch forbids for what numpy has seen."""
    x = torch.ones(5)
    checksum(x)
    x.untyped_storage().resize_(0)

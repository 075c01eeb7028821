"""Sums and gathers in few bits on ranks that are threads, against one number at a time in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import lowbit
from oracles import wire_threads as wt
from sparing.errors import UserError
from sparing.sharding import LowBit, Wires, make_mesh
from sparing.sharding.lowbit.residuals import Residual
from sparing.sharding.lowbit.wires import ChangeWires, GradientWires
from sparing.sharding.network.mesh import Mesh

SHAPES = [(1, 2), (1, 3), (2, 2), (2, 3), (3,), (2, 1, 2)]
FORMATS = [LowBit(bits=8, block=4), LowBit(bits=4, block=6)]
STEPS = 3
OWED = 5  # as ``step``: what is owed at first


def gradients(rank: int, step: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64) * 10.0 ** (rank - step)


def length_of(sizes: tuple[int, ...]) -> int:
    """Parts of seven elements: a block, and one that is cut short, at an odd number of codes."""
    return 7 * math.prod(sizes)


def level_of(sizes: tuple[int, ...]) -> int:
    return len(sizes) - 1


def summing(mesh: Mesh, slow: LowBit, to: int, given: Any, unused: Any = ((), ())) -> dict[str, list[Tensor]]:
    """Sums of some steps from the slice that groups share to a level, with error feedback; something is owed at first.

    Of my own part, too: a checkpoint of other ranks leaves it there.
    """
    length = length_of(mesh.sizes) // math.prod(mesh.sizes[:-1])
    residual, found, owed = Residual(length, dtype=torch.float64, guarded=False), [], []
    residual.value.copy_(given(mesh.rank, OWED, length))
    wires = GradientWires(mesh.slow_ring, slow.grads, residual, *unused)
    for step in range(STEPS):
        part = given(mesh.rank, step, length).clone()
        found.append(mesh.transitions.sync(part, level_of(mesh.sizes), to, slow=wires).wait().clone())
        residual.end_(applied=True)
        owed.append(residual.value.clone())
    sent = mesh.counter.sent[mesh.axes[-1].name], mesh.counter.messages[mesh.axes[-1].name]
    return {"sums": found, "owed": owed, "sent": [torch.tensor(sent)]}


def run(sizes: tuple[int, ...], slow: LowBit, to: int, given: Any = gradients) -> list[dict[str, list[Tensor]]]:
    return wt.together(lambda mesh: summing(mesh, slow, to, given), wt.meshes(sizes, Wires(slow=slow)))


def columns(sizes: tuple[int, ...]) -> list[list[int]]:
    """Ranks that the outermost axis joins."""
    inside = math.prod(sizes[:-1])
    return [list(range(first, math.prod(sizes), inside)) for first in range(inside)]


@pytest.mark.parametrize("slow", FORMATS, ids=["8", "4"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_sums_and_what_is_owed_are_those_of_one_number_at_a_time(
    sizes: tuple[int, ...], slow: LowBit, whole: bool
) -> None:
    """To the bit: the same additions in the same order, and all else is exact."""
    found, width = run(sizes, slow, level_of(sizes) + (not whole)), sizes[-1]
    for ranks in columns(sizes):
        owed = [gradients(rank, OWED, 7 * width).view(width, 7).tolist() for rank in ranks]
        for step in range(STEPS):
            given = [gradients(rank, step, 7 * width).view(width, 7).tolist() for rank in ranks]
            sums, owed = lowbit.summed(given, owed, slow.bits, slow.block, whole=whole)
            for place, rank in enumerate(ranks):
                expected = [x for part in sums for x in part] if whole else sums[place]
                assert found[rank]["sums"][step].tolist() == expected
                assert found[rank]["owed"][step].view(width, 7).tolist() == owed[place]


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_all_that_was_summed_and_all_that_is_owed_is_all_that_was_given(whole: bool) -> None:
    """Each of a few dozen additions rounds numbers up to 1e3 at 1e-13: 1e-11 leaves a tenfold.

    What is owed is not small: without it the sums would be off by a thousand million times as much.
    """
    sizes, slow = (1, 3), FORMATS[1]
    found = run(sizes, slow, 2 - whole)
    given = sum(gradients(rank, step, 21) for rank in range(3) for step in (OWED, *range(STEPS)))
    got = sum(found[0]["sums"]) if whole else torch.cat([sum(answer["sums"]) for answer in found])
    owed = sum(answer["owed"][-1] for answer in found)
    assert (got - given).abs().max() > 1e-3
    torch.testing.assert_close(got + owed, given, rtol=0, atol=1e-11)


@pytest.mark.parametrize("slow", FORMATS, ids=["8", "4"])
def test_whole_sums_have_the_same_bits_on_all_ranks(slow: LowBit) -> None:
    found = run((2, 3), slow, 1)
    for ranks in columns((2, 3)):
        for step in range(STEPS):
            assert all(torch.equal(found[rank]["sums"][step], found[ranks[0]]["sums"][step]) for rank in ranks)


@pytest.mark.parametrize("slow", FORMATS, ids=["8", "4"])
@pytest.mark.parametrize("to", [1, 2])
def test_integers_on_the_grid_sum_to_the_bits_of_the_rings(slow: LowBit, to: int) -> None:
    def small(rank: int, step: int, length: int) -> Tensor:
        return ((torch.arange(length) * (rank + 2) + step) % 5 - 2).double() * (step != OWED)

    exact = wt.together(
        lambda mesh: [mesh.transitions.sync(small(mesh.rank, s, 21), 1, to).wait().clone() for s in range(STEPS)],
        wt.meshes((2, 3)),
    )
    for answer, sums in zip(run((2, 3), slow, to, small), exact, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(answer["sums"], sums, strict=True))
        assert not any(owed.any() for owed in answer["owed"])


@pytest.mark.parametrize("slow", FORMATS, ids=["8", "4"])
@pytest.mark.parametrize(("sizes", "to"), [((1, 3), 1), ((2, 2), 1), ((2, 2), 2), ((3,), 0)])
def test_bytes_are_payloads_and_messages_those_of_rings(sizes: tuple[int, ...], to: int, slow: LowBit) -> None:
    passes = 1 if to == len(sizes) else 2
    for answer in run(sizes, slow, to):
        messages = STEPS * passes * (sizes[-1] - 1)
        assert answer["sent"][0].tolist() == [messages * slow.grads.nbytes(7), messages]


def test_without_feedback_each_sum_is_of_what_was_rounded_then() -> None:
    slow = LowBit(bits=4, block=6, feedback=False)

    def work(mesh: Mesh) -> list[Tensor]:
        wires = GradientWires(mesh.slow_ring, slow.grads, None)
        return [
            mesh.transitions.sync(gradients(mesh.rank, s, 14), 1, 2, slow=wires).wait().clone() for s in range(STEPS)
        ]

    found = wt.together(work, wt.meshes((1, 2), Wires(slow=slow)))
    for step in range(STEPS):
        given = [gradients(rank, step, 14).view(2, 7).tolist() for rank in range(2)]
        sums, _ = lowbit.summed(given, [[[0.0] * 7] * 2] * 2, slow.bits, slow.block, whole=False)
        assert [answer[step].tolist() for answer in found] == sums


@pytest.mark.parametrize("to", [1, 2])
def test_what_is_owed_to_a_parameter_without_gradient_is_kept_and_not_sent(to: int) -> None:
    """Elements 2 … 4 are a parameter that no rank uses in the second step, 9 … 11 one that only rank 1 uses then."""
    sizes, resting = (1, 2), [(2, 3), (9, 3)]
    slow = LowBit(bits=4, block=14)

    def given(rank: int, step: int, length: int) -> Tensor:
        grad = gradients(rank, 0, length) + step
        if step == 1:
            grad[2:5] = 0
            if rank == 0:
                grad[9:12] = 0
        return grad

    def work(mesh: Mesh) -> dict[str, list[Tensor]]:
        residual = Residual(14, dtype=torch.float64, guarded=False)
        found: dict[str, list[Tensor]] = {"sums": [], "owed": []}
        for step in range(2):
            cut = [(at, n) for at, n in resting if step == 1 and (at == 2 or mesh.rank == 0)]
            mine = [(at - 7 * mesh.rank, n) for at, n in cut if at // 7 == mesh.rank]
            wires = GradientWires(mesh.slow_ring, slow.grads, residual, cut, mine)
            part = given(mesh.rank, step, 14).clone()
            mesh.transitions.sync(part, 1, to, slow=wires).wait()
            whole = part if to == 1 else torch.zeros(14, dtype=torch.float64)
            if to == 2:
                mine_part = slice(7 * mesh.rank, 7 * mesh.rank + 7)
                whole[mine_part] = part[mine_part]
            found["sums"].append(whole.clone())
            found["owed"].append(residual.value.clone())
        return found

    ranks = wt.together(work, wt.meshes(sizes, Wires(slow=slow)))
    for answer in ranks:
        assert answer["owed"][0][2:5].any() or answer["owed"][0][9:12].any()
        assert torch.equal(answer["owed"][1][2:5], answer["owed"][0][2:5])  # kept
        assert not answer["sums"][1][2:5].any()  # not sent
    given_all = sum(given(rank, step, 14) for rank in range(2) for step in range(2))
    got = sum(ranks[0]["sums"]) if to == 1 else sum(sum(answer["sums"]) for answer in ranks)
    owed = sum(answer["owed"][1] for answer in ranks)
    # nothing is lost; 1e-14: a dozen additions of numbers up to ten, each rounded at 1e-15
    torch.testing.assert_close(got + owed, given_all, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slow", FORMATS, ids=["8", "4"])
def test_changed_parameters_have_the_same_bits_everywhere_and_follow_the_masters(
    dtype: torch.dtype, slow: LowBit
) -> None:
    """Masters stand still after the first step: each gather brings parameters nearer, to half a step of what lacked."""
    sizes, length = (2, 3), 42

    def work(mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
        start = gradients(9, 0, length).to(dtype)
        store = mesh.transitions.slice(start, 0, 1).clone()
        mine = mesh.transitions.slice(store, 1, 2)
        master = (mine.double() + gradients(mesh.rank, 1, 7)).to(torch.promote_types(dtype, torch.float32))
        found = []
        for _ in range(STEPS):
            wires = ChangeWires(mesh.slow_ring, slow.changes, master)
            lacking = master.double() - mine.double()
            mesh.transitions.gather_(store, 2, 1, slow=wires).wait()
            expected = lowbit.rounded(lacking.tolist(), slow.bits, slow.block)
            if dtype == torch.float64:
                assert (mine.double() - (master.double() - lacking)).tolist() == pytest.approx(expected, abs=1e-12)
            found.append((store.clone(), (master.double() - mine.double()).abs().max()))
        return found

    ranks = wt.together(work, wt.meshes(sizes, Wires(slow=slow)))
    for step in range(STEPS):
        for column in columns(sizes):
            assert all(torch.equal(ranks[rank][step][0], ranks[column[0]][step][0]) for rank in column)
    if dtype != torch.bfloat16:  # whose own rounding remains
        left = [max(answer[step][1] for answer in ranks) for step in range(STEPS)]
        assert left[1] <= left[0] / (2 ** (slow.bits - 1) - 1) * 1.01 + 1e-3


def test_a_skipped_step_leaves_what_is_owed_where_it_is_guarded() -> None:
    for guarded in (True, False):
        residual = Residual(2, dtype=torch.float32, guarded=guarded)
        residual.value += 3
        for applied in (True, False):
            residual.begin_()
            residual.value += 1
            residual.begin_()  # a second part of the same step
            residual.end_(applied=applied)
        assert residual.value.tolist() == ([4.0, 4.0] if guarded else [0.0, 0.0])
        residual.end_(applied=False)  # of a step that sent nothing
        assert residual.value.tolist() == ([4.0, 4.0] if guarded else [0.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 2}, "LowBit.bits: got 2"), ({"block": 3}, "LowBit.block: got 3"), ({"block": 0}, "LowBit.block"),
        ({"params": 16}, "LowBit.params: got 16"),
    ],
)  # fmt: skip
def test_formats_that_there_are_not_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LowBit(**settings)


def test_wires_and_meshes_that_cannot_carry_them_are_refused() -> None:
    for more in ({"kind": "builtin"}, {"gather": "flat"}, {"gather": "overlapped"}):
        with pytest.raises(UserError, match='pass kind="ring" and gather="two-level"'):
            Wires(slow=LowBit(), **more)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="there is one group"):
        make_mesh(groups=1, wires=Wires(slow=LowBit()))


def test_parameters_may_travel_otherwise_than_gradients() -> None:
    slow = LowBit(bits=4, params=8)
    assert (slow.grads.bits, slow.changes.bits) == (4, 8)
    assert LowBit(params=32).changes is None
    assert LowBit(bits=4).changes == LowBit(bits=4).grads

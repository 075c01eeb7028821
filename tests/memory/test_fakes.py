"""Models without memory: what a fake copy keeps, and what kernels of another device would keep."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils import checkpoint

import zoo
from sparing.blocks import named_parameters, tied
from sparing.errors import UserError
from sparing.memory import Ledger
from sparing.memory.fakes import KeptValues, cuda_kernels, empty_batch, fake_copy
from sparing.memory.internals import FakeMode


def mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("make", [lambda: zoo.llama(tied=True), zoo.gpt2, zoo.llama], ids=["tied", "gpt2", "llama"])
def test_a_copy_keeps_names_shapes_types_flags_and_ties(make):
    model = make()
    next(iter(model.parameters())).requires_grad_(False)
    copied = fake_copy(model, mode())
    facts = [
        {name: (p.shape, p.stride(), p.dtype, p.requires_grad) for name, p in named_parameters(m).items()}
        for m in (model, copied)
    ]
    assert facts[0] == facts[1]
    assert tied(model) == tied(copied)
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in copied.named_buffers()]
    assert all(isinstance(t, FakeTensor) and t.device.type == "cpu" for t in (*copied.parameters(), *copied.buffers()))


def test_the_original_is_left_alone():
    model = zoo.llama(layers=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fake_copy(model, mode())
    assert not any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_floating_tensors_take_the_type_that_was_asked_for():
    copied = fake_copy(nn.BatchNorm1d(3), mode(), torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in copied.state_dict().items()} == {
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
        "running_mean": torch.bfloat16,
        "running_var": torch.bfloat16,
        "num_batches_tracked": torch.int64,
    }


def test_tensors_that_are_neither_parameters_nor_buffers_become_fakes_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scales = [torch.ones(4), torch.zeros(4)]

        def forward(self, x):
            return self.inner(x) * self.scales[0]

    with torch.device("meta"):
        model = Scaled()
    copied = fake_copy(model, fake := mode())
    with fake:
        assert copied(torch.ones(2, 4)).shape == (2, 4)
    assert all(isinstance(scale, FakeTensor) for scale in copied.scales)


def test_a_batch_is_given_by_tensors_or_by_shapes():
    batch = empty_batch({"a": torch.ones(2, 3), "b": ((4,), torch.long), "c": ([5, 6], torch.bool)})
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "a": ((2, 3), torch.float32),
        "b": ((4,), torch.long),
        "c": ((5, 6), torch.bool),
    }


@pytest.mark.parametrize("entry", [(2, 3), 5, "ids", ((2, 3), "long"), None])
def test_an_entry_of_unknown_size_is_refused(entry):
    with pytest.raises(UserError, match="batch"):
        empty_batch({"x": entry})


def _kept(run, *, cuda: bool) -> int:
    """Bytes that an operation leaves alive beside its input, result included."""
    model = nn.Linear(1, 1)
    x = torch.ones(1, 2, 64, 16, requires_grad=True)
    with Ledger(model, inputs=x) as ledger:
        if cuda:
            with cuda_kernels():
                out = run(x)
        else:
            out = run(x)
        kept = ledger.now.activations - x.nbytes
        out.sum().backward()
    assert x.grad is not None
    return kept


def test_dropout_on_cuda_keeps_a_byte_per_element():
    elements = 2 * 64 * 16
    assert _kept(lambda x: F.dropout(x, 0.5), cuda=False) == elements * (4 + 4)
    assert _kept(lambda x: F.dropout(x, 0.5), cuda=True) == elements * (4 + 1)
    assert _kept(nn.Dropout(0.5), cuda=True) == elements * (4 + 1)
    assert _kept(lambda x: F.dropout(x, 0.5, training=False) * 1, cuda=True) == elements * 4


def test_attention_on_cuda_drops_weights_without_keeping_the_matrix():
    def attention(x):
        return F.scaled_dot_product_attention(x, x, x, None, 0.1, True)

    without = _kept(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), cuda=False)
    assert without == 2 * 64 * (16 + 1) * 4  # the result and a float32 sum per row
    assert _kept(attention, cuda=True) == without
    assert _kept(attention, cuda=False) > 2 * 64 * 64 * 4  # the matrix of the fall-back


def test_whole_numbers_keep_their_values_and_others_do_not():
    """KeptValues go through views, arithmetic and new tensors; what is larger than two tables of the batch has none."""
    rows = {"ids": torch.tensor([[3, 1, 2, 0]]), "x": torch.ones(2, 2)}
    with (fake := mode()), KeptValues(fake, rows) as values:
        batch = values.batch()
        ids = batch["ids"]
        assert isinstance(ids, FakeTensor)
        assert ids.tolist() == [[3, 1, 2, 0]]
        assert (ids[:, 1:] - ids[:, :-1] == torch.arange(3)).tolist() == [[False, True, False]]
        assert torch.nonzero(ids > 1).shape == (2, 2)
        assert batch["x"].constant is None
        assert (ids.unsqueeze(-1) * torch.arange(4)).constant is None


def test_a_batch_of_shapes_is_a_batch_of_zeros():
    with (fake := mode()), KeptValues(fake, {"ids": ((1, 3), torch.long)}) as values:
        assert values.batch()["ids"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("positions", "packed"), [(None, False), ([[0, 1, 2, 3]], False), ([[0, 1, 0, 1]], True)], ids=str
)
def test_transformers_sees_whether_a_row_holds_several_texts(positions, packed):
    masking = pytest.importorskip("transformers.masking_utils")
    given = {"ids": torch.zeros(1, 4, dtype=torch.long)}
    if positions is not None:
        given["positions"] = torch.tensor(positions)
    with (fake := mode()), KeptValues(fake, given) as values:
        places = values.batch().get("positions", torch.arange(4).unsqueeze(0))
        assert (masking.find_packed_sequence_indices(places) is not None) == packed
    assert masking.is_tracing(fake.from_tensor(torch.ones(1)))  # as it was before


def test_a_grouped_product_of_any_type_has_its_size():
    x, weight, offs = torch.ones(6, 8), torch.ones(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    grouped = nn.functional.grouped_mm
    shapes = []
    for modes in (contextlib.ExitStack(), contextlib.ExitStack()):
        with modes:
            if shapes:
                fake = modes.enter_context(mode())
                modes.enter_context(KeptValues(fake, {}))
                x, weight, offs = (fake.from_tensor(t.detach()) for t in (x, weight, offs))
            x.requires_grad_(True)
            weight.requires_grad_(True)
            out = grouped(x, weight, offs=offs)
            out.square().sum().backward()
            shapes.append([out.shape, x.grad.shape, weight.grad.shape])
    assert shapes[0] == shapes[1] == [(6, 4), (6, 8), (2, 8, 4)]


def test_recomputation_in_the_backward_pass_runs_the_same_kernels():
    """A block recomputed under a checkpoint must keep what its forward pass kept, or torch refuses to go on."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    with cuda_kernels():
        checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_a_remembered_result_is_that_of_the_operation():
    """A step of each of two kinds of model; torch runs what was remembered once more, and compares."""
    FakeTensorMode.cache_clear()
    checked = FakeMode(allow_non_fake_inputs=True)
    checked.cache_crosscheck_enabled = True
    for model in (zoo.llama(tied=True), zoo.gpt2()):
        fake = fake_copy(model, checked)
        with checked:
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            for _ in range(2):
                fake(input_ids=tokens, labels=tokens).loss.backward()
    assert FakeTensorMode.cache_hits > FakeTensorMode.cache_misses > 0


def test_results_of_unlike_arguments_are_told_apart():
    def shapes(using: FakeTensorMode) -> list[tuple[object, ...]]:
        with using:
            whole, wide = torch.ones(4, 6, dtype=torch.int64), torch.ones(4, 6)
            made = [
                whole + 1, whole + 1.0, whole * True, wide.t() + 1, wide + 1, wide[1:] + 1, wide.sum(0), wide.sum(1),
                wide.double() + 1, torch.ops.aten._unsafe_view.default(wide, [6, 4]), wide.view(8, 3),
            ]  # fmt: skip
            return [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in made]

    plain = mode()
    plain.cache_enabled = False
    assert shapes(FakeMode(allow_non_fake_inputs=True)) == shapes(plain)


def test_autocast_of_another_device_is_refused():
    """It would have no effect on tensors of the CPU, and every activation would be priced in float32."""
    from functools import partial

    from sparing.memory import predict

    def loss(model, batch, *, device):
        autocast = torch.autocast("cpu", torch.bfloat16)
        autocast.device = device  # "cuda", as where there is a GPU: elsewhere torch itself switches it off, and says so
        with autocast:
            return model(batch["x"]).sum()

    batch = {"x": ((4, 8), torch.float32)}
    with pytest.raises(UserError, match=r"autocast: got torch.autocast\(.cuda.\); a prediction runs on the CPU"):
        predict(nn.Linear(8, 2), batch, partial(torch.optim.SGD, lr=0.1), loss=partial(loss, device="cuda"))
    predict(nn.Linear(8, 2), batch, partial(torch.optim.SGD, lr=0.1), loss=partial(loss, device="cpu"))

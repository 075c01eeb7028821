"""A folded model is an ordinary one that computes the same, here and after ``from_pretrained``."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zoo
from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.model.fold import _require_scalable, _scale_norm_, fold_, live_weights
from sparing.scaling.model.multipliers import attach_
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import CompleteP, MuP, SuPar

RULE = SuPar(input=2.5, output=1.5, form="shifted")


def gpt2(**changes) -> nn.Module:
    """Heads widen from 16 to 32, so attention has a factor too; the head is tied."""
    return prepared(models.gpt2(64, head_dim=32, **changes), models.gpt2(32, head_dim=16, **changes))


def llama(rule=RULE, **changes) -> nn.Module:
    return prepared(models.llama(64, head_dim=32, **changes), models.llama(32, head_dim=16, **changes), rule)


def prepared(model: nn.Module, base: nn.Module, rule=RULE) -> nn.Module:
    """Scaled, and every parameter moved a little, so that no bias or gain is zero or one by chance."""
    model, base = model.double().eval(), base.double()
    chosen = plan(model, base=base, density=0.25, rule=rule, init={"*": "constant"})
    masks = apply_(model, chosen)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    masks.accept_()
    return model


@functools.cache
def built(kind: str) -> nn.Module:
    return MODELS[kind]()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=zoo.tokens()["input_ids"]).logits


MODELS = {
    "gpt2, tied": gpt2,
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, depth": lambda: llama(SuPar(depth=CompleteP(base_layers=1), output=2.0)),
    "llama, factors alike": lambda: llama(MuP(input=0.75, output=1.5), tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_folded_model_computes_the_same_and_is_ordinary(kind):
    """float64: folding multiplies each weight once more, so logits of about 1 move by a few 1e-16 per product."""
    model = copy.deepcopy(built(kind))
    expected, masks = logits(model), {n: m.clone() for n, m in masks_of(model).items()}
    own_plan = masks_of(model).plan
    plain = {key for key in model.state_dict() if not key.endswith(("_mask", "_scale")) and key != "scaling_plan"}
    assert fold_(model, masks_of(model)) is model
    torch.testing.assert_close(logits(model), expected, rtol=1e-12, atol=1e-12)
    assert set(model.state_dict()) == plain
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._load_state_dict_pre_hooks
        assert not [key for key in vars(module) if key.startswith("_sparing")]
    for name, mask in live_weights(model, own_plan).items():
        assert torch.equal(mask, masks[name])
    with pytest.raises(UserError, match="was not scaled"):
        fold_(model)


@pytest.mark.parametrize("kind", ["gpt2, tied", "llama", "llama, tied"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_passes_through_save_and_from_pretrained(tmp_path, kind, dtype, tolerance):
    """float32: weights are rounded once more, 6e-8 each, under logits of about 1."""
    model = copy.deepcopy(built(kind)).to(dtype)
    expected = logits(model)
    fold_(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    torch.testing.assert_close(logits(again), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == ("tied" in kind)


@pytest.mark.parametrize("kind", ["gpt2, tied", "llama"])
def test_generation_uses_the_multipliers(kind):
    """Defect 4 of the public code: greedy tokens, and the scores they were chosen by, are those of the folded model;
    a model without its readout factor has other scores."""
    model = copy.deepcopy(built(kind))
    prompt = zoo.tokens(length=4)["input_ids"]
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    ours = model.generate(prompt, **options)
    theirs = fold_(copy.deepcopy(model)).generate(prompt, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        model.lm_head.forward_scale.fill_(1.0)
    without = model.generate(prompt, **options)
    assert not torch.allclose(without.scores[0], ours.scores[0], rtol=1e-2)


class Tied(nn.Module):
    """A tied readout with or without a norm before it, which something else may read too."""

    def __init__(self, norm: nn.Module | None, width: int = 32, tail: str = "") -> None:
        super().__init__()
        self.tail = tail
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        if norm is not None:
            self.norm = norm
        self.head = nn.Linear(width, 11, bias=True)
        self.head.weight = self.embed.weight
        if tail == "dense":
            self.dense = nn.Linear(width, width)
        if tail == "value":
            self.value = nn.Linear(width, 1)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        y = self.norm(x) if hasattr(self, "norm") else x
        if self.tail == "dense":
            y = self.dense(y).tanh()
        if self.tail == "stream":
            y = y + x
        if self.tail == "value":
            return torch.cat([self.head(y), self.value(y)], -1)
        return torch.cat([self.head(y), y], -1) if self.tail == "features" else self.head(y)


class OffsetNorm(nn.Module):
    """A gain of 1 + w, as in Gemma."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class SquaredNorm(OffsetNorm):
    """A gain nobody has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight).square()


IDS = torch.arange(10).view(2, 5)


def tied(norm, tail: str = "") -> nn.Module:
    def build(width: int) -> nn.Module:
        return models.seeded(lambda: Tied(norm(width) if norm else None, width, tail))

    return prepared(build(32), build(16), SuPar(input=2.0, output=1.5))


@pytest.mark.parametrize("norm", [nn.LayerNorm, OffsetNorm])
def test_both_kinds_of_gain_take_the_factor_of_a_tied_readout(norm):
    model = tied(norm)
    expected = model(IDS)
    fold_(model)
    torch.testing.assert_close(model(IDS), expected, rtol=1e-12, atol=1e-12)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.5, 15 / 16, 1.05])
def test_a_norm_takes_a_factor_by_its_own_formula_in_every_precision(factor, dtype):
    """Against single precision of the gains as they are held: two roundings to the dtype, of gain and output."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for kind in (nn.LayerNorm, OffsetNorm):
        norm = kind(32)
        with torch.no_grad():
            norm.weight.add_(0.01)
        norm = norm.to(dtype)
        expected = factor * copy.deepcopy(norm).float()(x)
        with torch.no_grad():
            assert _scale_norm_(norm, factor)
            torch.testing.assert_close(norm.float()(x), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    squared = SquaredNorm(32).to(dtype)
    with torch.no_grad():
        assert not _scale_norm_(squared, factor)
    assert not squared.weight.any()


def test_a_norm_of_queries_that_cannot_take_their_factor_is_refused():
    alone = SimpleNamespace(entries={}, attention=1.0)
    for norm in (nn.LayerNorm(8), SquaredNorm(8)):
        attach_(norm, "query_scale", 0.5, where="output")
        if isinstance(norm, nn.LayerNorm):
            _require_scalable(norm, alone)
        else:
            with pytest.raises(UserError, match="got a norm of queries, SquaredNorm; its gain is neither w nor 1"):
                _require_scalable(norm, alone)


@pytest.mark.parametrize(
    ("norm", "tail"),
    [(None, ""), (SquaredNorm, ""), *((nn.LayerNorm, tail) for tail in ("dense", "stream", "value", "features"))],
)
def test_a_tied_readout_without_such_a_norm_of_its_own_is_refused_or_untied(norm, tail):
    model = tied(norm, tail)
    expected = model(IDS)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match="untie=True"):
        fold_(model)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    fold_(model, untie=True)
    torch.testing.assert_close(model(IDS), expected, rtol=1e-12, atol=1e-12)
    assert model.head.weight is not model.embed.weight


def test_what_reads_the_final_norm_beside_a_tied_readout_is_saved_as_it_is(tmp_path):
    """The multiple choice head of GPT-2; float64, another order of products."""
    from transformers import GPT2DoubleHeadsModel

    def build(width: int) -> nn.Module:
        config = models.gpt2_config(width, num_labels=1, summary_first_dropout=0.0)
        return models.seeded(lambda: GPT2DoubleHeadsModel(config))

    model, inputs = prepared(build(64), build(32)), zoo.tokens()["input_ids"][:, None]
    expected = model(input_ids=inputs)
    model.save_pretrained(tmp_path)
    again = GPT2DoubleHeadsModel.from_pretrained(tmp_path, dtype=torch.float64).eval()(input_ids=inputs)
    torch.testing.assert_close(again.mc_logits, expected.mc_logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again.logits, expected.logits, rtol=1e-12, atol=1e-12)


def test_a_weight_that_several_layers_share_is_multiplied_once():
    def build(width: int) -> nn.Sequential:
        layers = models.mlp(width, depth=4)
        layers[4].weight = layers[2].weight
        return layers

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = prepared(build(32), build(16), SuPar(form="shifted"))
    expected = model(x)
    fold_(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_torch_attention_and_convolutions_fold():
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for build in (models.patches, models.conv):
        model = prepared(build(32), build(16), SuPar(input=2.0, output=1.5, depth=None))
        expected = model(image)
        fold_(model)
        torch.testing.assert_close(model(image), expected, rtol=1e-11, atol=1e-12)


def test_a_copy_of_a_scaled_model_can_be_folded_while_training_goes_on():
    model = llama()
    expected = logits(model)
    fold_(copy.deepcopy(model))
    assert torch.equal(logits(model), expected)
    masks_of(model).verify()


class Kernel(nn.Module):
    """A layer whose matrix has a name of its own, beside a gain if there is one."""

    def __init__(self, into: int, out: int, *, gain: bool = False) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(0.1 * torch.randn(out, into)), nn.Parameter(torch.zeros(out))
        self.gain = nn.Parameter(torch.ones(out)) if gain else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.kernel.t()
        return (y if self.gain is None else y * self.gain) + self.bias


class Table(nn.Module):
    """A table with a name of its own."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


class Named(nn.Module):
    """A residual token model of such layers, tied or not."""

    def __init__(self, width: int, *, gain: bool, tied: bool) -> None:
        super().__init__()
        self.table = Table(11, width)
        self.blocks = nn.ModuleList(Kernel(width, width, gain=gain) for _ in range(2))
        self.head = nn.Linear(width, 11)
        if tied:
            self.head.weight = self.table.table
        else:
            self.head = Kernel(width, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x.relu())
        return self.head(x)


def named(*, gain: bool = False, tied: bool = False) -> nn.Module:
    wide, slim = (models.seeded(lambda w=w: Named(w, gain=gain, tied=tied)) for w in (32, 16))
    model = wide.double()
    chosen = plan(
        model, base=slim.double(), rule=SuPar(input=2.0, output=1.5, depth=CompleteP(base_layers=1)), inputs=IDS,
        init={"*": "constant"}, roles={"table.table": "embedding"},
    )  # fmt: skip
    apply_(model, chosen)
    return model


def test_a_factor_folds_into_a_matrix_of_any_name():
    model = named()
    assert model.head.forward_scale == 0.75
    assert model.table.forward_scale == 2.0
    assert model.blocks[0].branch_scale == 0.5
    with torch.no_grad():
        for block in model.blocks:
            block.bias.add_(0.3)
    expected = model(IDS)
    fold_(model)
    torch.testing.assert_close(model(IDS), expected, rtol=1e-12, atol=1e-12)
    assert not list(model.buffers())


@pytest.mark.parametrize(
    ("options", "words"),
    [({"gain": True}, "Kernel with kernel, bias, gain"), ({"tied": True}, "table and head with one weight")],
)
def test_a_factor_that_no_one_matrix_can_hold_is_refused_before_anything_changes(options, words):
    model = named(**options)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=words):
        fold_(model)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_branches_that_end_in_a_stack_of_experts_fold():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 64, "num_experts_per_tok": 2, "num_local_experts": 4,
    }  # fmt: skip
    model = models.seeded(lambda: MixtralForCausalLM(MixtralConfig(**sizes))).eval()
    apply_(model, plan(model, rule=SuPar(depth=CompleteP(base_layers=1))))
    assert model.model.layers[0].mlp.experts.branch_scale == 0.5
    expected = logits(model)
    fold_(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)

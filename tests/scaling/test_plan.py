"""The plan as a whole: factors that reach the right weights and hooks, groups, the way to JSON and back."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.plans.entries import merge_layers
from sparing.scaling.plans.planning import Plan, plan
from sparing.scaling.rules import RULES, SP, CompleteP, Factors, InitOnly, MuP, RateOnly, SuPar

BUILDS = [
    models.mlp,
    models.gated,
    models.conv,
    models.patches,
    models.recurrent,
    models.gpt2,
    models.llama,
    models.vit,
]


def std(parameter):
    return float(parameter.detach().double().std(correction=0))


@pytest.mark.parametrize("build", BUILDS)
def test_at_the_base_and_density_1_no_rule_touches_anything(build):
    """Factors are exactly 1 and no hook is asked for, with a base of the same width or none."""
    model, slim = build(32), build(32)
    for rule, base in [(cls(), slim) for cls in RULES] + [(SuPar(), None)]:
        found = plan(model, base=base, rule=rule)
        assert {entry.rescale for entry in found.entries.values()} == {1.0}
        assert {entry.factors for entry in found.entries.values()} == {Factors()}
        assert (found.inputs, found.outputs, found.attention, found.depth) == ({}, {}, 1.0, 1.0)


@pytest.mark.parametrize("build", [models.mlp, models.constant_mlp])
@pytest.mark.parametrize("rule", [MuP(), SuPar(), InitOnly(), RateOnly()])
def test_the_initial_scale_is_right_whatever_the_initialisation(build, rule):
    """Pitfall 4.6, the double correction: hidden σ²/(m_d m_ρ) of the base's, all else the base's own σ."""
    wide, slim = build(256), build(64)
    found = plan(wide, base=slim, density=1 / 4, rule=rule)
    theirs = dict(slim.named_parameters())
    live = 1 / 4 if rule.sparse_init else 1.0
    for name, parameter in wide.named_parameters():
        entry = found.entries[name]
        want = std(theirs[name]) * ((4 * live) ** -0.5 if entry.role == "hidden" else 1.0)
        # Four standard errors of the ratio of two sampled standard deviations; nothing for the four output biases.
        tolerance = 4 * (0.5 / parameter.numel() + 0.5 / theirs[name].numel()) ** 0.5
        assert std(parameter) * entry.rescale == pytest.approx(want, rel=tolerance), name
        assert entry.std == pytest.approx(std(parameter) * entry.rescale, rel=1e-6)


def test_default_linear_layers_are_not_narrowed_twice():
    """Fan-in initialisation has width in it: only density is due; readout and biases go back to the base's scale."""
    found = plan(models.mlp(256), base=models.mlp(64), density=1 / 4).entries
    assert [found[f"{at}.weight"].rescale for at in (0, 2, 4, 6)] == [1.0, 2.0, 2.0, 2.0]
    assert [found[f"{at}.bias"].rescale for at in (0, 2, 4, 6)] == [1.0, 2.0, 2.0, 2.0]
    found = plan(models.constant_mlp(256), base=models.constant_mlp(64), density=1 / 4).entries
    assert [found[f"{at}.weight"].rescale for at in (0, 2, 4, 6)] == [1.0, 1.0, 1.0, 1.0]
    found = plan(models.constant_mlp(256), base=models.constant_mlp(64)).entries
    assert [found[f"{at}.weight"].rescale for at in (0, 2, 4, 6)] == [1.0, 0.5, 0.5, 1.0]


def test_sp_leaves_all_weights_whatever_their_scale():
    found = plan(models.mlp(256), base=models.mlp(64), density=1 / 4, rule=SP())
    assert {entry.rescale for entry in found.entries.values()} == {1.0}
    assert {entry.init for entry in found.entries.values()} == {"given"}
    assert found.entries["2.weight"].density == 1 / 4


def test_gpt2():
    """Constant init: √(1/(m_d m_ρ)), the extra 1/√(2L) of c_proj kept; the tied head is scaled at its input."""
    model = models.gpt2(128)
    found = plan(model, base=32, density=1 / 4, rule=SuPar(input=9.0, output=2.0))
    attn, proj = (found.entries[f"transformer.h.0.attn.{name}.weight"] for name in ("c_attn", "c_proj"))
    assert (attn.init, attn.rescale, attn.factors.lr, attn.factors.weight_decay) == ("constant", 1.0, 1.0, 1.0)
    assert attn.std == pytest.approx(0.02, rel=0.02)  # 128 · 384 draws: 0.3 % each
    assert proj.std == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.03)
    assert (proj.rescale, proj.residual) == (1.0, True)
    assert found.inputs == {"lm_head": 2.0 / 4}
    assert found.outputs == {"transformer.wte": 9.0, "transformer.wpe": 9.0}
    assert found.entries["transformer.wte.weight"].factors.lr == 1.0
    assert (found.width, found.base_width, found.readout, found.readout_ratio) == (128, 32, "lm_head", 4.0)


def test_a_tied_head_that_nobody_declares_is_the_readout():
    """A plain module says nothing of its output embeddings; the table that two layers share does."""

    def build(width):
        model = nn.Sequential(nn.Embedding(11, width), nn.Linear(width, width), nn.Linear(width, 11, bias=False))
        model[2].weight = model[0].weight
        return model

    found = plan(build(32), base=build(8), rule=SuPar())
    assert found.readout == "2"
    assert found.inputs == {"2": 1 / 4}
    assert found.entries["0.weight"].role == "embedding"


def test_a_head_that_is_registered_before_the_blocks_is_the_readout():
    class Turned(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 5)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)])

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def build(width):
        return models.seeded(lambda: Turned(width))

    found = plan(build(64), base=build(16), rule=SuPar(), density=1 / 4)
    assert found.readout == "head"
    assert [name for name, entry in found.entries.items() if entry.masked] == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert found.entries["stem.weight"].role == "embedding"
    assert found.entries["head.bias"].init == "fan_in"  # five entries tell nothing: it goes with its matrix


def test_an_initialisation_that_cannot_be_told_is_refused_and_can_be_given():
    wide, slim = models.mlp(64), models.mlp(16)
    with torch.no_grad():
        wide[2].weight.mul_(1.5)
    with pytest.raises(UserError, match=r'2\.weight.*init=\{"pattern": "constant"\}'):
        plan(wide, base=slim)
    assert plan(wide, base=slim, init={"2.*": "fan_in"}).entries["2.weight"].rescale == 1.0
    assert plan(wide, base=slim, init={"2.*": "constant"}).entries["2.weight"].rescale == 0.5
    assert plan(wide, base=slim, density=0.25, init={"2.*": "given"}).entries["2.weight"].rescale == 1.0
    assert plan(wide, base=slim, rule=SP()).entries["2.weight"].rescale == 1.0
    for init in ({"2.*": "he"}, {"layers.*": "constant"}, {"2.*": "unknown"}):
        with pytest.raises(UserError, match="no such kind, or no parameter"):
            plan(wide, base=slim, init=init)


def test_a_model_on_the_meta_device_can_be_planned_but_not_rescaled():
    with torch.device("meta"):
        model = models.mlp(64)
    line = plan(model, base=lambda: models.mlp(16)).entries["2.weight"]
    assert (line.init, line.std, line.factors.lr) == ("unknown", None, 0.25)
    with pytest.raises(UserError, match="init"):
        _ = line.rescale


def test_shifted_form_scales_inputs_where_modules_are_called_and_weights_where_not():
    """Torch's attention reads its weights itself, so no hook would be seen: there the factor stays in the weights."""
    found = plan(models.patches(64), base=models.patches(16), density=1 / 4, rule=SuPar(form="shifted"))
    packed, linear = (found.entries[f"encoder.layers.0.{n}"] for n in ("self_attn.in_proj_weight", "linear1.weight"))
    same = plan(models.patches(64), base=models.patches(16), density=1 / 4).entries[packed.name]
    assert packed.factors == same.factors
    assert (linear.factors.std, linear.factors.forward) == (1.0, 1.0)  # m_d m_ρ = 1
    found = plan(models.patches(64), base=models.patches(16), rule=SuPar(form="shifted"))
    assert {path for path in found.inputs if "layers.0" in path} == {
        "encoder.layers.0.linear1",
        "encoder.layers.0.linear2",
    }
    assert found.inputs["encoder.layers.0.linear1"] == 0.5
    assert found.entries["encoder.layers.0.linear1.weight"].factors.lr == 0.5


def test_bare_tables_carry_the_input_multiplier_in_their_weights():
    """α on a table θ: α · θ with rate η is θ' with rate α η, ε/α and decay/α; nothing could hook a bare parameter."""
    found = plan(models.patches(16), rule=SuPar(input=4.0))
    line = found.entries["position"].factors
    assert (line.std, line.lr, line.eps, line.weight_decay, line.forward) == (4.0, 4.0, 0.25, 0.25, 1.0)
    assert found.outputs == {"patch": 4.0}


def test_a_bare_weight_is_what_it_is_said_to_be():
    """A router [experts, width] as output: 1/m cannot be hooked, so Adam's weights and rate carry it."""

    class Model(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.stem, self.router = nn.Linear(4, width), nn.Parameter(0.1 * torch.randn(8, width))
            self.mix, self.head = nn.Parameter(torch.randn(width, width)), nn.Linear(width, 2)

        def forward(self, x):
            x = F.linear(self.stem(x), self.mix).relu()
            return self.head(x * F.linear(x, self.router).amax(-1, keepdim=True))

    wide, slim = (models.seeded(lambda width=width: Model(width)) for width in (64, 16))
    found = plan(wide, base=slim, density=1 / 4, roles={"router": "output", "mix": "hidden"})
    router, mix = found.entries["router"], found.entries["mix"]
    assert (router.fan_in, router.m_in, router.m_out) == (64, 4.0, 1.0)
    assert (router.factors.std, router.factors.lr, router.factors.forward, router.rescale) == (0.25, 0.25, 1.0, 0.25)
    assert (mix.density, mix.m_in, mix.factors.lr, mix.rescale) == (0.25, 4.0, 1.0, 1.0)
    assert found.inputs == {"head": 0.25}


def test_depth():
    """CompleteP: branches × m_L^−1 at their last module, rates in blocks × m_L^(α−1), GPT-2's 1/√(2L) dropped."""
    rule = SuPar(depth=CompleteP(base_layers=2, alpha=0.5))
    found = plan(models.gpt2(32, layers=8), rule=rule)
    assert found.depth == 4.0
    ends = {f"transformer.h.{at}.{end}.c_proj" for at in range(8) for end in ("attn", "mlp")}
    assert found.outputs == dict.fromkeys(ends, 0.5)
    proj, norm, last = (found.entries[f"transformer.{n}.weight"] for n in ("h.3.mlp.c_proj", "h.3.ln_1", "ln_f"))
    assert (norm.factors.lr, last.factors.lr) == (0.5, 1.0)
    # N(0, 0.02²/(2 · 8)) drawn, N(0, 0.02²/(2 · 2)) wanted, as the base of two blocks has it
    assert proj.rescale == 2.0
    assert proj.std == pytest.approx(0.02 / 2, rel=0.05)
    assert found.entries["transformer.h.3.mlp.c_fc.weight"].rescale == 1.0


def test_depth_of_a_model_that_draws_all_depths_alike():
    found = plan(models.llama(32, layers=4), rule=SuPar(depth=CompleteP(base_layers=2)))
    assert {entry.rescale for entry in found.entries.values()} == {1.0}
    assert set(found.outputs.values()) == {0.5}
    assert len(found.outputs) == 8
    attended = plan(models.patches(16, layers=2), rule=SuPar(depth=CompleteP(base_layers=1))).outputs
    assert set(attended) == {f"encoder.layers.{at}.{end}" for at in (0, 1) for end in ("self_attn", "linear2")}


def test_densities_can_be_replaced_by_what_masks_have():
    found = plan(models.mlp(64), density=1 / 4)
    real = found.with_densities({"2.weight": 1 / 16})
    assert (real.entries["2.weight"].factors.lr, real.entries["2.weight"].rescale) == (16.0, 4.0)
    assert real.entries["4.weight"] == found.entries["4.weight"]
    assert real.with_densities({"2.weight": 1 / 4}) == found
    for wrong in ({"2.weight": 0.0}, {"2.weight": 1.1}, {"5.weight": 0.5}):
        with pytest.raises(UserError, match="densities"):
            found.with_densities(wrong)


@pytest.mark.parametrize(
    "rule", [SP(), MuP(decay="sqrt"), SuPar(depth=CompleteP(base_layers=1, alpha=0.75), input=3.0)]
)
def test_a_plan_survives_json(rule):
    found = plan(models.llama(64), base=32, density=1 / 4, rule=rule)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert Plan.from_json(json.loads(text)) == found


def test_the_report_has_a_line_per_parameter_with_the_reason():
    found = plan(models.mlp(64), base=models.mlp(16), density=1 / 4)
    file = io.StringIO()
    found.report(every=True, file=file)
    text = file.getvalue()
    assert "SuPar, adam: width 64 on a base of 16" in text
    for name, entry in found.entries.items():
        assert any(line.startswith(name) and entry.why in line for line in text.splitlines())
    row = found.table()[2]
    assert (row["parameter"], row["role"], row["density"], row["rescale"]) == ("2.weight", "hidden", 0.25, 2.0)


@pytest.mark.parametrize(("density", "said"), [(1 / 4, False), (1 / 8, True)])
def test_the_report_names_weights_with_few_live_inputs(density, said):
    """16 of 64 inputs are enough, 8 are not: best rates were seen to drift there."""
    file = io.StringIO()
    plan(models.mlp(64), base=models.mlp(16), density=density).report(file=file)
    assert ("fewer than 16 live inputs a neuron: tune their rate anew" in " ".join(file.getvalue().split())) == said


def test_layers_that_are_alike_share_a_line():
    found = plan(models.gpt2(64), base=models.gpt2(16), density=1 / 4)
    rows = merge_layers(found.table())
    assert sum(row["layers"] for row in rows) == len(found.entries)
    kin = [row for row in found.table() if row["parameter"].endswith("c_fc.weight")]
    (row,) = [row for row in rows if row["parameter"] == "transformer.h.*.mlp.c_fc.weight"]
    assert (row["layers"], row["density"], row["lr"]) == (len(kin), 0.25, kin[0]["lr"])
    assert row["std"] == pytest.approx(sum(one["std"] for one in kin) / len(kin))
    uneven = plan(models.gpt2(64), base=models.gpt2(16), density={"*.h.0.*": 1 / 4, "*": 1 / 2})
    assert {row["density"] for row in merge_layers(uneven.table()) if "c_fc.weight" in row["parameter"]} == {0.25, 0.5}


def test_planning_changes_neither_the_model_nor_the_random_numbers():
    model = models.gpt2(32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plan(model, base=16, density=1 / 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_wrapped_models_have_the_same_plan():
    wide, slim = models.mlp(64), models.mlp(16)
    assert plan(nn.DataParallel(wide), base=slim, density=1 / 4) == plan(wide, base=slim, density=1 / 4)


DEEP = SuPar(depth=CompleteP(base_layers=2))


def applied_before():
    model = models.mlp(32)
    apply_(model, plan(model, base=models.mlp(16)))
    plan(model, base=models.mlp(16))  # its weights would be taken for freshly drawn ones, and corrected twice


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (applied_before, "a plan was applied to"),
        (lambda: plan(models.mlp(8), optimizer="adamw"), "one of adam, sgd, lion, muon"),
        (lambda: Plan.from_json(plan(models.mlp(8)).to_json() | {"rule": {"name": "Magic"}}), "no such rule"),
        (lambda: plan(models.conv(8), rule=DEEP), "repeated blocks"),
        (lambda: plan(nn.ModuleList([nn.Linear(16, 32)])), "without a forward pass to watch"),
        (lambda: plan(models.mlp(8), inputs=torch.zeros(2, 3)), "inputs: got Sequential without a forward pass"),
        (lambda: plan(models.mlp(8), base=models.gelu_mlp(4)), "base: got relu in 1 where the base has gelu"),
    ],
)
def test_what_cannot_be_planned_is_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_a_stem_drawn_by_fan_out_goes_back_to_the_bases_scale():
    wide, slim = models.conv(64), models.conv(16)
    for model in (wide, slim):
        models.seeded(lambda m=model: nn.init.kaiming_normal_(m.stem.weight, mode="fan_out"))
    stem = plan(wide, base=slim).entries["stem.weight"]
    assert (stem.init, stem.rescale) == ("fan_out", 2.0)
    assert stem.std == pytest.approx(std(slim.stem.weight), rel=0.15)  # 1728 and 432 draws


def test_a_model_without_weights_or_with_whole_numbers_is_refused():
    with pytest.raises(UserError, match="ReLU without parameters"):
        plan(nn.Sequential(nn.ReLU())[0])
    model = models.mlp(16)
    model[2].weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UserError, match=r"2\.weight: got Parameter of torch\.uint8.*before the model is quantized"):
        plan(model)

"""How an initialisation depends on width is measured at two widths, or told by a known law, or not guessed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from scaling import models
from sparing.scaling.roles.find import facts
from sparing.scaling.roles.initial import depth_factor, init_kind, measure_inits, spread


def normal(*shape, std=1.0, seed=0):
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape, bound=1.0, seed=0):
    return bound * (2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) - 1)


def test_two_widths_tell_constant_from_fan_in_for_any_gain():
    """He's, Glorot's and anyone's gain: only the ratio of the two scales is looked at."""
    for gain in (0.3, 1.0, math.sqrt(2)):
        slim = normal(64, 64, std=gain / 8, seed=1)
        assert init_kind(normal(256, 256, std=gain / 16), slim, 4.0, 256) == "fan_in"
        assert init_kind(normal(256, 256, std=gain / 8), slim, 4.0, 256) == "constant"
        assert (
            init_kind(uniform(256, 256, bound=gain / 16), uniform(64, 64, bound=gain / 8, seed=1), 4.0, 256) == "fan_in"
        )


def test_a_scale_between_the_laws_is_unknown():
    """∝ d^(−¼) is neither."""
    assert init_kind(normal(256, 256, std=256**-0.25), normal(64, 64, std=64**-0.25, seed=1), 4.0, 256) == "unknown"


def test_known_laws_tell_where_the_base_has_no_weights():
    meta = torch.empty(16, 16, device="meta")
    for base in (None, meta):
        assert init_kind(uniform(64, 64, bound=1 / 8), base, 4.0, 64) == "fan_in"
        assert init_kind(normal(64, 64, std=0.02), base, 4.0, 64, (0.02,)) == "constant"
        assert init_kind(normal(64, 64, std=0.02), base, 4.0, 64) == "unknown"


def test_where_both_laws_give_one_scale_the_largest_entry_tells():
    """At fan-in 833 torch's default has standard deviation 0.02 as well; but a normal draw passes its bound."""
    fan_in = round(1 / 3 / 0.02**2)
    assert init_kind(normal(833, 833, std=0.02), None, 2.0, fan_in, (0.02,)) == "constant"
    # and a uniform draw of that scale is honestly undecidable
    assert init_kind(uniform(833, 833, bound=fan_in**-0.5), None, 2.0, fan_in, (0.02,)) == "unknown"


def test_zeros_ones_and_unchanged_widths_need_no_law():
    assert init_kind(torch.zeros(4, 4), None, 4.0, 4) == "zero"
    assert init_kind(torch.ones(8), None, 4.0, 8) == "constant"
    assert init_kind(normal(8, 8), None, 1.0, 8) == "constant"
    assert init_kind(torch.empty(8, 8, device="meta"), None, 2.0, 8) == "unknown"
    assert init_kind(torch.empty(8, 8, device="meta"), None, 1.0, 8) == "constant"


@pytest.mark.parametrize("base", [True, False])
def test_torchs_defaults_are_by_fan_in_and_transformers_constant(base):
    """Whole models; without the base's weights torch's law and ``initializer_range`` give the same answer."""
    wide, slim = models.mlp(256), models.mlp(64)
    found = measure_inits(facts(wide, slim), wide, slim if base else None)
    assert {name: found[name] for name in ("2.weight", "4.bias", "6.weight", "6.bias")} == dict.fromkeys(
        ("2.weight", "4.bias", "6.weight", "6.bias"), "fan_in"
    )
    assert found["0.weight"] == "constant"  # its fan-in is the data's
    wide, slim = models.llama(64), models.llama(32)
    found = measure_inits(facts(wide, slim), wide, slim if base else None, scales=(0.02,))
    assert set(found.values()) == {"constant"}


def test_a_stem_drawn_by_fan_out_is_seen_at_two_widths():
    """ResNets draw convolutions so; the stem's fan-in is the data's, and yet its scale falls with width."""
    wide, slim = models.conv(64), models.conv(16)
    for model in (wide, slim):
        models.seeded(lambda m=model: nn.init.kaiming_normal_(m.stem.weight, mode="fan_out"))
    assert measure_inits(facts(wide, slim), wide, slim)["stem.weight"] == "fan_out"
    assert init_kind(normal(64, 27, std=0.1), normal(16, 27, std=0.3), 1.0, 27, out_ratio=4.0) == "unknown"


def test_recurrent_layers_go_by_their_hidden_size():
    wide, slim = models.recurrent(64), models.recurrent(16)
    found = measure_inits(facts(wide, slim), wide, slim)
    assert {found[name] for name in found if name.startswith(("lstm", "gru"))} == {"fan_in"}
    assert found["embed.weight"] == "constant"


def test_tables_drawn_by_width_are_seen():
    """CLIP draws its class embedding with d^(−½)."""

    class Table(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.patch = nn.Linear(4, width)
            self.position = nn.Parameter(normal(64, width, std=width**-0.5, seed=width))
            self.head = nn.Linear(width, 2)

        def forward(self, x):
            return self.head(self.patch(x) + self.position[: x.shape[1]])

    wide, slim = models.seeded(lambda: Table(256)), models.seeded(lambda: Table(64))
    assert measure_inits(facts(wide, slim), wide, slim)["position"] == "fan_in"
    assert measure_inits(facts(wide, slim), wide, None)["position"] == "constant"


def test_depth_factor_sees_gpt2s_and_nothing_else():
    assert depth_factor(0.02 / math.sqrt(24), 0.02, 12) == 24**-0.5
    assert depth_factor(0.02, 0.02, 12) == 1.0
    assert depth_factor(0.02 / 12, 0.02, 12) == 1.0
    assert depth_factor(0.02, 0.0, 12) == 1.0


def test_spread():
    assert spread(torch.tensor([1.0, -1.0, 3.0, -3.0])) == pytest.approx(math.sqrt(5))
    assert spread(torch.tensor([2.0])) == 0
    assert spread(torch.tensor([1.0, -1.0], dtype=torch.bfloat16)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_narrow_gap_of_widths_is_enough_for_large_weights(seed):
    """96 to 128: the two laws differ by 14 % in scale, sampling by 1 %."""
    slim = normal(96, 96, std=96**-0.5, seed=seed)
    assert init_kind(normal(128, 128, std=128**-0.5, seed=99 - seed), slim, 4 / 3, 128) == "fan_in"
    assert init_kind(normal(128, 128, std=96**-0.5, seed=99 - seed), slim, 4 / 3, 128) == "constant"

"""Models of which names and shapes do not tell what a weight is: told rightly, or refused with what to pass instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from idioms.scaling.cells import ROLES, TOLD
from idioms.scaling.families import FAMILIES, NanoBlock
from scaling.models import seeded
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.plans.planning import Plan, plan

CONSTANT = {"*": "constant"}


class Trunk(nn.Module):
    """Residual blocks between a stem and heads; parts are added in the order of ``order``."""

    def __init__(self, width: int, order: str, *, block: Callable[[int], nn.Module] | None = None, heads: int = 1):
        super().__init__()
        parts = {
            "stem": lambda: nn.Linear(3, width),
            "blocks": lambda: nn.ModuleList(block(width) if block else NanoBlock(width, 2 * width, 2) for _ in "ab"),
            "head": lambda: nn.Linear(width, 5),
            "value": lambda: nn.Linear(width, 1),
        }
        for name in order.split():
            setattr(self, name, parts[name]())


class Routed(nn.Module):
    """A block with a router over its two experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(width, 2), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Bottleneck(nn.Module):
    """A block that passes through four features at any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.squeeze, self.widen = nn.Linear(width, width), nn.Linear(width, 4), nn.Linear(4, width)


class OddAttention(nn.Module):
    """Attention whose projections have names of its author's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)


class RootedTrunk(Trunk):
    """Multiplies embeddings by the root of the width, as the first transformer did."""

    def __init__(self, width: int) -> None:
        super().__init__(width, "stem blocks head")
        self.d_model = width

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.d_model**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trunk(order: str, *, block: Callable[[int], nn.Module] | None = None) -> Callable[[int], nn.Module]:
    return lambda width: seeded(lambda: Trunk(width, order, block=block))


def adapted(width: int) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(seeded(lambda: FAMILIES["Llama"](width, 2 * width, 2)), config)


def bert(width: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2, "num_hidden_layers": 2}
    return seeded(lambda: BertModel(BertConfig(vocab_size=40, max_position_embeddings=32, **sizes)))


def scaled_bart(width: int) -> nn.Module:
    model = seeded(lambda: FAMILIES["BART"](width, 2 * width, 2))
    model.config.scale_embedding = True
    return seeded(lambda: type(model)(model.config))


def unscaled_t5(width: int) -> nn.Module:
    model = seeded(lambda: FAMILIES["T5"](width, 2 * width, 2))
    model.config.scale_decoder_outputs = False
    return model


def with_value_head(width: int) -> nn.Module:
    """As a critic is put beside a policy."""
    model = seeded(lambda: FAMILIES["Llama"](width, 2 * width, 2))
    model.value_head = seeded(lambda: nn.Linear(width, 1))
    return model


def family(name: str) -> Callable[[int], nn.Module]:
    return lambda width: seeded(lambda: FAMILIES[name](width, 2 * width, 2))


SUBJECTS = {
    "two heads": trunk("stem blocks head value"), "two heads, one width": trunk("stem blocks head value"),
    "a language model's head and a value head": with_value_head,
    "a router as nn.Linear": trunk("stem blocks head", block=Routed),
    "a router as nn.Linear, one width": trunk("stem blocks head", block=Routed),
    "a bottleneck in a block": trunk("stem blocks head", block=Bottleneck), "LoRA": adapted,
    "attention with unknown names": trunk("stem blocks head", block=OddAttention),
    "sqrt(d) in the forward pass": lambda width: seeded(lambda: RootedTrunk(width)),
    "BART with scaled embeddings": scaled_bart, "a head registered first": trunk("head stem blocks"),
    "a head registered first, one width": trunk("head stem blocks"), "bare BertModel": bert,
    "bare BertModel, one width": bert, "T5 with its outputs unscaled": unscaled_t5,
    "Gemma 3's embeddings": family("Gemma 3"), "Gemma 2's embeddings": family("Gemma 2"),
}  # fmt: skip

WORDS = {
    "two heads": r"head\.weight.*value\.weight.*another head.*output \(heads, routers\)",
    "two heads, one width": r"head\.weight.*value\.weight.*another head",
    "a language model's head and a value head": r"value_head\.weight \[1, 32\]",
    "a router as nn.Linear": r"blocks\.0\.router\.weight \[2, 32\].*router",
    "a router as nn.Linear, one width": r"blocks\.0\.router\.weight \[2, 32\].*router",
    "a bottleneck in a block": r"squeeze\.weight \[4, 32\].*bottleneck", "LoRA": r"lora_A\.default\.weight \[4, 32\]",
    "attention with unknown names": r"attention blocks\.0: got OddAttention.*project queries.*attention=False",
    "sqrt(d) in the forward pass": r"self\.d_model \*\* 0\.5: got 5\.65685 where the base has 4",
}  # fmt: skip


def planned(subject: str, **options: object) -> Plan:
    model = SUBJECTS[subject](32)
    base = None if subject.endswith("one width") else SUBJECTS[subject](16)
    return plan(model, base=base, density=0.5, init=CONSTANT, **options)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("subject", [n for n, how in TOLD.items() if how == "refused"], ids=lambda n: f"{ROLES}-{n}")
def test_what_is_not_understood_is_refused(subject: str):
    with pytest.raises(UserError, match=WORDS[subject]):
        planned(subject)


def test_what_is_refused_passes_once_it_is_said():
    """The second head reads with mup's 1/m, as the first; what is said of routers and adapters is taken."""
    found = planned("two heads", roles={"head.weight": "output", "value.weight": "output"})
    assert found.inputs == {"head": 0.5, "value": 0.5}
    assert not any(found.entries[name].masked for name in ("head.weight", "value.weight"))
    assert (
        not planned("a router as nn.Linear", roles={"*router.weight": "output"})
        .entries["blocks.0.router.weight"]
        .masked
    )


@pytest.mark.parametrize("subject", ["a head registered first", "a head registered first, one width"])
def test_a_head_is_the_readout_wherever_it_is_registered(subject: str):
    found = planned(subject)
    assert found.readout == "head"
    assert {name: found.entries[name].role for name in ("head.weight", "stem.weight")} == {
        "head.weight": "output",
        "stem.weight": "embedding",
    }
    assert not found.entries["head.weight"].masked
    assert found.entries["blocks.0.c_fc.weight"].masked


@pytest.mark.parametrize("subject", ["bare BertModel", "bare BertModel, one width"])
def test_a_bare_backbone_has_no_readout_and_its_pooler_is_hidden(subject: str):
    """Width by width: mup's rate 1/m for Adam."""
    found = planned(subject)
    pooler = found.entries["pooler.dense.weight"]
    assert found.readout == ""
    assert pooler.role == "hidden"
    assert pooler.factors.lr * pooler.density == pytest.approx(1 / pooler.m_in, rel=1e-14)


def test_outputs_that_t5_does_not_scale_are_mups():
    found = planned("T5 with its outputs unscaled")
    assert found.inputs == {"lm_head": 0.5}
    assert found.attention == 0.5  # heads of 16 on a base of 8, and logits that nothing divides


TABLES = {
    "Gemma 2's embeddings": ("model.embed_tokens",),
    "Gemma 3's embeddings": ("model.embed_tokens",),
    "BART with scaled embeddings": ("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
}


@pytest.mark.parametrize("subject", TABLES)
def test_what_is_embedded_has_the_scale_of_the_base(subject: str):
    """The models multiply rows by √d; under the rule the same rows come out as the base gives them, times √16."""
    model, base = SUBJECTS[subject](32).double(), SUBJECTS[subject](16)
    rows = model.get_input_embeddings().weight.detach().clone()
    apply_(model, plan(model, base=base, init=CONSTANT))
    ids = torch.arange(1, 40)
    for path in TABLES[subject]:
        # √32 and √16 may be single-precision numbers in the models' own buffers
        torch.testing.assert_close(model.get_submodule(path)(ids), rows[ids] * 4, rtol=2**-22, atol=0)

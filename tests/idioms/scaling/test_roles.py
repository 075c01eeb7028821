"""Models of which names and shapes do not tell what a weight is: told rightly, or refused with what to pass instead."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idioms.scaling.cells import ROLES, TOLD
from idioms.scaling.families import FAMILIES, NanoBlock
from idioms.scaling.oracle import Numbers, numbers
from scaling.models import seeded
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.model.attention import scale_attention_
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
            "norm": lambda: nn.LayerNorm(width),
        }
        for name in order.split():
            setattr(self, name, parts[name]())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return tuple(getattr(self, name)(x) for name in ("head", "value") if hasattr(self, name))


class Routed(nn.Module):
    """A block with a router over its two experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(width, 2), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.router(x).softmax(-1).chunk(2, -1)
        hidden = self.up(x)
        return x + first * self.down(hidden.relu()) + second * self.down(F.gelu(hidden))


class Bottleneck(nn.Module):
    """A block that passes through four features at any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.squeeze, self.widen = nn.Linear(width, width), nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.widen(self.squeeze(self.wide(x)).relu())


class OddAttention(nn.Module):
    """Attention whose projections have names of its author's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixer(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Twice(OddAttention):
    """Its queries are its values, so that no factor on them is one on logits alone."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mixer, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.mixer(x)
        return x + self.out(F.scaled_dot_product_attention(q, self.key(x), q))


class Adapted(OddAttention):
    """Holds a number that is called scaling and multiplies values: another author's word for another thing."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scaling = 0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixer(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v * self.scaling))


class RootedStream(Trunk):
    """Multiplies what comes out of the blocks and their stem together by the root of the width."""

    def __init__(self, width: int) -> None:
        super().__init__(width, "stem blocks norm head")
        self.d_model = width

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block((x * self.d_model**0.5).tanh())
        return self.head(self.norm(x))


class Borrowed(nn.Module):
    """Reads out by the table itself, without a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(11, width), nn.Linear(width, width)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.table(ids)).relu(), self.table.weight)


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
    "a value head that the pass does not use": with_value_head,
    "a router as nn.Linear": trunk("stem blocks head", block=Routed),
    "a router as nn.Linear, one width": trunk("stem blocks head", block=Routed),
    "a bottleneck in a block": trunk("stem blocks head", block=Bottleneck), "LoRA": adapted,
    "attention with unknown names": trunk("stem blocks head", block=OddAttention),
    "sqrt(d) in the forward pass": lambda width: seeded(lambda: RootedTrunk(width)),
    "sqrt(d) on the stream": lambda width: seeded(lambda: RootedStream(width)),
    "a tied table read as a tensor": lambda width: seeded(lambda: Borrowed(width)),
    "queries that are values too": trunk("stem blocks head", block=Twice),
    "an attribute scaling of another meaning": trunk("stem blocks head", block=Adapted),
    "BART with scaled embeddings": scaled_bart, "a head registered first": trunk("head stem blocks"),
    "a head registered first, one width": trunk("head stem blocks"), "bare BertModel": bert,
    "bare BertModel, one width": bert, "T5 with its outputs unscaled": unscaled_t5,
    "Gemma 3's embeddings": family("Gemma 3"), "Gemma 2's embeddings": family("Gemma 2"),
}  # fmt: skip

WORDS = {
    "a value head that the pass does not use": r"value_head\.weight \[1, 32\].*does not use it",
    "a bottleneck in a block": r"squeeze\.weight \[4, 32\].*bottleneck", "LoRA": r"lora_A\.default\.weight \[4, 32\]",
    "sqrt(d) on the stream": r"model: got a number 5\.65685 where the base has 4.*goes with width",
    "a tied table read as a tensor": r"table\.weight: got read out in the model as a bare tensor.*nn\.Linear",
    "queries that are values too": r"attention blocks\.0: got its queries are used elsewhere too.*attention=False",
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


def mups(subject: str, **options: object) -> tuple[Plan, Numbers]:
    """The plan of dense models, and mup's numbers."""
    models = [SUBJECTS[subject](width) for width in (32, 16, 24)]
    return plan(models[0], base=models[1], init=CONSTANT, **options), numbers(*models)


@pytest.mark.parametrize(
    "subject", ["two heads", "a router as nn.Linear", "a head registered first", "sqrt(d) in the forward pass"]
)
def test_heads_and_gates_have_mups_numbers(subject: str):
    """Every linear layer from width to a fixed number of outputs is a readout to mup, wherever it stands."""
    found, expected = mups(subject)
    for name, entry in found.entries.items():
        assert (entry.factors.lr, entry.factors.weight_decay) == pytest.approx(expected.adam[name], rel=1e-14), name
        assert entry.factors.std == pytest.approx(expected.std[name], rel=1e-14), name
    assert found.inputs == pytest.approx(expected.readouts, rel=1e-14)


@pytest.mark.parametrize("subject", ["two heads, one width", "a router as nn.Linear, one width"])
def test_heads_and_gates_are_told_at_one_width_too(subject: str):
    found = planned(subject)
    outputs = {name for name, entry in found.entries.items() if entry.role == "output"}
    routers = {"blocks.0.router.weight", "blocks.1.router.weight"}
    assert outputs == {"head.weight"} | ({"value.weight"} if "heads" in subject else routers)
    assert not any(found.entries[name].masked for name in outputs)


def test_a_root_of_the_width_on_what_the_stem_gives_is_undone():
    """√32 over √16 in the code: the factor of the stem's output is one over it."""
    found = planned("sqrt(d) in the forward pass")
    assert found.outputs == pytest.approx({"stem": 0.5**0.5}, rel=1e-12)


@pytest.mark.parametrize("subject", ["attention with unknown names", "an attribute scaling of another meaning"])
def test_logits_are_multiplied_whatever_names_say(subject: str):
    """One head, twice as large, under 1/√d: the rule leaves 1/√2, which goes on the queries' rows and nothing else."""
    model, base = SUBJECTS[subject](32).double(), SUBJECTS[subject](16)
    chosen = plan(model, base=base, init=CONSTANT)
    assert chosen.attention == pytest.approx(0.5**0.5, rel=1e-12)
    oracle = copy.deepcopy(model)
    with torch.no_grad():
        for block in oracle.blocks:
            block.mixer.weight[:32] *= 0.5**0.5
            block.mixer.bias[:32] *= 0.5**0.5
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale_attention_(model, chosen.entries.values(), chosen.attention)
    torch.testing.assert_close(model(x)[0], oracle(x)[0], rtol=1e-12, atol=1e-14)


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

"""The rule for depth multiplies every residual branch once, whatever the order in which a block registers layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import CompleteP, SuPar

DEEP = SuPar(depth=CompleteP(base_layers=1))
IDS = torch.zeros(2, 5, dtype=torch.long)


class Flat(nn.Module):
    """Attention and perceptron directly in the block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = norm(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + self.fc2(F.gelu(self.fc1(norm(x))))


class Late(nn.Module):
    """Gated perceptron whose last matrix is registered in the middle, as Meta's w1, w2, w3, behind attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in ("wo", "wv")})
        self.w1, self.w2, self.w3 = (nn.Linear(a * width, b * width, bias=False) for a, b in ((1, 3), (3, 1), (1, 3)))

    def attend(self, x: Tensor) -> Tensor:
        return self.attention["wo"](self.attention["wv"](norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        y = norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Parallel(Late):
    """Both branches start from the same stream."""

    def forward(self, x: Tensor) -> Tensor:
        y = norm(x)
        return x + self.attend(x) + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Normed(Late):
    """A norm follows the attention, so that a factor on its output would change nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + norm(self.attend(x))
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Bent(Late):
    """A function that saturates comes last."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.w2(F.silu(self.w1(x)) * self.w3(x))) + self.attend(x)


class Gated(Late):
    """A branch that is the product of what two layers give."""

    def forward(self, x: Tensor) -> Tensor:
        y = norm(x)
        return x + torch.sigmoid(self.attention["wo"](y)) * self.attention["wv"](y) + self.w2(self.w1(y) * self.w3(y))


class Plain(Late):
    """No residual branch at all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) * 1.0 + self.attend(norm(x))


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class Stack(nn.Module):
    """Table, two blocks and a readout."""

    def __init__(self, block: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.blocks = nn.ModuleList(block(width) for _ in range(2))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(norm(x))


@pytest.mark.parametrize(
    ("block", "ends"), [(Flat, {"o", "fc2"}), (Late, {"attention.wo", "w2"}), (Parallel, {"attention.wo", "w2"})]
)
def test_every_branch_is_multiplied_at_its_last_product(block, ends):
    found = plan(Stack(block), rule=DEEP, inputs=IDS).outputs
    assert found == {f"blocks.{at}.{end}": 0.5 for at in (0, 1) for end in ends}


def test_branches_add_half_of_what_they_did_at_twice_the_depth():
    """The stream after a block is the stream before it, plus m_L^−1 times each branch, computed here by hand."""
    model = models.seeded(lambda: Stack(Flat))
    apply_(model, plan(model, rule=DEEP, inputs=IDS))
    twin = models.seeded(lambda: Stack(Flat))
    block, x = twin.blocks[0], twin.table(IDS)
    y = norm(x)
    x = x + 0.5 * block.o(F.scaled_dot_product_attention(block.q(y), block.k(y), block.v(y)))
    x = x + 0.5 * block.fc2(F.gelu(block.fc1(norm(x))))
    torch.testing.assert_close(model.blocks[0](model.table(IDS)), x)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Normed, r"a branch in which native_layer_norm follows blocks\.0\.attention\.wo\.weight"),
        (Bent, r"a branch in which tanh follows blocks\.0\.w2\.weight"),
        (Gated, r"a branch that multiplies blocks\.\d\.attention\.w. *\S* by"),
        (Plain, r"blocks\.0, which adds nothing to a stream"),
    ],
)
def test_a_branch_that_no_factor_reaches_is_refused(block, words):
    with pytest.raises(UserError, match=words):
        plan(Stack(block), rule=DEEP, inputs=IDS)
    plan(Stack(block), inputs=IDS)  # without a rule for depth nothing is due


def experts(name: str, **changes) -> nn.Module:
    import transformers

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 40, "num_experts_per_tok": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes, **changes)
    return models.seeded(lambda: getattr(transformers, f"{name}ForCausalLM")(config))


def mixtral() -> nn.Module:
    return experts("Mixtral", num_local_experts=4)


def qwen2_moe() -> nn.Module:
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 48}
    return experts("Qwen2Moe", **sizes)


@pytest.mark.parametrize(
    ("build", "ends"),
    [
        (mixtral, {"self_attn.o_proj", "mlp.experts"}),
        (qwen2_moe, {"self_attn.o_proj", "mlp.experts", "mlp.shared_expert.down_proj"}),
    ],
)
def test_stacks_of_experts_end_branches_too(build, ends):
    """The gate of the shared expert chooses and ends nothing, though it comes last."""
    found = plan(build(), rule=DEEP).outputs
    assert found == {f"model.layers.{at}.{end}": 0.5 for at in (0, 1) for end in ends}

"""N-gram losses against a closed form and a slow twin; a model without its body against one whose body is frozen."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

from sparing.jobs.lm.controls import failed, learnt_ngram_losses, ngram_losses, remove_body_, rows_of
from sparing.jobs.lm.labels import IGNORED, Tokens
from sparing.jobs.lm.packing import Packed, pack

transformers = pytest.importorskip("transformers")


def test_a_text_of_five_tokens_by_hand():
    """Text a b a b c, V = 4. N = 5, T = 3: p(a) = (2 + 3/4) / 8. After a: b twice, so T(a) = 1 and c(a) = 2."""
    train = torch.tensor([0, 1, 0, 1, 2])
    p = [Fraction(11, 32), Fraction(11, 32), Fraction(7, 32), Fraction(3, 32)]
    assert sum(p) == 1
    after_a = [(count + p[w]) / 3 for w, count in enumerate((0, 2, 0, 0))]
    after_b = [(count + 2 * p[w]) / 4 for w, count in enumerate((1, 0, 1, 0))]
    assert sum(after_a) == sum(after_b) == 1
    pairs = [(0, 1, after_a[1]), (0, 3, after_a[3]), (1, 2, after_b[2]), (2, 0, p[0]), (3, 3, p[3])]
    inputs, targets = torch.tensor([[v for v, _, _ in pairs]]), torch.tensor([[w for _, w, _ in pairs]])

    found = ngram_losses(train, inputs, targets, vocabulary=4)

    unigram = -sum(math.log(p[w]) for _, w, _ in pairs) / 5
    bigram = -sum(math.log(chance) for _, _, chance in pairs) / 5
    # float64 of five terms
    assert found == {"unigram": pytest.approx(unigram, abs=1e-14), "bigram": pytest.approx(bigram, abs=1e-14)}


def test_chances_sum_to_one_and_fit_dense_tables():
    gen = torch.Generator().manual_seed(0)
    train, size = torch.randint(0, 11, (400,), generator=gen) // 2 * 2, 13
    table = torch.zeros(size, size, dtype=torch.float64)
    for v, w in zip(train[:-1].tolist(), train[1:].tolist(), strict=True):
        table[v, w] += 1
    single = torch.bincount(train, minlength=size).double()
    p = (single + 6 / size) / (400 + 6)
    kinds = (table > 0).sum(1, keepdim=True)
    dense = torch.where(kinds > 0, (table + kinds * p) / (table.sum(1, keepdim=True) + kinds), p)
    torch.testing.assert_close(dense.sum(1), torch.ones(size, dtype=torch.float64))
    inputs, targets = torch.randint(0, size, (2, 5, 7), generator=gen)

    found = ngram_losses(train, inputs, targets, vocabulary=size)["bigram"]

    assert found == pytest.approx(-float(dense[inputs, targets].log().mean()), abs=1e-12)


def test_tokens_that_are_not_judged_do_not_count():
    train = torch.tensor([0, 1, 0, 1, 2])
    one = ngram_losses(train, torch.tensor([0, 1]), torch.tensor([1, IGNORED]), vocabulary=4)
    assert one == ngram_losses(train, torch.tensor([0]), torch.tensor([1]), vocabulary=4)


def test_of_rows_only_what_is_learnt_is_counted():
    """Two documents in a row, padding, and a prompt: pairs and tokens by hand, in order, are a text of their own."""
    none = IGNORED
    prompted = Tokens([5, 3, 0, 1], [none, none, 0, 1])
    packed = pack([Tokens([0, 1, 0], [0, 1, 0]), prompted, Tokens([2, 2], [2, 2])], length=8, pad=7)
    assert packed.rows == 2
    learnt = [(0, 1), (1, 0), (3, 0), (0, 1), (2, 2)]  # the first token of a document follows nothing
    held = Packed(torch.tensor([[0, 1, 4], [3, 3, 0]]), torch.tensor([[0, 1, 4], [none, none, 0]]))
    found = learnt_ngram_losses(packed, held, vocabulary=8)

    single = {w: sum(pair[1] == w for pair in learnt) for w in range(8)}
    kinds = sum(count > 0 for count in single.values())

    def p(w: int) -> float:
        return (single[w] + kinds / 8) / (5 + kinds)

    def after(v: int, w: int) -> float:
        follow = [pair[1] for pair in learnt if pair[0] == v]
        new = len(set(follow))
        return (follow.count(w) + new * p(w)) / (len(follow) + new) if follow else p(w)

    judged = [(0, 1), (1, 4), (3, 0)]
    unigram, bigram = (
        -sum(math.log(chance) for chance in one) / 3
        for one in zip(*((p(w), after(v, w)) for v, w in judged), strict=True)
    )
    # float64 of three terms
    assert found == {"unigram": pytest.approx(unigram, abs=1e-14), "bigram": pytest.approx(bigram, abs=1e-14)}


def test_a_source_of_known_entropy_is_met():
    """A two-state chain that stays with chance 0.9: H = −0.9 log 0.9 − 0.1 log 0.1 = 0.325 nat."""
    gen = torch.Generator().manual_seed(1)
    stays = torch.rand(40_000, generator=gen) < 0.9
    chain = (~stays).cumsum(0) % 2
    found = ngram_losses(chain[:20_000], chain[20_000:-1], chain[20_001:], vocabulary=2)
    # standard error of 20,000 draws of a variable of deviation 0.66 (log odds times √(0.9 · 0.1)): 0.005
    assert found["bigram"] == pytest.approx(0.3251, abs=0.015)
    assert found["unigram"] == pytest.approx(math.log(2), abs=0.01)


def models(kind: str):
    """A small model, and where its branches end."""
    torch.manual_seed(0)
    same = {"vocab_size": 17, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8, **drop, **same)
        return transformers.GPT2LMHeadModel(config), ("c_proj",)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **same
    )
    return transformers.LlamaForCausalLM(config), ("o_proj", "down_proj")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_without_its_body_a_model_is_the_one_whose_branches_are_frozen_at_zero(kind):
    ids = torch.randint(0, 17, (4, 3, 8), generator=torch.Generator().manual_seed(2))
    twin, ends = models(kind)
    for name, module in twin.double().named_modules():
        if name.rpartition(".")[2] in ends:
            for parameter in module.parameters():
                torch.nn.init.zeros_(parameter).requires_grad_(requires_grad=False)
    bare = models(kind)[0].double()
    assert remove_body_(bare) == 2

    losses = [trained(model, ids) for model in (twin, bare)]

    assert losses[1][0] != losses[1][-1]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0, atol=1e-12)  # the same sums in the same order


def trained(model, ids) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    losses = []
    for rows in ids:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_that_ends_above_a_control_is_told_so():
    rows = rows_of({"unigram": 3.0, "bigram": 2.0, "no body": 2.2}, 2.1)
    assert [row["model_below"] for row in rows] == pytest.approx([0.9, -0.1, 0.1])
    assert failed(rows).startswith("Not passed: the model ends above bigram counts (2.000 nat/token), so")
    assert not failed(rows_of({"unigram": 3.0, "bigram": 2.0}, 1.9))
    assert "bigram" in failed(rows_of({"bigram": 2.0}, None))  # a model that diverged has passed nothing

"""``--device``: a run on an accelerator leaves what the same run on the CPU does, where operators are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from federated import cards
from jobs.federate.test_texts import small, texts  # noqa: F401
from sparing.errors import UserError
from sparing.jobs.federate import job, run
from sparing.jobs.federate.groups import Trust

LOSSES = ("loss", "client_loss", "train_loss")
TIMED = ("seconds", "clients_per_second")


@pytest.fixture
def on_a_card(monkeypatch):
    """Run settings on the CPU, and then where a card stands in for CUDA."""

    def both(settings):
        host = run(settings)
        monkeypatch.setattr(job, "device_for", lambda _: torch.device(cards.FIRST))
        with cards.there():
            return host, run(replace(settings, out=settings.out.with_name("card")))

    return both


def assert_same(settings, host, card):
    for table in ("rounds", "methods", "pairs", "faults", "price"):
        plain = [[{name: value for name, value in row.items() if not name.endswith(TIMED)} for row in one.table(table)]
                 for one in (host, card)]  # fmt: skip
        assert str(plain[0]) == str(plain[1])
    assert not any(row["left_out"] for row in card.table("rounds"))
    for name in settings.methods:
        file = settings.out / "models" / f"{name}.safetensors"
        if file.is_file():
            one, other = load_file(file), load_file(settings.out.with_name("card") / "models" / file.name)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


RUNS = {
    "stacked": {"methods": ("fedavg", "scaffold", "norm-matched")},
    "masked": {"density": 0.5},
    "statistics": {"net": "cnn-bn", "batch_norm": "recalibrate", "workers": 1},
    "the server's own rows": {"robust": "fltrust", "trust": Trust(rows=10)},
    "masked sum on Flower": {"aggregation": "secure", "engine": "flower"},
}


@pytest.mark.usefixtures("pageless")
@pytest.mark.parametrize("name", RUNS)
def test_as_on_the_cpu(name, tiny, on_a_card):
    settings = tiny(**RUNS[name])
    assert_same(settings, *on_a_card(settings))


@pytest.mark.usefixtures("pageless")
def test_a_language_model_too(small, on_a_card):  # noqa: F811
    pytest.importorskip("peft")
    settings = small(methods=("fedavg", "fedex-lora"), rounds=1)
    host, card = on_a_card(settings)
    for one, other in zip(host.table("rounds"), card.table("rounds"), strict=True):
        assert not other["left_out"]
        # float32, and attention is another kernel away from the CPU
        assert [other[name] for name in LOSSES] == pytest.approx([one[name] for name in LOSSES], rel=1e-6)
    one, other = (load_file(out / "models" / "fedex-lora" / "model.safetensors")
                  for out in (settings.out, settings.out.with_name("card")))  # fmt: skip
    assert max(float((value - other[name]).abs().max()) for name, value in one.items()) < 1e-5


def test_cuda_is_refused_where_there_is_none(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device is visible"):
        run(tiny(device="cuda"))

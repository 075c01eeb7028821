"""The callback in the real Trainer: folded checkpoints, masks that move, runs that resume to the same bits."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from scaling import models
from sparing.errors import UserError
from sparing.scaling import GMP, RigL, SparseCallback, SuPar, apply_, convert_, plan, restore_
from sparing.scaling.callback import FILE
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.masks.mask_set import masks_of

transformers = pytest.importorskip("transformers")

STEPS = 6
METHODS = {"static": None, "rigl": RigL(every=2, share=0.4), "gmp": GMP(final=0.3, start=0.1, every=1)}


def tokens(index: int) -> torch.Tensor:
    return torch.randint(64, (8,), generator=torch.Generator().manual_seed(index))


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": tokens(index), "labels": tokens(index)}


class Watch(transformers.TrainerCallback):
    """Keeps what the live model says at each save."""

    def __init__(self) -> None:
        self.said: dict[int, torch.Tensor] = {}

    def on_save(self, args, state, control, *, model, **others) -> None:
        self.said[state.global_step] = logits(model)


def logits(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = model(torch.stack([tokens(100), tokens(101)])).logits
    model.train()
    return found


def build(name: str, *, tied: bool = False):
    """Twice the base's width at a quarter of its density: every factor that a plan has is in use."""
    rule = SuPar(input=2.0, output=0.7)
    torch.manual_seed(0)
    model = models.llama(64, tie_word_embeddings=tied)
    chosen = plan(
        model, base=models.llama(32, tie_word_embeddings=tied), density=1 if name == "gmp" else 0.25, rule=rule
    )
    return model, chosen


def trainer(path, name: str, *, tied: bool = False, resume_from=None, backend: str = "dense", **changes):
    model, chosen = build(name, tied=tied)
    apply_(model, chosen, seed=0)
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=2**-7, weight_decay=0.1))
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2,
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "warmup_steps": 2,
    }  # fmt: skip
    args = transformers.TrainingArguments(output_dir=str(path), **(settings | changes))
    callback, watch = SparseCallback(METHODS[name], resume_from=resume_from), Watch()
    job = transformers.Trainer(
        model=model, args=args, train_dataset=Rows(), optimizers=(optimizer, None), callbacks=[callback, watch]
    )
    convert_(model, masks_of(model), backend=backend, optimizer=optimizer)  # once the callback holds the parameters
    return job, callback, watch


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_checkpoint_reloads_in_plain_transformers(tmp_path, name, tied):
    """Float32 factors folded into weights: rounding of 1e-7 at each of a dozen layers, 1e-4 asked for."""
    job, callback, watch = trainer(tmp_path, name, tied=tied)
    job.train()
    assert sorted(watch.said) == [2, 4, 6]
    for step, said in watch.said.items():
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert not hasattr(found, "scaling_plan")
        torch.testing.assert_close(logits(found), said, rtol=0, atol=1e-5)
        assert float(said.abs().max()) > 0.05
    job.save_model(str(tmp_path / "end"))
    end = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    torch.testing.assert_close(logits(end), logits(job.model), rtol=0, atol=1e-5)
    assert (callback.evolution is None) == (name == "static")


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path, name):
    """To the bit: the same batches, the same schedule, the same masks."""
    job, _, _ = trainer(tmp_path, name, max_grad_norm=0.0, data_seed=3)
    batches = []
    step_of = job.training_step
    job.training_step = lambda model, inputs, *rest: batches.append(inputs) or step_of(model, inputs, *rest)
    job.train()
    model, chosen = build(name)
    masks = apply_(model, chosen, seed=0)
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=2**-7, weight_decay=0.1))
    method = METHODS[name]
    evolution = method and Evolution(model, masks, optimizer, method, steps=STEPS)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    for step, batch in enumerate(batches):
        model(**batch).loss.backward()
        optimizer.step()
        if evolution:
            evolution.step(step)
        scheduler.step()
        optimizer.zero_grad()
    assert len(batches) == STEPS
    assert masks_of(job.model).digest() == masks.digest()
    for key, value in model.state_dict().items():
        assert torch.equal(job.model.state_dict()[key], value), key


@pytest.mark.parametrize("backend", ["dense", "csr"])
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_same_run(tmp_path, name, backend):
    whole, _, _ = trainer(tmp_path, name, backend=backend)
    whole.train()
    again, _, _ = trainer(tmp_path, name, backend=backend)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert masks_of(again.model).digest() == masks_of(whole.model).digest()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value), key


def test_a_checkpoint_elsewhere_is_named_and_one_without_our_file_refused(tmp_path):
    whole, _, _ = trainer(tmp_path / "a", "static")
    whole.train()
    there = shutil.copytree(tmp_path / "a" / "checkpoint-2", tmp_path / "moved")
    lost, _, _ = trainer(tmp_path / "b", "static")
    with pytest.raises(UserError, match="resume_from"):
        lost.train(resume_from_checkpoint=str(there))
    found, _, _ = trainer(tmp_path / "b", "static", resume_from=there)
    found.train(resume_from_checkpoint=str(there))
    assert torch.equal(logits(found.model), logits(whole.model))
    (there / FILE).unlink()
    with pytest.raises(UserError, match="neither masks nor multipliers"):
        trainer(tmp_path / "b", "static", resume_from=there)[0].train(resume_from_checkpoint=str(there))


def test_the_file_beside_a_checkpoint_is_the_state_of_a_scaled_model(tmp_path):
    job, _, watch = trainer(tmp_path, "rigl")
    job.train()
    from safetensors.torch import load_file

    model, chosen = build("rigl")
    restore_(model, chosen)
    model.load_state_dict(load_file(tmp_path / "checkpoint-4" / FILE), strict=False)
    assert torch.equal(logits(model), watch.said[4])


def test_what_would_lose_rates_or_masks_is_refused(tmp_path):
    model, chosen = build("static")
    plain = copy.deepcopy(model)
    apply_(model, chosen)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    make = transformers.Trainer
    with pytest.raises(UserError, match=r"plan\.groups\(model"):
        make(model=model, args=args, callbacks=[SparseCallback()])
    optimizer = torch.optim.AdamW(plain.parameters())
    with pytest.raises(UserError, match="was not scaled"):
        make(model=plain, args=args, optimizers=(optimizer, None), callbacks=[SparseCallback()])
    flat = torch.optim.AdamW(model.parameters())
    job = make(model=model, args=args, train_dataset=Rows(), optimizers=(flat, None), callbacks=[SparseCallback()])
    with pytest.raises(UserError, match="not on the plan's groups"):
        job.train()

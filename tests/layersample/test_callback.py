"""The callback in the real Trainer: it freezes after the optimizer is built, and a resumed run is the same run."""

from __future__ import annotations

import contextlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import zoo
from lisa_loop import assert_same, block_of, copy_of, moved
from sparing.errors import UserError
from sparing.layersample import Adaptive, Fixed, LayerSampling, LayerSamplingCallback, Reshuffle, Uniform, Weighted
from sparing.layersample.callback import FILE, settings_from
from sparing.layersample.state import read_state, write_state

transformers = pytest.importorskip("transformers")

STEPS = 7
SETTINGS = LayerSampling(active=1, period=3, sampler=Reshuffle())


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        return {name: value[0] for name, value in zoo.tokens(batch=1, seed=index).items()}


class Watch(transformers.TrainerCallback):
    """Notes what trains in every step, and can stop the run as if the machine had died."""

    def __init__(self, die_at: int | None = None) -> None:
        self.rows: list[tuple[int, frozenset[str]]] = []
        self.rates: list[float] = []
        self.die_at = die_at

    def on_optimizer_step(self, args, state, control, *, model, optimizer, **others) -> None:
        training = frozenset(name for name, p in model.named_parameters() if p.grad is not None)
        self.rows.append((state.global_step, training))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **others) -> None:
        if state.global_step == self.die_at:
            raise KeyboardInterrupt


def trainer(path, callbacks, *, model=None, dtype=torch.float64, **changes) -> transformers.Trainer:
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "optim": "adamw_torch",
        "logging_strategy": "no",
        "dataloader_num_workers": 0,
    }
    args = transformers.TrainingArguments(output_dir=str(path), **(settings | changes))
    return transformers.Trainer(
        model=model or zoo.llama(dtype=dtype), args=args, train_dataset=Rows(), callbacks=callbacks
    )


SAVED = {"save_strategy": "steps", "save_steps": 1}


def run(path, settings=SETTINGS, *, resume=None, resume_from=None, die_at=None, **changes):
    callback, watch = LayerSamplingCallback(settings, seed=3, resume_from=resume_from), Watch(die_at)
    job = trainer(path, [callback, watch], **changes)
    with contextlib.suppress(KeyboardInterrupt):
        job.train(resume_from_checkpoint=str(resume) if resume else None)
    return job.model, watch, callback


def test_the_blocks_that_train_are_the_drawn_ones(tmp_path) -> None:
    """The optimizer holds every block though most are frozen, and the flags are given back at the end."""
    model = zoo.llama()
    before = copy_of(model)
    callback, watch = LayerSamplingCallback(SETTINGS, seed=3), Watch()
    job = trainer(tmp_path, [callback, watch], model=model)
    job.train()
    held = {id(p) for group in job.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert callback.sampler.closed
    assert all(p.requires_grad for p in model.parameters())
    drawn = [Reshuffle().draw(4, 1, seed=3, interval=step // 3) for step in range(STEPS)]
    assert [tuple(sorted({block_of(n) for n in names} - {None})) for _, names in watch.rows] == drawn
    assert [interval for _, interval, _ in callback.sampler.history] == [0, 1, 2]
    assert {block_of(name) for name in moved(before, model)} == {None, *(i for blocks in drawn for i in blocks)}


def test_a_run_that_died_is_followed_by_one_that_trains_every_block(tmp_path) -> None:
    callback = LayerSamplingCallback(LayerSampling(active=4, period=1))
    model = zoo.llama()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, [callback, Watch(die_at=2)], model=model).train()
    watch = Watch()
    trainer(tmp_path, [callback, watch], model=model).train()
    assert all(len(names) == len(copy_of(model)) for _, names in watch.rows)


def test_resume_gives_the_same_blocks_and_the_same_bits(tmp_path) -> None:
    """Before, at and after the switch at step 3; the other policies are tested in the plain loop."""
    settings = LayerSampling(active=1, period=3, state="offload", sampler=Reshuffle())
    whole, watched, _ = run(tmp_path, settings, **SAVED)
    for stop in (2, 3, 4):
        model, watch, _ = run(tmp_path, settings, resume=tmp_path / f"checkpoint-{stop}")
        assert watch.rows == watched.rows[stop:]
        assert_same(copy_of(whole), copy_of(model))


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        (LayerSampling(active=1, period=3, masters=True), torch.bfloat16),
        (LayerSampling(active=1, period=2, sampler=Adaptive(temperature=0.1)), torch.float64),
        (LayerSampling.badam(period=2), torch.bfloat16),
        (LayerSampling.grass(active=1, period=2, probe=2), torch.float64),
        (LayerSampling.misa(budget=0.2, period=3, momentum_step=True), torch.bfloat16),
        (LayerSampling(active=1, period=2, frozen="nf4"), torch.bfloat16),
        (LayerSampling(active=1, period=2, frozen="int8", exact=False), torch.float32),
    ],
    ids=["masters", "scores", "badam", "grass", "misa", "frozen, exact", "frozen, rounded"],
)
def test_what_only_we_know_resumes_too(tmp_path, settings: LayerSampling, dtype: torch.dtype) -> None:
    """The Trainer's own checkpoint rounds fp32 moments to the weights' dtype, and has no scores."""
    whole, watched, _ = run(tmp_path, settings, dtype=dtype, **SAVED | {"save_steps": 3})
    model, watch, _ = run(tmp_path, settings, resume=tmp_path / "checkpoint-3", dtype=dtype)
    assert watch.rows == watched.rows[3:]
    assert_same(copy_of(whole), copy_of(model))


def test_the_trainer_may_restore_the_callback_itself(tmp_path) -> None:
    run(tmp_path, die_at=5, **SAVED)
    default = LayerSamplingCallback(seed=9)
    watch = Watch()
    restored = trainer(tmp_path, [default, watch], restore_callback_states_from_checkpoint=True)
    restored.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (callback,) = [c for c in restored.callback_handler.callbacks if isinstance(c, LayerSamplingCallback)]
    assert (callback.settings, callback.seed) == (SETTINGS, 3)
    assert [row[1:] for row in callback.sampler.history] == [
        (i, SETTINGS.sampler.draw(4, 1, seed=3, interval=i)) for i in range(3)
    ]


def test_other_settings_are_refused_on_resume(tmp_path) -> None:
    run(tmp_path, die_at=5, **SAVED)
    with pytest.raises(UserError, match="resumed settings"):
        run(tmp_path, LayerSampling(active=2, period=3), resume=tmp_path / "checkpoint-4")


def test_a_checkpoint_that_was_moved_needs_to_be_named(tmp_path) -> None:
    """Offloaded state lies in our own file, and the Trainer does not tell where it resumes from."""
    settings = LayerSampling(active=1, period=2, state="offload")
    run(tmp_path / "a", settings, die_at=5, **SAVED)
    moved_to = tmp_path / "elsewhere"
    shutil.move(tmp_path / "a" / "checkpoint-4", moved_to)
    with pytest.raises(UserError, match="resume_from"):
        run(tmp_path / "b", settings, resume=moved_to)
    run(tmp_path / "b", settings, die_at=5, **SAVED)  # another run's checkpoint at the same step is not taken for it
    with pytest.raises(UserError, match="resume_from"):
        run(tmp_path / "b", settings, resume=moved_to)
    _, _, callback = run(tmp_path / "b", settings, resume=moved_to, resume_from=moved_to)
    assert len(callback.sampler.history) == 4


def test_a_checkpoint_made_without_the_callback_is_a_start(tmp_path) -> None:
    """The state of blocks that are frozen now is let go: it would be a full optimizer's memory."""
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, [Watch(die_at=4)], **SAVED | {"save_steps": 3}).train()
    callback = LayerSamplingCallback(SETTINGS, seed=3)
    watch = Watch()
    job = trainer(tmp_path, [callback, watch])
    job.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert watch.rows[0][0] == 3
    assert [block_of(n) for n in watch.rows[0][1] if block_of(n) is not None] == [
        *SETTINGS.sampler.draw(4, 1, seed=3, interval=1)
    ] * 9


def test_accumulation_draws_once_per_window(tmp_path) -> None:
    _, watch, callback = run(tmp_path, gradient_accumulation_steps=3)
    assert [step for step, _, _ in callback.sampler.history] == [0, 3, 6]
    assert len(watch.rows) == STEPS


def test_checkpointing_with_a_frozen_embedding_is_truncated(tmp_path) -> None:
    settings = LayerSampling(embed=False, active=1, period=99, sampler=Fixed(blocks=(2,)))
    model = zoo.llama()
    seen: list[bool] = []
    model.model.layers[1].register_forward_hook(lambda m, i, o: seen.append(o.requires_grad))
    run(tmp_path, settings, model=model, activation_checkpointing=True)
    assert seen == [False] * STEPS


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"optim": "galore_adamw_layerwise"}, "layerwise"),
        ({"optim": "lomo"}, "lomo"),
        ({"optim": "paged_adamw_32bit"}, "paged"),
        ({"optim_target_modules": ["attn"]}, "optim_target_modules"),
        ({"deepspeed": {"zero": 1}}, "DeepSpeed"),
        ({"n_gpu": 2}, "DataParallel"),
        ({"parallel_mode": transformers.training_args.ParallelMode.DISTRIBUTED, "world_size": 2}, "bucket"),
        ({"fsdp": True}, "fsdp"),
        ({"fp16": True}, "the gradient scaler finds none"),
    ],
)
def test_set_ups_that_cannot_work_are_refused(change: dict, match: str) -> None:
    usual = {"optim": "adamw_torch", "optim_target_modules": None, "deepspeed": None, "n_gpu": 1, "world_size": 1}
    usual |= {"parallel_mode": None, "fsdp": None, "fp16": False, "output_dir": ""}
    args = SimpleNamespace(**(usual | change))
    model = zoo.llama()
    callback = LayerSamplingCallback(LayerSampling.grass())  # offloads state, and probes
    with pytest.raises(UserError, match=match):
        callback.on_train_begin(
            args, SimpleNamespace(global_step=0), None, model=model, optimizer=torch.optim.SGD(model.parameters())
        )


@pytest.mark.parametrize(
    "settings",
    [
        LayerSampling(),
        LayerSampling(active=3, embed=False, sampler=Weighted(weights=(1, 2, 3, 4)), body=("a", "b")),
        LayerSampling(active=1, sampler=Fixed(blocks=(2,)), state="offload", warmup=2),
        LayerSampling(sampler=Adaptive(signal="bound")),
        LayerSampling.badam(order="descending"),
        LayerSampling.grass(),
        LayerSampling.misa(),
        LayerSampling(frozen="int8", exact=False),
    ],
)
def test_settings_survive_json(settings: LayerSampling) -> None:
    assert settings_from(json.loads(json.dumps(settings.describe()))) == settings


def test_a_sampler_of_the_users_own_cannot_be_rebuilt_from_json() -> None:
    with pytest.raises(UserError, match="not one of ours"):
        settings_from({"sampler": {"name": "Theirs"}})
    assert settings_from({}) == LayerSampling(sampler=Uniform())


def test_the_file_in_the_checkpoint_is_ours_and_whole(tmp_path) -> None:
    run(tmp_path, LayerSampling(active=1, period=2, state="offload"), die_at=5, **SAVED)
    state = read_state(tmp_path / "checkpoint-4" / FILE)
    stored = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    saved = stored["stateful_callbacks"]["LayerSamplingCallback"]["attributes"]["saved"]
    assert state["token"] == saved["token"]
    assert state["tensors"]
    write_state(tmp_path / "again", state)
    assert read_state(tmp_path / "again")["history"] == saved["history"]

"""The parts of the study of token weights that decide what is compared with what: streams, losses, rates, controls."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import zoo
from sparing.jobs.adapt.weights import START

TEXT = (
    "One day the old cat met Margery by the well. She was on her way to Madrid. "
    "After 12 days they came to Toledo. In the town there lived a man called Pedro. "
)


@pytest.fixture(scope="module")
def lm():
    from sparing.jobs.adapt.lm import as_functions
    from sparing.jobs.lm.corpus import byte_pairs

    tokenizer = byte_pairs(TEXT, 300)
    model = zoo.llama(layers=2, vocab=300, tied=True, dtype=torch.float64, attn_implementation="eager")
    model.config.max_position_embeddings = 512
    return as_functions(zoo.redraw_(model, std=0.3), tokenizer)


@pytest.fixture(scope="module")
def base(lm):
    """Documents that all differ; enough for every seed's streams."""
    from benchmarks.token_base import SMALL, Base
    from benchmarks.token_weights import SEEDS, SETTINGS, STREAMS

    from sparing.jobs.adapt.corpus import Corpus, Document, Question

    def some(place: int, part: int, streams: int) -> tuple[Document, ...]:
        asked = (Question("The hens had been to", "Toledo"), Question("The old cat met", "Margery by"))
        return tuple(
            Document(f"Number {place}{part} {at} came to Toledo.", asked[: 1 + at % 2])
            for at in range(streams * SETTINGS.documents)
        )

    validation = tuple(some(0, part, count * (SEEDS + 1)) for part, count in enumerate(STREAMS["validation"]))
    test = tuple(some(1, part, count * SEEDS) for part, count in enumerate(STREAMS["test"]))
    other = (torch.tensor([lm.start, *lm.encode(TEXT)]),)
    return Base(SMALL, lm, Corpus((), (), (), (), other, other), validation, test)


@pytest.fixture
def window(base):
    from benchmarks.token_weights import cut

    return cut(base, "test", 0)[0]


def test_no_document_serves_two_seeds_nor_two_purposes(base):
    from benchmarks.token_weights import SEEDS, STREAMS, TUNING, cut

    assert TUNING not in range(SEEDS)
    used = [cut(base, "test", seed) for seed in range(SEEDS)]
    used += [cut(base, "validation", seed) for seed in (*range(SEEDS), TUNING)]
    seen = [tuple(text.tolist()) for windows in used for one in windows for text in one.stream.texts]
    assert len(seen) == len(set(seen)) == 12 * (SEEDS * sum(STREAMS["test"]) + (SEEDS + 1) * sum(STREAMS["validation"]))
    with pytest.raises(ValueError, match="read more text"):
        cut(base, "test", SEEDS)


def test_loss_of_each_question_is_that_of_its_answer_alone(lm, window):
    from benchmarks.token_weights import answer_tokens, question_losses

    asked = window.stream.questions
    expected, sizes = [], []
    for prompt, words, answer in zip(asked.prompts, asked.prompt_texts, asked.expected, strict=True):
        ids = torch.cat([prompt, torch.tensor(lm.encode(f"{words} {answer}")[len(lm.encode(words)) :])])
        with torch.no_grad():
            scores = lm.scored.model(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
        place = range(len(prompt), len(ids))
        expected.append(-sum(scores[at - 1, ids[at]] for at in place).item())
        sizes.append(len(place))
    assert len(set(sizes)) > 1
    # transformers turns by angles of float32, whose rounding depends on the length of the batch
    truth = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(question_losses(lm, lm.theta, window), truth, rtol=1e-7, atol=1e-6)
    assert answer_tokens(window).tolist() == sizes


def test_a_loss_is_a_mean_over_the_answer_tokens_of_all_streams(base):
    from benchmarks.token_weights import answer_tokens, cut, measure, uniform

    windows = cut(base, "test", 1)[:3]
    still, moved = measure(base.lm, windows, None, 0.0), measure(base.lm, windows, uniform, 0.1)
    total = sum(int(answer_tokens(one).sum()) for one in windows)
    for found in (still, moved):
        assert found["nll"] == pytest.approx(sum(found["losses"]) / total, rel=1e-12)
        assert found["objective"] == pytest.approx(found["nll"] + 0.1 * found["kl"], rel=1e-12)
    assert still["kl"] == pytest.approx(0.0, abs=1e-12)
    assert moved["kl"] > 0
    assert moved["losses"] != still["losses"]
    # every stream begins at θ₀: alone it gives the same losses
    alone = measure(base.lm, windows[2:], uniform, 0.1)["losses"]
    assert moved["losses"][-len(alone) :] == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("best", "factor"), list(product((1e-4, 0.02, 3.0), (2.0, 3.0))))
def test_a_sweep_goes_on_until_the_best_rate_is_inside(best, factor):
    from sparing.jobs.sweeps import inside

    rate, tried = inside((0.1, 0.1 * factor), lambda lr: abs(math.log(lr / best)))
    rates = [float(name) for name in tried]
    assert min(rates) < rate < max(rates)
    assert tried[f"{rate:g}"] == min(tried.values())
    assert factor**-0.6 < rate / best < factor**0.6


def test_a_sweep_ends_where_no_step_helps_and_passes_over_what_diverged():
    from sparing.jobs.sweeps import SMALLEST, inside

    assert inside((0.1, 0.3), lambda lr: lr)[0] <= SMALLEST
    assert inside((0.1, 0.2, 0.4), lambda lr: math.nan if lr > 0.3 else -lr)[0] == 0.2


def test_names_and_numbers_alone_are_weighed(lm):
    from sparing.jobs.adapt.corpus import Document, stream_of
    from sparing.jobs.adapt.evaluate import name_weights
    from sparing.jobs.adapt.problem import make_window

    chosen = [Document(TEXT.strip(), ())] * 2
    texts = tuple(torch.tensor([lm.start, *lm.encode(one.text)]) for one in chosen)
    stream = stream_of(lm, [Document(TEXT.strip(), (ask(),)), chosen[1]])
    weights = name_weights(lm, make_window(lm, stream, texts[:1]))
    half = len(weights) // 2
    read, known = "", ("Margery", "Madrid", "12", "Toledo", "Pedro")
    for token, weight in zip(texts[0][1:].tolist(), weights[:half].tolist(), strict=True):
        piece = lm.tokenizer.decode([token])
        begin, end = len(read) + len(piece) - len(piece.lstrip()), len(read) + len(piece)
        inside = any(TEXT.index(name) < end and begin < TEXT.index(name) + len(name) for name in known)
        assert (weight > 0) == inside, piece
        read += piece
    assert weights[half:].tolist() == weights[:half].tolist()
    assert weights.mean().item() == pytest.approx(START, rel=1e-5)


def ask():
    from sparing.jobs.adapt.corpus import Question

    return Question("They came to", "Toledo")


def test_random_weights_have_the_mean_of_uniform_ones_and_differ_by_seed_and_stream(base):
    from benchmarks.token_weights import at_random, cut

    windows = cut(base, "test", 0)
    drawn = torch.cat([at_random(one, 0) for one in windows])
    assert drawn.min() >= 0
    assert drawn.mean().item() == pytest.approx(START, abs=4 * START / math.sqrt(len(drawn)))
    first = at_random(windows[0], 0)
    assert first.tolist() == at_random(windows[0], 0).tolist() != at_random(windows[0], 1).tolist()
    assert first[:5].tolist() != at_random(windows[1], 0)[:5].tolist()


@pytest.mark.parametrize(("outer", "inner"), [(0.003, 0.8), (0.001, 0.4), (0.03, 0.1)])
def test_outer_rates_are_swept_at_every_inner_rate(tmp_path, monkeypatch, outer, inner):
    """The objective is a narrow valley across both rates, in which sweeps of one rate after the other end too soon."""
    from benchmarks import token_weights
    from benchmarks.token_base import SMALL

    def height(one: float, two: float) -> float:
        along, across = math.log(one / outer) - math.log(two / inner), math.log(one / outer) + math.log(two / inner)
        return 0.01 * along**2 + across**2

    def learn(base, name, seed, *, outer, inner):
        assert seed == token_weights.TUNING
        asked.append((name, outer, inner))
        return None, {"learnt": height(outer, inner)}

    asked: list[tuple[str, float, float]] = []
    monkeypatch.setattr(token_weights, "learn", learn)
    monkeypatch.setattr(token_weights, "cut", lambda *_: [])
    there = {"nll": 1.0}
    monkeypatch.setattr(token_weights, "measure", lambda lm, known, weigh, lr: there | {"objective": abs(lr - 0.8)})
    rows = token_weights.Rows(tmp_path / "rows.json")
    shared, best, own = token_weights.chosen_rates(
        type("Base", (), {"lm": None, "study": SMALL}), rows, ("rgu", "fg-psi")
    )
    assert shared == 0.8
    assert set(best) == set(own) == {"rgu", "fg-psi"}
    assert len(asked) == len(set(asked))  # nothing twice
    for name in own:
        tried = {(one, two): height(one, two) for arm, one, two in asked if arm == name}
        assert {two for _, two in tried} >= {0.05, 0.1, 0.2, 0.4, 0.8, 1.6}
        assert own[name] == min(tried, key=tried.__getitem__)
        assert best[name] == min((both for both in tried if both[1] == 0.8), key=tried.__getitem__)
        assert min(one for one, _ in tried) < own[name][0] < max(one for one, _ in tried)


def test_on_stories_rates_are_swept_in_turn_and_no_arm_runs_at_those_of_uniform_weights(tmp_path, monkeypatch):
    """A valley across both rates, with a second dip where the last sweep begins: that of the lowest run is kept."""
    from benchmarks import token_weights
    from benchmarks.token_base import STORIES

    def learn(base, name, seed, *, outer, inner):
        low = math.log(outer / 0.09) ** 2 + math.log(inner / 0.0013) ** 2
        dip = 8.0 if (outer, inner) == (0.003, 0.0013) else 0.0  # with worse neighbours, and above the lowest
        asked[outer, inner] = low - dip
        return None, {"learnt": low - dip}

    asked: dict[tuple[float, float], float] = {}
    monkeypatch.setattr(token_weights, "learn", learn)
    monkeypatch.setattr(token_weights, "cut", lambda *_: [])
    there = {"nll": 1.0}
    monkeypatch.setattr(token_weights, "measure", lambda lm, known, weigh, lr: there | {"objective": abs(lr - 0.02)})
    rows = token_weights.Rows(tmp_path / "rows.json", STORIES)
    shared, best, own = token_weights.chosen_rates(type("Base", (), {"lm": None, "study": STORIES}), rows, ("rgu",))
    assert shared == 0.02
    assert list(asked) == [  # each rate inside, nothing twice
        (0.001, 0.005), (0.003, 0.005), (0.01, 0.005), (0.03, 0.005), (0.09, 0.005), (0.27, 0.005), (0.09, 0.0025),
        (0.09, 0.01), (0.09, 0.0013), (0.09, 0.00065), (0.001, 0.0013), (0.003, 0.0013), (0.01, 0.0013),
        (0.27, 0.0013),
    ]  # fmt: skip
    assert best == own == {"rgu": min(asked, key=asked.__getitem__)} == {"rgu": (0.09, 0.0013)}


@pytest.mark.parametrize("own", [{"rgu": (0.1, 0.2), "fg-phi": (0.3, 0.8)}, {"rgu": (0.01, 0.8), "fg-phi": (0.3, 0.4)}])
def test_every_arm_has_its_rows_at_the_rates_that_were_chosen(base, tmp_path, monkeypatch, own):
    """Again at rates of its own where their inner rate is another; four times as long at the rates of either."""
    from benchmarks import token_weights
    from benchmarks.token_weights import LONGER, SEEDS, TUNING

    shared = {"rgu": (0.01, 0.8), "fg-phi": (0.03, 0.8)}
    longer = lambda base, name, seed, *, times, **rates: (None, {"seed": seed, "times": times, **rates})  # noqa: E731
    fakes = {
        "chosen_rates": lambda base, rows, learnt: (0.8, shared, own), "learn": longer,
        "learnt_row": lambda base, name, seed, **rates: rates, "base_row": lambda base, seed: {},
        "adapted": lambda base, weigh, seed, near: {"near": near},
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(token_weights, name, fake)
    rows = token_weights.Rows(tmp_path / "rows.json")
    token_weights.make_rows(base, rows, ["uniform", "rgu", "fg-phi"])
    again = [arm for arm in own if own[arm][1] != 0.8]
    expected = {f"{arm} | {seed}": shared[arm] for arm in shared for seed in range(SEEDS)}
    expected |= {f"own {arm} | {seed}": own[arm] for arm in again for seed in range(SEEDS)}
    found = {key: row for key, row in rows.rows.items() if not key.startswith(("base", "uniform", "longer"))}
    assert {key: (row["outer"], row["inner"]) for key, row in found.items()} == expected
    assert (
        sum(key.startswith("uniform") for key in rows.rows) == sum(key.startswith("base") for key in rows.rows) == SEEDS
    )
    long = {key: row for key, row in rows.rows.items() if key.startswith("longer")}
    ends = {"longer | rgu | 8": shared["rgu"]} | ({"longer | own rgu | 8": own["rgu"]} if "rgu" in again else {})
    assert {key: (row["outer"], row["inner"]) for key, row in long.items()} == ends
    assert {(row["seed"], row["times"]) for row in long.values()} == {(TUNING, LONGER)}


def test_the_questions_are_answered_at_the_rate_of_the_look_that_is_kept(base, monkeypatch):
    from benchmarks import token_weights
    from benchmarks.token_weights import cut, measure, uniform

    looks = [{"step": 0, "lr": 0.8}, {"step": 2, "lr": 0.4}, {"step": 4, "lr": 0.2}]
    state = type("State", (), {"best": {}})
    monkeypatch.setattr(token_weights, "learn", lambda *_, **rates: (state, {"looks": looks, "kept": 2} | rates))
    monkeypatch.setattr(token_weights, "stream_weights", lambda phi, window: uniform(window))
    row = token_weights.learnt_row(base, "rgu", 0, outer=0.01, inner=0.1)
    assert row["lr"] == 0.4
    assert row["losses"] == measure(base.lm, cut(base, "test", 0), uniform, 0.4)["losses"]


@pytest.mark.parametrize(
    ("heights", "kept"), [((1.0, 0.8, 0.9), 2), ((1.0, 0.9, 0.8), 4), ((1.0, 1.1, 1.2), 0), ((1.0, math.nan, 0.9), 4)]
)
def test_of_the_looks_of_a_run_the_network_of_lowest_objective_is_kept(base, monkeypatch, heights, kept):
    """Four steps, a look after two and after four, each at the best of its rates of adapting."""
    from benchmarks import token_weights
    from benchmarks.token_base import SMALL
    from benchmarks.token_weights import learn

    from sparing.jobs.adapt import meta

    start, *later = heights
    seen: list[float] = []

    def step_(state, lm, data, settings, arm):
        state.step += 1
        state.seconds += settings.seconds / 4
        for value in state.phi.values():
            value.data.fill_(state.step)

    def best_adapting(base, weigh, seed, near):
        seen.append(near)
        height = start if weigh is token_weights.uniform else later[len(seen) - 2]
        return 0.2, {"0.1": 9.0, "0.2": height, "0.4": 9.0}

    monkeypatch.setattr(meta, "outer_step_", step_)
    monkeypatch.setattr(token_weights, "best_adapting", best_adapting)
    token_weights.at_start.cache_clear()
    state, row = learn(base, "rgu", 0, outer=0.003, inner=0.1)
    token_weights.at_start.cache_clear()
    assert seen == [SMALL.inner[1], 0.2, 0.2]  # the networks near the rate of the look before
    assert [one["lr"] for one in row["looks"]] == [0.2] * 3
    assert (row["kept"], row["steps"]) == (kept, 4)
    assert row["learnt"] == min(height for height in later if not math.isnan(height))
    fresh = meta.start(token_weights.cut(base, "validation", 0)[0].features.shape[1], token_weights.SETTINGS).phi
    for name, value in state.best.items():
        torch.testing.assert_close(value, torch.full_like(value, kept) if kept else fresh[name], rtol=0.0, atol=0.0)


def test_each_model_has_its_file_its_seconds_and_its_rates(base, tmp_path, monkeypatch):
    from dataclasses import replace

    from benchmarks import token_weights
    from benchmarks.token_base import SMALL, STORIES

    made = {}

    def rates(own, rows, learnt):
        made[own.study.name] = (rows.path.name, rows.command)
        raise KeyboardInterrupt

    monkeypatch.setattr(token_weights, "prepare", lambda study, folder: replace(base, study=study))
    monkeypatch.setattr(token_weights, "RESULTS", tmp_path)
    monkeypatch.setattr(token_weights, "chosen_rates", rates)
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    for name in ("small", "stories15m"):
        monkeypatch.setattr(token_weights.sys, "argv", ["x", "--study", name])
        with pytest.raises(KeyboardInterrupt):
            token_weights.main()
    command = "python -m benchmarks.token_weights"
    assert made[SMALL.name] == ("token_weights.json", command)
    assert made[STORIES.name] == ("token_weights_stories.json", f"{command} --study stories15m")

    seconds = []

    def ended(state, settings):
        seconds.append(settings.seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(token_weights.meta, "ended", ended)
    monkeypatch.setattr(token_weights, "at_start", lambda *_: (0.8, {"0.8": 1.0}))
    for study in (SMALL, STORIES):
        with pytest.raises(KeyboardInterrupt):
            token_weights.learn(replace(base, study=study), "rgu", 0, outer=0.01, inner=0.1)
    assert seconds == [15.0, 75.0]


def test_rows_of_another_model_or_of_other_rates_are_refused(lm, tmp_path):
    from dataclasses import replace

    from benchmarks.token_weights import Rows

    rows = Rows(tmp_path / "rows.json")
    rows.of(lm)
    rows.at("rgu | 0", lambda: {"outer": 0.003, "inner": 0.1}, outer=0.003, inner=0.1)
    again = Rows(tmp_path / "rows.json")
    again.of(lm)
    with pytest.raises(SystemExit, match=r"rgu \| 0 was made at other rates"):
        again.at("rgu | 0", dict, outer=0.01, inner=0.1)
    other = replace(lm, theta={name: value + 1e-9 for name, value in lm.theta.items()})
    with pytest.raises(SystemExit, match="of another θ₀"):
        again.of(other)
    (tmp_path / "old.json").write_text('{"rows": {"base | 0": {}}}')
    with pytest.raises(SystemExit, match="do not say of which θ₀"):
        Rows(tmp_path / "old.json").of(lm)

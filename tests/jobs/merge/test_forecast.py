import pytest
import torch
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.merge.forecast import MergeForecasts, forecast_pairs, measured, parameters
from sparing.jobs.merge.sources import open_all, open_source
from sparing.valley.forecast.predict import features_of, predict_merge


def sources_of(family, *names):
    return [open_source(family[name], name.upper()) for name in names]


@pytest.mark.parametrize("pair", [("a", "b"), ("a", "stranger")])
@pytest.mark.parametrize("base", [None, "base"])
def test_the_streamed_prediction_is_the_one_in_memory(family, pair, base):
    sources, origin = sources_of(family, *pair), open_source(family[base], "base") if base else None
    states = [load_file(family[name] / "model.safetensors") for name in pair]
    ancestor = load_file(family[base] / "model.safetensors") if base else None
    expected = predict_merge(*states, base=ancestor)
    features, agreement = measured(*sources, origin)
    # theirs takes differences in float32, ours in float64
    for name, value in features_of(*states, ancestor).items():
        assert features[name] == pytest.approx(value, rel=1e-5), name
    assert agreement == expected.agreement
    (row,) = forecast_pairs(sources, origin).pairs
    assert row["verdict"] == expected.verdict
    for metric in ("loss", "error"):
        assert row[f"gap_{metric}"] == pytest.approx(expected.gap[metric], rel=1e-4)
        ends = [row[f"gap_{metric}_low"], row[f"gap_{metric}_high"]]
        assert ends == pytest.approx(list(expected.interval[metric]), rel=1e-4, abs=1e-9)


def test_strangers_are_told_from_relatives(family):
    near = forecast_pairs(sources_of(family, "a", "b"), None)
    assert not near.fails
    assert near.pairs[0]["corrected"] > 0.8
    apart = forecast_pairs(sources_of(family, "a", "stranger"), None)
    assert apart.fails
    assert abs(apart.pairs[0]["corrected"]) < 0.1
    assert "will not merge" in apart.sentence


def test_of_several_models_the_worst_pair_speaks(family):
    found = forecast_pairs(sources_of(family, "a", "stranger", "b"), None)
    assert [row["pair"] for row in found.pairs] == ["A–B", "A–C", "B–C"]
    assert found.fails
    assert found.worst["pair"] in {"A–B", "B–C"}
    assert "the worst" in found.sentence
    assert found.signs == forecast_pairs(sources_of(family, "a", "stranger"), None).signs
    assert MergeForecasts(**found.plain()) == found


def test_what_has_no_mean_is_refused(weights):
    one, bad = weights("one", w=torch.ones(3, 3)), weights("bad", w=torch.full((3, 3), float("nan")))
    sources, _ = open_all([one, bad], ["A", "B"], None)
    with pytest.raises(UserError, match="B at 'w': got 9 values that are NaN"):
        forecast_pairs(sources, None)
    copy = weights("copy", w=torch.ones(3, 3))
    sources, _ = open_all([one, copy], ["A", "B"], None)
    with pytest.raises(UserError, match="same, bit by bit"):
        forecast_pairs(sources, None)


def test_parameters_are_matrices_without_statistics(weights):
    path = weights(
        "net", **{"conv.weight": torch.ones(2, 2), "conv.bias": torch.ones(2), "bn.running_var": torch.ones(2),
                  "bn.num_batches_tracked": torch.tensor(3), "mask": torch.ones(2, 2, dtype=torch.bool)}
    )  # fmt: skip
    assert parameters(open_source(path, "A")) == ["conv.weight"]
    flat = weights("flat", scale=torch.ones(2), running_mean=torch.ones(2))
    assert parameters(open_source(flat, "A")) == ["scale"]


def test_a_pair_beyond_the_calibration_is_told_in_the_sentence_of_the_command_line(family, weights):
    """Calibrated pairs reach to a score of 1 in each feature; strangers of other lengths lie beyond, twins before."""
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    far = [weights("one", w=noise), weights("other", w=-5 * noise)]
    sources, _ = open_all(far, ["A", "B"], None)
    assert "farther apart than any calibrated pair" in forecast_pairs(sources, None).sentence
    assert "calibrated pair" not in forecast_pairs(sources_of(family, "a", "b"), None).sentence

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparing.errors import UserError
from sparing.jobs.merge.inputs import gather
from sparing.jobs.merge.settings import Settings
from sparing.jobs.merge.sources import open_all, open_source
from sparing.jobs.subjects.nets import Vgg, initialize
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.merge import merge
from sparing.valley.scans.batch_norm import refresh_


def small_net():
    return Vgg(1, widths=(4, 4))


def opened(settings):
    sources, _ = open_all(settings.models, settings.labels, settings.base)
    return gather(settings, sources), sources


@pytest.fixture
def nets(tmp_path):
    """Two nets with batch norm as files of weights."""
    paths = []
    for seed in (0, 1):
        paths.append(tmp_path / f"net{seed}.safetensors")
        save_file(initialize(small_net, seed=seed).state_dict(), paths[-1])
    return tuple(paths)


def test_text_is_cut_into_rows_to_choose_by_and_rows_to_report_on(family, text):
    settings = Settings(models=(family["a"], family["b"]), data=str(text), length=16, rows=5)
    inputs, _ = opened(settings)
    assert (len(inputs.validation), len(inputs.test)) == (5, 5)
    both = torch.cat([inputs.validation.inputs, inputs.test.inputs])
    assert len(both.unique(dim=0)) == len(both)
    assert inputs.metric == "loss"
    assert not inputs.refreshes


def test_the_live_model_takes_the_weights_of_each_checkpoint(family, text):
    from transformers import AutoModelForCausalLM

    inputs, sources = opened(Settings(models=(family["a"], family["b"]), data=str(text), length=16))
    theirs = AutoModelForCausalLM.from_pretrained(family["b"]).state_dict()
    inputs.load_(sources[1].items())
    assert all(torch.equal(value, theirs[name]) for name, value in inputs.body.state_dict().items())
    states = [load_file(family[name] / "model.safetensors") for name in "ab"]
    expected = merge(states, method=Linear((1.0, 3.0)))
    found = inputs.load_merged_(Linear((1.0, 3.0)), sources, None).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weights_without_the_prefix_of_the_inner_model_are_known(family, text, tmp_path):
    inputs, sources = opened(Settings(models=(family["a"], family["b"]), data=str(text), length=16))
    bare = {name.removeprefix("transformer."): value for name, value in sources[1].items()}
    save_file(bare, tmp_path / "bare.safetensors")
    before = {name: value.clone() for name, value in inputs.load_(sources[1].items()).state_dict().items()}
    inputs.load_(sources[0].items())
    after = inputs.load_(open_source(tmp_path / "bare.safetensors", "bare").items()).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_foreign_and_missing_weights_are_named(family, text):
    inputs, sources = opened(Settings(models=(family["a"], family["b"]), data=str(text), length=16))
    with pytest.raises(UserError, match="'other' of shape"):
        inputs.load_([("other", torch.ones(1))])
    with pytest.raises(UserError, match="too few tensors"):
        inputs.load_(list(sources[0].items())[:-1])


def test_merged_images_nets_have_statistics_of_their_own(nets):
    settings = Settings(models=nets, data="digits", entry=f"{__name__}:small_net", rows=20, calibration=30)
    import sys

    sys.modules[__name__] = sys.modules.get(__name__) or type(sys)(__name__)
    sys.modules[__name__].small_net = small_net
    inputs, sources = opened(settings)
    assert inputs.refreshes
    assert inputs.metric == "error"
    found = inputs.load_merged_(Linear(), sources, None).state_dict()
    expected = initialize(small_net, seed=0)
    expected.load_state_dict(merge([load_file(path) for path in nets]))
    refresh_(expected, inputs.calibrate)
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    assert float(inputs.calibrate[0].mean()) == pytest.approx(0, abs=0.05)  # of the first 30 of 1198 digits


def test_data_that_does_not_fit_is_refused(family, nets, text, tmp_path):
    two = (family["a"], family["b"])
    for changes, said in (
        ({"data": "digits"}, "kind language"),
        ({"data": str(text), "length": 65}, "positions"),
        ({"data": str(tmp_path / "none.txt")}, "none.txt"),
        ({"data": str(text), "length": 64}, "rows of 64 tokens"),
    ):
        with pytest.raises(UserError, match=said):
            opened(Settings(models=two, **changes))
    for net, said in (("nowhere:make", "raised"), ("json:dumps", "raised"), ("nowhere", "module:function")):
        with pytest.raises(UserError, match=said):
            opened(Settings(models=nets, data="digits", entry=net))
    with pytest.raises(UserError, match="Module"):
        opened(Settings(models=nets, data="digits", entry="time:time"))
    assert opened(Settings(models=(Path(nets[0]), Path(nets[1]))))[0] is None


def test_image_classifiers_of_transformers_are_measured_as_their_folder_says(tmp_path):
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    config = ResNetConfig(num_channels=1, num_labels=10, **shape)
    models = []
    for name in "ab":
        models.append(ResNetForImageClassification(config).eval())
        models[-1].save_pretrained(tmp_path / name)
        processor = {"image_mean": [0.5], "image_std": [0.25]}
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = Settings(models=(tmp_path / "a", tmp_path / "b"), data="digits", rows=20, calibration=30)
    inputs, sources = opened(settings)
    assert inputs.refreshes
    assert (float(inputs.test.inputs.min()), float(inputs.test.inputs.max())) == (-2, 2)  # (0 or 1 − 0.5) / 0.25
    found = inputs.test.scores(inputs.load_(sources[1].items()))
    with torch.no_grad():
        logits = models[1](inputs.test.inputs).logits
    assert float(found[:, 1].sum()) == float((logits.argmax(1) != inputs.test.targets).sum())
    assert inputs.load_merged_(Linear(), sources, None) is inputs.body

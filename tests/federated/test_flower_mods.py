"""The sign mod on an app that knows nothing of this library."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparing.federated import flower

pytest.importorskip("flwr", reason="needs the extra [flower]")


def app_of(change, mods):
    """Flower's own app: takes arrays, changes them, replies."""
    _ = flower.client_app  # imports Flower
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        arrays = [change(array) for array in message.content["model"].to_numpy_ndarrays(keep_input=False)]
        content = {"model": ArrayRecord(arrays), "numbers": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def ssr(change, arrays):
    from flwr.app import ArrayRecord, Message, RecordDict

    grid = flower.InProcessGrid(app_of(change, [flower.sign_telemetry]), 1)
    (reply,) = grid.send_and_receive([Message(RecordDict({"model": ArrayRecord(arrays)}), 1, "train")])
    return reply.content["numbers"]["ssr"]


def test_the_share_of_kept_signs_counts_no_zeros():
    arrays = [np.array([1.0, -2.0, 0.0, 4.0], np.float32), np.array([-1.0], np.float32)]

    def change(array):
        changed = array.copy()
        changed[0] = -changed[0]
        return changed

    # The first of four and the only one of one turn; one is zero: 2 of 4 votes agree.
    assert ssr(change, arrays) == 0.5


def test_integers_and_arrays_of_another_shape_say_nothing():
    assert ssr(lambda array: array[:1], [np.array([1, 2])]) != ssr(lambda array: array, [np.array([1.0, 2.0])])
    assert math.isnan(ssr(lambda array: -array, [np.array([1, 2])]))
    assert math.isnan(ssr(lambda array: array[:1], [np.array([1.0, 2.0])]))


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_replies_without_arrays_pass(kind):
    _ = flower.client_app
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=[flower.sign_telemetry])
    getattr(app, kind)()(lambda message, context: Message(RecordDict({"m": MetricRecord({"a": 1})}), reply_to=message))
    grid = flower.InProcessGrid(app, 1)
    (reply,) = grid.send_and_receive([Message(RecordDict(), 1, kind)])
    assert dict(reply.content["m"]) == {"a": 1}

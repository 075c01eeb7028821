"""The clients."""

from functools import cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_app.task import held_of, make_model, rows_of, settings_of
from sparing.federated import flower

app = ClientApp()


@cache
def trainer(gamma: float, rounds: int, participation: float, memory: str) -> ClientApp:
    method, schedule = settings_of({"gamma": gamma, "rounds": rounds, "participation": participation})
    return flower.client_app(
        method, make_model, rows_of, schedule, held_of=held_of, mods=[flower.sign_telemetry], memory=memory or None
    )


def answer(message: Message, context: Context) -> Message:
    settings = [context.run_config[name] for name in ("gamma", "rounds", "participation", "memory")]
    return trainer(*settings)(message, context)


app.train()(answer)
app.evaluate()(answer)
app.query()(answer)

"""A server that lies in some exchange: clients that sign refuse, and without signatures it learns a vector."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from federated.worlds import equal, make_clients, perceptron
from refusals import refused
from sparing.errors import RunError
from sparing.federated import FedAvg, Schedule, simulate
from sparing.federated.methods.secure import SecureSum
from sparing.federated.secure.cost import Answers, bytes_down, bytes_up
from sparing.federated.secure.exchange import masked_sum
from sparing.federated.secure.keys import unseal
from sparing.federated.secure.protocol import (
    KEYS,
    PUBLIC,
    SecureClient,
    SecureServer,
    Stage,
    mask_of,
    pair_key,
)
from sparing.federated.secure.ring import Ring
from sparing.federated.secure.shamir import SHARE, join
from sparing.federated.secure.signing import Signer, new_signers, round_text
from sparing.jobs.federate.tables import price

pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
RING, SIZE, COUNT, NEED = Ring(bits=32, bound=8.0, step=2.0**-20), 20, 6, 4
SIGNED = SecureSum(FedAvg(), signed=True)
CLIENTS = make_clients((7, 12, 5, 9, 6, 8))
SCHEDULE = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=4, lr=0.3)


def vectors():
    source = np.random.default_rng(3)
    return {who: source.normal(size=SIZE) for who in range(COUNT)}


class Round:
    """Clients and an honest server, exchange by exchange."""

    def __init__(self, signed=True, need=NEED):
        self.signers = new_signers(COUNT) if signed else {}
        self.clients = [SecureClient(k, need, RING, signer=self.signers.get(k)) for k in range(COUNT)]
        self.server = SecureServer(RING, COUNT, need, SIZE, signed=signed)

    def keys(self):
        return self.server.take_keys({one.number: one.publish() for one in self.clients})

    def shares(self):
        keys = self.keys()
        return self.server.take_shares({one.number: one.share(keys) for one in self.clients})

    def masked(self, routed=None, who=range(COUNT)):
        routed = routed or self.shares()
        return {k: self.clients[k].mask(routed[k], RING.encode(vectors()[k])) for k in who}

    def signatures(self, who=range(COUNT)):
        survivors = self.server.take_vectors({k: v for k, v in self.masked().items() if k in who})
        return survivors, self.server.take_signatures({k: self.clients[k].sign(survivors) for k in survivors})


def refuses(says, call, *given):
    with pytest.raises(RunError, match=says):
        call(*given)


@pytest.mark.parametrize("gone", [(), (Stage.KEYS,), (Stage.VECTORS,), (Stage.SIGNATURES,), (Stage.UNMASK,)])
def test_a_signed_sum_is_the_plain_one_and_its_bytes_are_those_predicted(gone):
    def leaves(stage, who):
        return stage in gone and who == 2

    found = masked_sum(RING, 0.5, SIZE, vectors(), leaves, signed=True)
    inside = [who for who in range(COUNT) if who != 2 or gone in {(), (Stage.SIGNATURES,), (Stage.UNMASK,)}]
    assert list(found.survivors) == inside
    exact = [sum(round(vectors()[who][at] / RING.step) for who in inside) * RING.step for at in range(SIZE)]
    assert RING.decode(found.total).tolist() == exact
    left = [COUNT - (2 not in inside or (bool(gone) and stage >= 3)) for stage in range(5)]
    answers = Answers(
        keys=COUNT - (gone == (Stage.KEYS,)), shares=COUNT - (gone == (Stage.KEYS,)), vectors=len(inside),
        signatures=len(inside) - (gone == (Stage.SIGNATURES,)), unmask=left[4],
    )  # fmt: skip
    assert found.bytes_up == bytes_up(answers, SIZE, 32)
    assert found.bytes_down == bytes_down(answers)


def test_too_few_signatures_end_the_round():
    with pytest.raises(RunError, match="3 of 6 clients sent signatures, and it takes 4; nothing was revealed"):
        masked_sum(RING, 0.5, SIZE, vectors(), lambda stage, who: stage is Stage.SIGNATURES and who < 3, signed=True)


def test_keys_of_the_server_in_place_of_a_client_s():
    """Without signatures the server is in the middle, and reads all but one client's own mask; with them, nothing."""
    for signed in (False, True):
        one = Round(signed)
        keys = one.keys()
        fakes = {k: SecureClient(k, NEED, RING) for k in range(1, COUNT)}
        forged = {0: keys[0], **{k: fake.publish() + keys[k][KEYS:] for k, fake in fakes.items()}}
        if signed:
            refuses(
                "client 1 did not sign the keys that came as its own; nothing is sent", one.clients[0].share, forged
            )
            # Nor are keys of a stranger taken, nor those that a client signed under another's number.
            refuses("client 9 did not sign", one.clients[0].share, {**keys, 9: keys[1]})
            refuses("client 1 did not sign", one.clients[0].share, {**keys, 1: keys[2]})
            continue
        _, sealed = one.clients[0].share(forged)
        bare = {who: fake.share(forged)[1][0] for who, fake in fakes.items()}
        masked = RING.unpack(one.clients[0].mask(bare, RING.encode(vectors()[0])))
        own = join({k: unseal(fakes[k]._sealing(0, k), sealed[k], b"")[SHARE:] for k in fakes}, NEED)
        assert own == one.clients[0].seed
        opened = RING.add(masked, mask_of(RING, own, SIZE), -1)
        for who, fake in fakes.items():
            mask = mask_of(RING, pair_key(fake.mask_key, keys[0][:PUBLIC]), SIZE)
            opened = RING.add(opened, mask, 1 if who > 0 else -1)
        assert RING.decode(opened).tolist() == RING.decode(RING.encode(vectors()[0])).tolist()


def test_different_survivors_for_different_clients():
    """Three of six unmask, without signatures: half tell shares of one client's seed, half of its key."""
    loose = Round(signed=False, need=3)
    masked = loose.masked()
    alive, dead = (0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5)
    told = {k: loose.clients[k].reveal(alive if k < 3 else dead) for k in range(COUNT)}
    seed = join({k: told[k][0] for k in range(3)}, 3)
    key = join({k: told[k][0] for k in range(3, 6)}, 3)
    assert (seed, key) == (loose.clients[0].seed, loose.clients[0].mask_key)
    opened = RING.add(RING.unpack(masked[0]), mask_of(RING, seed, SIZE), -1)
    for who in range(1, COUNT):
        opened = RING.add(opened, mask_of(RING, pair_key(key, loose.clients[who].publish()[:PUBLIC]), SIZE))
    assert RING.decode(opened).tolist() == RING.decode(RING.encode(vectors()[0])).tolist()

    one = Round()
    one.masked()
    lists = {k: alive if k < 3 else dead for k in range(COUNT)}
    signatures = {k: one.clients[k].sign(lists[k]) for k in range(COUNT)}
    for k in range(COUNT):
        other = 3 if k < 3 else 0
        refuses(f"client {k}: .*client {other} did not sign the keys and lists that came here", one.clients[k].reveal,
                lists[k], signatures)  # fmt: skip
        same = {who: text for who, text in signatures.items() if lists[who] == lists[k]}
        refuses(f"client {k}: .*3 clients signed who sent one, and it takes 4", one.clients[k].reveal, lists[k], same)


def test_different_keys_or_senders_of_shares_for_different_clients():
    """Client 5 hides from client 0: what they sign differs, though all are told the same survivors."""
    one = Round()
    keys = one.keys()
    shared = {k.number: k.share({w: t for w, t in keys.items() if w != 5 or k.number}) for k in one.clients}
    routed = {to: {w: shared[w][1][to] for w in range(COUNT) if w != to and to in shared[w][1]} for to in range(COUNT)}
    routed[0].pop(5)
    for k in range(5):
        one.clients[k].mask(routed[k], RING.encode(vectors()[k]))
    signatures = {k: one.clients[k].sign(range(5)) for k in range(5)}
    refuses("client 0: .*client 1 did not sign", one.clients[0].reveal, range(5), signatures)
    refuses("client 1: .*client 0 did not sign", one.clients[1].reveal, range(5), signatures)
    one = Round()
    routed = one.shares()
    one.masked({**routed, 0: {who: text for who, text in routed[0].items() if who != 5}}, range(5))
    signatures = {k: one.clients[k].sign(range(5)) for k in range(5)}
    refuses("client 1: .*client 0 did not sign", one.clients[1].reveal, range(5), signatures)


def test_shares_that_another_made_or_that_changed():
    one = Round()
    routed = one.shares()
    with pytest.raises(ValueError, match="was changed on its way, or is another client's"):
        one.masked({**routed, 0: {**routed[0], 1: routed[0][2]}})


def test_signatures_that_are_not_of_this_round():
    one = Round()
    survivors, signatures = one.signatures()
    refuses("client 2 did not sign", one.clients[0].reveal, survivors, {**signatures, 2: bytes(64)})
    refuses("client 2 did not sign", one.clients[0].reveal, survivors, {**signatures, 2: signatures[1]})
    refuses("client 9 did not sign", one.clients[0].reveal, survivors, {**signatures, 9: signatures[1]})
    refuses("it signed another list of who sent a vector", one.clients[0].reveal, survivors[1:], signatures)
    refuses("0 clients signed who sent one", one.clients[0].reveal, survivors)
    refuses("asked for a signature twice or too early", one.clients[0].sign, survivors)
    # The same clients in another round, with the same keys to sign by: the lists are alike, the round's keys are not.
    again = Round()
    again.signers = one.signers
    again.clients = [SecureClient(k, NEED, RING, signer=one.signers[k]) for k in range(COUNT)]
    later, _ = again.signatures()
    assert later == survivors
    refuses("client 0: .*client 0 did not sign", again.clients[0].reveal, survivors, signatures)
    assert len(one.clients[0].reveal(survivors, signatures)) == COUNT


def test_what_is_signed_names_every_part_once():
    keys = {1: b"a" * 64, 12: b"b" * 64}
    texts = [round_text(keys, {1, 12}, (1, 12)), round_text(keys, {1, 12}, (1,)), round_text(keys, {12}, (1,)),
             round_text({**keys, 1: b"c" * 64}, {1, 12}, (1, 12)), round_text(keys, {1, 2}, (1, 12)),
             round_text(keys, {1}, (2, 1, 12)), round_text({1: b"a" * 64}, {1, 12}, (1, 12))]  # fmt: skip
    assert len(set(texts)) == len(texts)
    assert round_text(dict(reversed(keys.items())), [12, 1], (12, 1)) == texts[0]


def test_a_run_that_signs_has_the_bits_of_one_that_does_not():
    run, plain = (simulate(perceptron, CLIENTS, SecureSum(FedAvg(), signed=on), SCHEDULE) for on in (True, False))
    assert equal(run.params, plain.params)
    known = price(perceptron, SIGNED, SCHEDULE, [len(one) for one in CLIENTS], seed=0)
    assert [row["bytes_up"] for row in run.record] == list(known.up)
    assert [row["bytes_down"] for row in run.record] == list(known.down)
    assert known.up[0] - plain.record[0]["bytes_up"] == 6 * 2 * 64
    assert known.down[0] - plain.record[0]["bytes_down"] == 6 * 6 * (64 + 68)


def test_what_cannot_be_signed_is_refused():
    refused("two different lists could each have enough signatures", SecureSum, FedAvg(), signed=True, threshold=0.4)
    refused("a client that signs has to know how many were asked", SIGNED.check, replace(SCHEDULE, sampling="poisson"))
    signers = new_signers(2)
    refused("its public key is not that of its private one", Signer, 0, signers[1].private, signers[0].known)
    refused("client 7", Signer, 7, signers[1].private, signers[0].known)


LIES = {
    "keys": "of 6 clients sent shares,",
    "shares": "of 6 clients sent masked vectors",
    "survivors": "of 6 clients sent shares to unmask,",
    "signatures": "of 6 clients sent shares to unmask",
    "number": "of 6 clients sent keys",
}


def lying(grid_class, kind):
    """A server that lies to client 0, or of client 0, in one exchange."""

    class Grid(grid_class):
        def _answer(self, message):
            record = message.content.config_records.get("secure")
            client = message.metadata.dst_node_id - 1
            if record is not None:
                stage = record["stage"]
                if kind == "keys" and stage == "shares":
                    self.lie(record, {1: SecureClient(1, NEED, RING).publish() + bytes(64)})
                if kind == "shares" and stage == "masked vectors":
                    record["what"] = list(reversed(record["what"]))
                if kind == "survivors" and stage in ("signatures", "shares to unmask") and client < 3:
                    record["survivors"] = [who for who in record["survivors"] if who != 5]
                if kind == "signatures" and stage == "shares to unmask":
                    self.lie(record, {1: bytes(64)})
                if kind == "number" and stage == "keys":
                    record["client"] = (record["client"] + 1) % COUNT
            return super()._answer(message)

        @staticmethod
        def lie(record, texts):
            listed = {**dict(zip(record["who"], record["what"], strict=True)), **texts}
            record["who"], record["what"] = list(listed), list(listed.values())

    return Grid


@pytest.mark.parametrize("kind", LIES)
def test_on_flower_a_server_that_lies_gets_nothing(kind, monkeypatch):
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    from sparing.federated.flower import grid

    honest = flower.run_in_process(perceptron, CLIENTS, SIGNED, SCHEDULE)
    assert equal(honest.params, simulate(perceptron, CLIENTS, SIGNED, SCHEDULE, engine="loop").params)
    assert honest.rounds[0].bytes_up == price(perceptron, SIGNED, SCHEDULE, [len(c) for c in CLIENTS], seed=0).up[0]
    monkeypatch.setattr(grid, "InProcessGrid", lying(grid.InProcessGrid, kind))
    with pytest.raises(RunError, match=f"round 1: secure sum: 0 .*({LIES[kind]}).*nothing was revealed"):
        flower.run_in_process(perceptron, CLIENTS, SIGNED, SCHEDULE)


def test_on_flower_a_client_without_a_key_is_refused():
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    rows = CLIENTS.__getitem__
    refused("signer: got none; clients that sign have keys", flower.client_app, SIGNED, perceptron, rows, SCHEDULE)
    signer = new_signers(2)[0]
    refused("signer: got one", flower.client_app, FedAvg(), perceptron, rows, SCHEDULE, signer=signer)

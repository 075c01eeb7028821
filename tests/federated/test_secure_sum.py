"""Masked sums against plain sums of the same integers, whoever leaves when; what the server sees; bytes."""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from refusals import refused
from sparing.errors import RunError
from sparing.federated.secure import keys
from sparing.federated.secure.cost import Answers, bytes_down, bytes_up
from sparing.federated.secure.exchange import masked_sum
from sparing.federated.secure.protocol import SecureClient, SecureServer, Stage, threshold_of
from sparing.federated.secure.ring import Ring
from sparing.federated.secure.shamir import PRIME, SHARE, join, split

pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
RING = Ring(bits=32, bound=8.0, step=2.0**-20)
STAGES = (Stage.KEYS, Stage.SHARES, Stage.VECTORS, Stage.UNMASK)


def test_the_modulus_of_shares_is_the_next_prime():
    """Miller-Rabin with forty bases; every smaller number above 2^256 has a factor that a base shows."""

    def is_prime(n):
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 42):
            x = pow(base, odd, n)
            if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
                return False
        return True

    assert [n - 2**256 for n in range(2**256, PRIME + 1) if is_prime(n)] == [297]


def test_shares_by_hand_and_any_threshold_of_them():
    """3 + 5x + 7x² at 1, 2 and 4; then every three of five."""
    given = iter([5, 7])
    made = split((3).to_bytes(32, "big"), 3, [0, 1, 3], lambda below: next(given))
    assert [int.from_bytes(share, "big") for share in made.values()] == [15, 41, 135]
    source = random.Random(1)
    for secret in (bytes(32), b"\xff" * 32, source.randbytes(32)):
        shares = split(secret, 3, [0, 4, 7, 8, 30], source.randrange)
        assert all(len(share) == SHARE for share in shares.values())
        for some in itertools.combinations(shares, 3):
            assert join({who: shares[who] for who in some}, 3) == secret
        with pytest.raises(ValueError, match="2 shares of the 3"):
            join(dict(list(shares.items())[:2]), 3)


def test_fewer_shares_fit_every_secret():
    """Two of three: for each secret there is one polynomial through them, so they tell nothing."""
    shares = split(b"\x01" * 32, 3, [0, 1, 2])
    for wanted in (0, 1, 2**255):
        # A third point such that the three give this secret: Lagrange, solved for the third value.
        y0, y1 = (int.from_bytes(shares[k], "big") for k in (0, 1))
        third = (wanted - 3 * y0 + 3 * y1) % PRIME
        assert join({0: shares[0], 1: shares[1], 2: third.to_bytes(SHARE, "big")}, 3) == wanted.to_bytes(32, "big")


@pytest.mark.parametrize("bits", [16, 24, 32, 40, 64])
def test_integers_travel_and_come_back(bits):
    ring = Ring(bits=bits, bound=1.0, step=2.0**-8)
    values = np.array([0.0, 1.0, -1.0, 0.5 + 2**-10, -(2**-9), 3 * 2**-9])
    whole = ring.encode(values)
    assert ring.decode(whole).tolist() == [0.0, 1.0, -1.0, 0.5, 0.0, 2 * 2**-8]  # halves to even
    assert len(ring.pack(whole)) == len(values) * bits // 8
    assert np.array_equal(ring.unpack(ring.pack(whole)), whole)
    assert int(whole.max()) == 2**bits - 256


def vectors_of(count, size=50, seed=0):
    rows = np.random.default_rng(seed).uniform(-8, 8, (count, size))
    return dict(zip(range(3, 3 + 2 * count, 2), rows, strict=True))


def plain(ring, vectors, survivors):
    """In Python's own integers."""
    rounded = [[round(float(value) / ring.step) for value in vectors[who]] for who in survivors]
    return [sum(column) % 2**ring.bits for column in zip(*rounded, strict=True)]


def leaving(count, stages, share=0.3, seed=0):
    """Return who of those still there leaves before each of ``stages``: exactly this share, rounded."""
    there, gone = list(range(3, 3 + 2 * count, 2)), {}
    for stage in STAGES:
        if stage in stages:
            left = random.Random(f"{seed} {stage}").sample(there, round(share * len(there)))
            gone |= dict.fromkeys(left, stage)
            there = [who for who in there if who not in left]
    order = {stage: at for at, stage in enumerate(STAGES)}
    return lambda stage, who: who in gone and order[gone[who]] <= order[stage]


@pytest.mark.parametrize("stages", [(), *[(stage,) for stage in STAGES], STAGES], ids=lambda s: f"{len(s)}{s[-1:]}")
@pytest.mark.parametrize("bits", [32, 40])
def test_the_masked_sum_is_the_plain_sum(stages, bits):
    """30 % leave before one exchange, or 30 % of the rest before each: 20, 14, 10, 7, 5."""
    ring, vectors, leaves = replace(RING, bits=bits), vectors_of(20), leaving(20, stages)
    found = masked_sum(ring, 0.2 if stages == STAGES else 0.5, 50, vectors, leaves)
    inside = [who for who in vectors if not leaves(Stage.VECTORS, who)]
    assert list(found.survivors) == inside
    assert len(inside) == {0: 20, 1: 20 if stages == (Stage.UNMASK,) else 14, 4: 7}[len(stages)]
    assert found.total.tolist() == plain(ring, vectors, inside)
    exact = [sum(round(vectors[who][at] / ring.step) for who in inside) * ring.step for at in range(50)]
    assert ring.decode(found.total).tolist() == exact  # of powers of two, so without rounding
    answers = Answers(*[sum(not leaves(stage, who) for who in vectors) for stage in STAGES])
    assert found.bytes_up == bytes_up(answers, 50, bits)
    assert found.bytes_down == bytes_down(answers)


def test_a_client_that_cannot_train_is_one_that_left():
    vectors = vectors_of(5)
    found = masked_sum(RING, 0.5, 50, {**vectors, 5: None})
    assert found.survivors == (3, 7, 9, 11)
    assert found.total.tolist() == plain(RING, vectors, found.survivors)


def test_below_the_threshold_nothing_is_revealed():
    """Of ten at a half it takes six."""
    assert [threshold_of(0.5, 10), threshold_of(0.3, 10), threshold_of(0.0, 10), threshold_of(0.5, 3)] == [6, 4, 2, 2]
    vectors = vectors_of(10)
    for stage in STAGES:
        gone = list(vectors)[:5]
        with pytest.raises(RunError, match=f"5 of 10 clients sent {stage.value}, and it takes 6; nothing was revealed"):
            masked_sum(RING, 0.5, 50, vectors, lambda at, who, stage=stage, gone=gone: at is stage and who in gone)


def begun(count=5, size=4000, threshold=3):
    """Clients with fixed secrets, and their masked vectors, all of them of zeros."""

    def secret(*labels):
        return hashlib.sha256(repr(labels).encode()).digest()

    ring = replace(RING, bits=16, bound=1.0, step=2.0**-8)
    clients = [
        SecureClient(k, threshold, ring, mask_key=secret(k, 1), seal_key=secret(k, 2), seed=secret(k, 3))
        for k in range(count)
    ]
    server = SecureServer(ring, count, threshold, size)
    public = server.take_keys({one.number: one.publish() for one in clients})
    routed = server.take_shares({one.number: one.share(public) for one in clients})
    zeros = np.zeros(size, np.uint64)
    return clients, server, {one.number: one.mask(routed[one.number], zeros) for one in clients}


def test_the_server_sees_uniform_integers_until_the_last_exchange():
    """χ² of both bytes of one client's masked zeros, of the difference of two clients', and of the sum of all but one.

    Fixed keys, 4,000 to 16,000 draws, 255 degrees of freedom; the bounds leave out one in a million at each end.
    """
    clients, _, masked = begun()
    ring = clients[0].ring
    ints = {who: ring.unpack(data) for who, data in masked.items()}
    low, high = chi2.ppf([1e-6, 1 - 1e-6], 255)
    partial = [sum(ints[who].astype(object) for who in ints if who != left) % 2**16 for left in ints]
    seen = [*ints.values(), *[(ints[0].astype(object) - ints[k].astype(object)) % 2**16 for k in (1, 2)], *partial]
    for values in seen:
        for part in (values.astype(np.int64) & 255, values.astype(np.int64) >> 8):
            counts = np.bincount(part, minlength=256)
            assert low < ((counts - len(part) / 256) ** 2 / (len(part) / 256)).sum() < high
    # With the pairwise masks alone the sum of all would be zero; the clients' own masks hide that as well.
    assert np.count_nonzero(sum(ints.values()) & np.uint64(2**16 - 1)) > 3900


def test_a_client_tells_one_of_two_shares_and_never_both():
    clients, server, masked = begun()
    survivors = server.take_vectors({who: masked[who] for who in (0, 1, 3)})
    held = dict(clients[1].held)
    with pytest.raises(RunError, match="2 clients sent a vector, and it takes 3"):
        clients[1].reveal((0, 1))
    told = clients[1].reveal(survivors)
    assert [told[who] == held[who][SHARE:] for who in range(5)] == [True, True, False, True, False]
    assert [told[who] == held[who][:SHARE] for who in range(5)] == [False, False, True, False, True]
    for again in (
        lambda: clients[1].reveal((0, 1, 2)), lambda: clients[0].share(clients[0].keys),
        lambda: clients[0].mask({}, np.zeros(4000, np.uint64)), lambda: SecureClient(0, 2, RING).reveal((0, 1)),
    ):  # fmt: skip
        with pytest.raises(RunError, match="twice or too early; nothing is sent"):
            again()


def test_what_comes_changed_is_noticed():
    clients, server, masked = begun()
    with pytest.raises(ValueError, match="was changed on its way"):
        keys.unseal(bytes(32), keys.seal(bytes(32), b"text", b"")[:-1] + b"?", b"")
    with pytest.raises(RunError, match="not its own and different ones"):
        replace(clients[0], keys={}).share({**clients[0].keys, 0: clients[1].publish()})
    server.take_vectors({**masked, 4: masked[4][:-1], 9: masked[4]})
    assert server.faults == {
        4: "its masked vectors are not of this round",
        9: "its masked vectors are not of this round",
    }
    told = {who: clients[who].reveal(server.survivors) for who in (0, 1, 2)}
    told[2][3] = told[2][1]
    with pytest.raises(RunError, match="client 3's secret are wrong"):
        server.take_unmasking(told)


def test_what_could_wrap_around_is_refused():
    """255 clients of 2^23 steps fit into 31 bits and a sign; 256 do not."""
    RING.check(255)
    refused("pass bits=40", RING.check, 256)
    refused("256 clients with 8388608 steps each way sum to 2147483648, and 32 bits hold 2147483647", RING.check, 256)
    refused("a smaller bound", masked_sum, replace(RING, bits=16), 0.5, 50, vectors_of(3))
    for wrong in ({"bits": 20}, {"bits": 8}, {"bound": 0.0}, {"step": 9.0}, {"bound": float("inf")}):
        refused("pass", lambda wrong=wrong: replace(RING, **wrong))
    refused("8 at most", RING.encode, np.array([0.0, -8.001]))
    refused("nan", RING.encode, np.array([np.nan]))
    widest = Ring(bits=64, bound=2.0**40, step=1.0)
    assert widest.decode(widest.encode(np.array([-(2.0**40)])))[0] == -(2.0**40)

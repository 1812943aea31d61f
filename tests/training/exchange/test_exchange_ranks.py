"""Every exchange between real processes, against NumPy: two ranks, and four on two machines in name."""

import numpy as np
import pytest

from mindlora.training.exchange.exchange import CPU_RECEIPTS
from tests.support.exchange_ranks import MODES, SCENARIOS, SHAPES, SKIPPED, STEPS, gradient
from tests.support.ranks import own_network, run_ranks

SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
SCRIPT = "tests/support/exchange_ranks.py"
TWO = ("dense", "float16", "quantized", "quantized 8@pynative")
# Of the exchange between machines, the graph is that of what has all its parts.
FOUR = ("quantized 4@pynative", "machines dense@pynative", "machines float16@pynative", "machines quantized")
# What comes to the gradients in a step, of a rank with its receipts; hardly anything beside those of a real adapter.
HEADERS = 12_000
KEPT = [step for step in range(STEPS) if step != SKIPPED]


def ranks_of(count, folder, scenarios):
    """Returns {mode: [what each rank found]}."""
    from tests.conftest import ROOT

    run_ranks(count, folder, f"{ROOT}/{SCRIPT}", folder, *scenarios)
    return {mode: [np.load(folder / f"rank_{rank}_{mode}.npz") for rank in range(count)] for mode in MODES}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return ranks_of(2, tmp_path_factory.mktemp("two"), TWO)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return ranks_of(4, tmp_path_factory.mktemp("four"), FOUR)


@pytest.fixture(params=MODES)
def two(request, two_ranks):
    """What each of two ranks found, in one mode."""
    return two_ranks[request.param]


def runs(two_ranks, four_ranks):
    """Yields (scenario, what each rank found) of all sessions and modes."""
    for session in (two_ranks, four_ranks):
        for found in session.values():
            for name in SCENARIOS:
                if f"{name}/totals" in found[0]:
                    yield name, [{key: rank[f"{name}/{key}"] for key in KEYS} for rank in found]


KEYS = ("totals", "residuals", "unsent", "counted", "between", "sent")


def bits(array):
    return np.ascontiguousarray(array).view(np.int32)


def test_all_ranks_get_the_same_bits(two_ranks, four_ranks):
    seen = set()
    for name, ranks in runs(two_ranks, four_ranks):
        seen.add(name)
        for rank in ranks[1:]:
            assert (bits(rank["totals"]) == bits(ranks[0]["totals"])).all(), name
    assert seen == set(SCENARIOS)


def test_dense_is_the_sum(two):
    for step in KEPT:
        assert (bits(two[0]["dense/totals"][step]) == bits(gradient(0, step) + gradient(1, step))).all()


def test_dense_between_machines_is_the_sum(four_ranks):
    for step in KEPT:
        expected = np.sum([gradient(rank, step) for rank in range(4)], 0, np.float64)
        found = four_ranks["pynative"][0]["machines dense/totals"][step]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-12)


def test_float16_is_close_however_small_the_gradients(two_ranks, four_ranks):
    """The gradients are near 1e-6, where float16 without a scale would keep 4 bits."""
    for name, ranks in runs(two_ranks, four_ranks):
        if name.endswith("float16"):
            for step in KEPT:
                expected = np.sum([gradient(rank, step) for rank in range(len(ranks))], 0, np.float64)
                error = np.abs(ranks[0]["totals"][step] - expected).max() / np.abs(expected).max()
                assert 1e-6 < error < 1e-3


def test_a_gradient_that_is_not_finite_is_seen_by_all_in_float16(two_ranks, four_ranks):
    for name, ranks in runs(two_ranks, four_ranks):
        if name == "float16":
            assert all(np.isnan(rank["totals"][SKIPPED][5]) for rank in ranks)


BITS = {"quantized": 6, "quantized 4": 4, "quantized 8": 8}


def test_quantized_is_what_numpy_says(two_ranks, four_ranks):
    """Sums of whole numbers, and residuals; a skipped step changes nothing, and what is not finite is seen by all."""
    sessions = 0
    for name, ranks in runs(two_ranks, four_ranks):
        if name not in BITS:
            continue
        sessions += 1
        count, blocks = len(ranks), -(-SIZE // 240)
        top = 2 ** (BITS[name] - 1) - 1
        residuals = np.zeros((count, blocks, 240), np.float32)
        for step in range(STEPS):
            if step == SKIPPED:
                assert all(np.isnan(rank["totals"][step][5]) for rank in ranks)
                continue
            corrected = residuals.copy()
            for rank in range(count):
                corrected[rank].reshape(-1)[:SIZE] += gradient(rank, step)
            unit = np.abs(corrected).max(-1).astype(np.float64).sum(0)[:, None] / (top - count / 2)
            found = np.stack([rank["unsent"][step] for rank in ranks])
            # Where a value lies half-way, float32 may round to either side; then the residual says which.
            whole = np.round((corrected.reshape(count, -1)[:, :SIZE] - found) / np.repeat(unit, 240)[:SIZE])
            exact = corrected.reshape(count, -1)[:, :SIZE] / np.repeat(unit, 240)[:SIZE]
            assert np.abs(whole - exact).max() <= 0.5001 and np.abs(whole.sum(0)).max() <= top
            np.testing.assert_allclose(
                found, (exact - whole) * np.repeat(unit, 240)[:SIZE], rtol=0, atol=2e-5 * unit.max()
            )
            expected = whole.sum(0) * np.repeat(unit, 240)[:SIZE]
            np.testing.assert_allclose(ranks[0]["totals"][step], expected, rtol=1e-5, atol=1e-12)
            residuals.reshape(count, -1)[:, :SIZE] = found
        assert np.abs(whole).max() > top / 2 / count  # The numbers use their bits.
    assert sessions == 4


def test_a_skipped_step_keeps_nothing(two):
    for rank in two:
        assert (bits(rank["quantized/unsent"][SKIPPED]) == bits(rank["quantized/unsent"][SKIPPED - 1])).all()


def test_machines_send_what_a_machine_has_summed(four_ranks):
    """Each rank exchanges half of the vector, and keeps what rounding took from its machine's sum."""
    half = SIZE // 2 + SIZE % 2
    given = np.sum([gradient(rank, step) for rank in range(4) for step in KEPT], 0, np.float64)
    for ranks in four_ranks.values():
        # Ranks 0 and 2 hold the residual of the first half, 1 and 3 of the second.
        halves = [ranks[number]["machines quantized/unsent"][-1] for number in range(4)]
        kept = np.concatenate([halves[0] + halves[2], (halves[1] + halves[3])[: SIZE - half]])
        sent = ranks[0]["machines quantized/totals"][KEPT].sum(0, np.float64)
        np.testing.assert_allclose(sent + kept, given, rtol=0, atol=2e-11)
        assert np.abs(kept).max() > 0


def test_bytes_counted_are_bytes_sent(two_ranks, four_ranks):
    for name, ranks in runs(two_ranks, four_ranks):
        counted = CPU_RECEIPTS * sum(rank["counted"].sum() for rank in ranks)
        before, after = np.array([rank["sent"] for rank in ranks]).swapaxes(0, 1)
        written = (after - before)[:, 0].sum()
        headers = HEADERS * len(ranks) * STEPS
        assert written == pytest.approx(counted, rel=0.03, abs=headers), name
        if own_network():
            # Some ranks begin while others still read the counter.
            device = after[:, 1].max() - before[:, 1].min()
            assert device == pytest.approx(counted, rel=0.03, abs=headers), name


def test_bytes_of_a_step(two):
    dense = 4 * SIZE
    assert set(two[0]["dense/counted"]) == {dense}
    assert set(two[0]["float16/counted"]) == {dense // 2 + 4}
    blocks = -(-SIZE // 240)
    assert set(two[0]["quantized/counted"]) == {4 * (blocks + blocks * 240 // 4)}
    assert two[0]["quantized/counted"][0] < 0.3 * dense


def test_bytes_between_machines(four_ranks):
    for rank in four_ranks["pynative"]:
        half = -(-SIZE // 2)
        assert set(rank["machines dense/between"]) == {4 * half}
        assert set(rank["machines dense/counted"]) == {4 * half + 4 * SIZE + 8 * half}


def test_ranks_that_differ_are_named_on_every_rank(two_ranks, four_ranks):
    for session in (two_ranks, four_ranks):
        for found in session.values():
            for rank in found:
                start = "After step 200, the trained parameters of rank 1 differ from those of rank 0, so"
                assert str(rank["agreement"]).startswith(start)

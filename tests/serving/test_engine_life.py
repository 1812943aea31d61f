"""How an engine begins and ends, and what a step that fails does; its network is a script."""

import threading
import time

import pytest

from mindlora.core.errors import QueueFullError, ServingError
from mindlora.serving.request import Sampling
from tests.support.scripted_engine import make_engine, started

LONG = Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7]


def test_it_takes_no_request_before_it_is_started():
    with pytest.raises(ServingError, match="takes no requests"):
        make_engine().submit(PROMPT, LONG)


def test_stop_waits_for_those_that_run_within_its_grace():
    engine = make_engine()
    with started(engine):
        streams = [engine.submit(PROMPT, LONG) for _ in range(3)]
        engine.runner.delay = 0.002
        engine.stop(grace=30)
        assert [stream.request.finish_reason for stream in streams] == ["length"] * 3
        assert not engine.alive
        with pytest.raises(ServingError, match="it is stopping"):
            engine.submit(PROMPT, LONG)


def test_stop_cancels_the_rest_after_its_grace():
    engine = make_engine()
    with started(engine):
        engine.runner.delay = 0.05
        streams = [engine.submit(PROMPT, LONG) for _ in range(12)]  # more than run at once
        begun = time.monotonic()
        engine.stop(grace=0.2)
        assert 0.2 <= time.monotonic() - begun < 3
        assert {stream.request.finish_reason for stream in streams} == {"cancelled"}
        assert [list(stream)[-1].finish_reason for stream in streams] == ["cancelled"] * 12
        seen = engine.snapshot()
        assert (seen.waiting, seen.running, seen.blocks_free) == (0, 0, seen.blocks_total)


def test_a_queue_that_is_full_refuses_and_takes_again():
    with started(make_engine(max_running=1, max_waiting=2)) as engine:
        engine.runner.going.clear()
        streams = []
        with pytest.raises(QueueFullError, match="max_waiting is 2"):
            for _ in range(5):
                streams.append(engine.submit(PROMPT, Sampling(max_tokens=2)))
                time.sleep(0.05)  # the first one is admitted
        assert len(streams) == 3
        engine.runner.going.set()
        assert all(stream.text() is not None for stream in streams)
        engine.submit(PROMPT, Sampling(max_tokens=2)).text()


def test_a_step_that_fails_ends_its_requests_and_no_others():
    with started(make_engine()) as engine:
        engine.runner.error = RuntimeError("out of memory\nand a stack")
        with pytest.raises(ServingError, match="could not compute a step: out of memory$"):
            engine.submit(PROMPT, LONG).text()
        engine.runner.error = None
        assert engine.submit(PROMPT, LONG).text()
        assert engine.snapshot().blocks_free == engine.snapshot().blocks_total


def test_a_network_that_cannot_compute_is_said_at_the_start(monkeypatch):
    engine = make_engine()

    def fail(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(engine.runner, "warm_up", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(ServingError, match="could not compute its first step"):
        engine.start()


@pytest.mark.parametrize("when", ["waiting", "running", "ended"])
def test_a_request_can_be_cancelled_at_any_moment(when):
    with started(make_engine(max_running=1)) as engine:
        engine.runner.delay = 0.01
        first = engine.submit(PROMPT, LONG)
        stream = engine.submit(PROMPT, LONG) if when == "waiting" else first
        if when == "running":
            next(iter(stream))
        if when == "ended":
            assert list(stream)[-1].finish_reason == "length"
        stream.cancel()
        stream.cancel()
        assert stream.request.finish_reason == ("length" if when == "ended" else "cancelled")
        if when != "ended":
            assert list(stream)[-1].finish_reason == "cancelled"
        if when == "waiting":
            assert list(first)[-1].finish_reason == "length"


def test_what_a_step_computed_for_a_cancelled_request_is_dropped():
    with started(make_engine()) as engine:
        stream, other = engine.submit(PROMPT, LONG), engine.submit(PROMPT[:2], LONG)
        next(iter(stream))
        engine.runner.going.clear()
        time.sleep(0.1)  # now both are in a step that does not end
        stream.cancel()
        tokens = list(stream.request.tokens)
        assert engine.snapshot().running == 1
        ended = threading.Event()
        other.add_listener(lambda piece: piece.finish_reason and ended.set())
        engine.runner.going.set()
        assert ended.wait(20) and other.request.finish_reason == "length"
        assert stream.request.tokens == tokens and list(stream)[-1].finish_reason == "cancelled"
        assert engine.submit(PROMPT, Sampling(max_tokens=2)).text() is not None
        assert engine.snapshot().blocks_free == engine.snapshot().blocks_total


def test_a_listener_gets_what_came_before_it():
    with started(make_engine()) as engine:
        stream, pieces, ended = engine.submit(PROMPT, Sampling(max_tokens=4)), [], threading.Event()
        deadline = time.monotonic() + 20
        while stream.request.finish_reason is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        stream.add_listener(lambda piece: (pieces.append(piece), piece.finish_reason and ended.set()))
        assert ended.wait(20)
        assert [token for piece in pieces for token in piece.tokens] == stream.request.generated


def test_nobody_waits_for_an_engine_that_has_died(monkeypatch):
    with started(make_engine()) as engine:

        def fail():
            raise KeyError("a defect")

        engine.runner.delay = 0.02
        streams = [engine.submit(PROMPT, LONG) for _ in range(2)]
        monkeypatch.setattr(engine.scheduler, "plan", fail)
        for stream in streams:
            with pytest.raises(ServingError, match="The engine has stopped on an error: 'a defect'"):
                stream.text()
        assert not engine.alive
        with pytest.raises(ServingError, match="takes no requests"):
            engine.submit(PROMPT, LONG)

"""The next token: greedy, drawn, penalized, reported; alone and in a batch."""

import dataclasses

import numpy as np
import pytest

from mindlora.core.errors import RequestError, ServingError
from mindlora.serving.request import Sampling
from mindlora.serving.sampling import Sampler, sample_batch

VOCABULARY = 301


def rows(count, size=VOCABULARY, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, (count, size)).astype(np.float32)


def softmax(logits):
    masses = np.exp(logits.astype(np.float64) - logits.max())
    return masses / masses.sum()


def greedy(**settings):
    return Sampler(Sampling(temperature=0.0, **settings), [1, 2])


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1, "seed": 3}])
def test_greedy_takes_the_likeliest_and_of_several_the_first(settings):
    logits = rows(1)[0]
    logits[[250, 40]] = logits.max() + 1
    sampler = Sampler(Sampling(**settings), [1])
    assert {sampler.sample(logits, []).token for _ in range(20)} == {40}


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.7}, {"temperature": 1.7, "top_k": 40, "top_p": 0.8}],
)
def test_tokens_are_drawn_with_the_probabilities_that_remain(settings):
    logits = rows(1, 40)[0]
    sampler = Sampler(Sampling(seed=1, **settings), [1])
    tokens, probabilities = sampler.kept(logits, [])
    counts = np.bincount([sampler.sample(logits, []).token for _ in range(4000)], minlength=40)
    assert counts.sum() == counts[tokens].sum()
    expected = 4000 * probabilities
    spread = np.sqrt(expected * (1 - probabilities)) + 1e-9
    assert (np.abs(counts[tokens] - expected) < 4.5 * spread + 1).all()


def test_temperature_comes_before_the_filters_and_top_k_before_top_p():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    kept = lambda **settings: Sampler(Sampling(**settings), [0]).kept(logits, [])[0].tolist()  # noqa: E731
    assert kept(top_p=0.65) == [0, 1]
    assert kept(top_p=0.65, temperature=10.0) == [0, 1, 2]
    assert kept(top_p=0.65, temperature=0.1) == [0]
    # 0.4 and 0.3 are 0.57 and 0.43 of what top_k leaves.
    assert kept(top_p=0.56, top_k=2) == [0]
    assert kept(top_p=0.58, top_k=2) == [0, 1]
    assert [kept(min_p=least) for least in (0.24, 0.49, 0.74, 0.76, 1.0)] == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0], [0]]
    # 0.4 and 0.3 are 0.57 and 0.43 of what min_p leaves.
    assert kept(min_p=0.7, top_p=0.56) == [0] and kept(min_p=0.7, top_p=0.58) == [0, 1]
    assert kept(min_p=0.5, temperature=0.5) == [0, 1] and kept(min_p=0.4, top_k=2) == [0, 1]
    assert kept(top_k=-1) == kept(top_k=0) == kept(top_k=400) == [0, 1, 2, 3]


def test_a_seed_gives_the_same_tokens_in_any_batch():
    logits = rows(12)
    settings = [Sampling(seed=place, temperature=1.5, top_p=0.95 if place % 2 else 1.0) for place in range(5)]
    alone = [[Sampler(each, [1]).seed, []] for each in settings]
    for place, each in enumerate(settings):
        sampler = Sampler(each, [1])
        alone[place][1] = [sampler.sample(row, []).token for row in logits]
    # Together, behind other requests, each of which is at another step.
    samplers = [Sampler(each, [1]) for each in settings]
    others = [Sampler(Sampling(), [1]), greedy()]
    drawn = [[] for _ in settings]
    for step in range(len(logits) + len(settings)):
        running = [place for place in range(len(settings)) if 0 <= step - place < len(logits)]
        batch = np.concatenate([rows(2, seed=step), logits[[step - place for place in running]]])
        asked = [*others, *(samplers[place] for place in running)]
        found = sample_batch(asked, batch, [[]] * len(batch), [()] * len(batch))
        for place, (sampled,) in zip(running, found[2:]):
            drawn[place].append(sampled.token)
    assert drawn == [tokens for _, tokens in alone]


def test_without_a_seed_one_is_drawn_and_gives_the_same_again():
    logits = rows(8)
    first, other = (Sampler(Sampling(), [1]) for _ in range(2))
    assert first.seed != other.seed
    again = Sampler(Sampling(seed=first.seed), [1])
    assert [first.sample(row, []) for row in logits] == [again.sample(row, []) for row in logits]
    negative, wrapped = (Sampler(Sampling(seed=seed), [1]) for seed in (-1, 2**64 - 1))
    assert [negative.sample(row, []) for row in logits] == [wrapped.sample(row, []) for row in logits]


def test_penalties_are_those_of_their_definitions():
    logits = np.array([2.0, -2.0, 1.0, 0.0, 3.0, -1.0], np.float32)
    settings = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    _, probabilities = Sampler(settings, [0, 1, 0]).kept(logits, [4, 4, 5])
    # The prompt's 0 and 1 by repetition alone; 4 twice, 5 once.
    changed = np.array([1.0, -4.0, 1.0, 0.0, 1.5 - 0.5 - 0.5, -2.0 - 0.5 - 0.25])
    np.testing.assert_allclose(probabilities, softmax(changed), rtol=1e-6)
    assert Sampler(dataclasses.replace(settings, temperature=0.0), [0]).sample(logits, [4] * 9).token == 0
    assert greedy(frequency_penalty=-5.0).sample(logits, [3]).token == 3


def test_logits_stay_as_they_are():
    logits = rows(4)
    before = logits.copy()
    asked = [
        {"temperature": 0.0},
        {"repetition_penalty": 2.0},
        {"top_p": 0.5},
        {"presence_penalty": 1.0, "logprobs": 3},
    ]
    sample_batch([Sampler(Sampling(**each), [1]) for each in asked], logits, [[2]] * 4, [()] * 4)
    assert (logits == before).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 9.0},
    ],
)
def test_drafts_give_the_tokens_that_one_after_the_other_would(settings):
    logits = rows(6, scale=3.0)
    alone, tokens = Sampler(Sampling(**settings), [1]), []
    each = []
    for row in logits:
        each.append(alone.sample(row, tokens))
        tokens.append(each[-1].token)
    for right in range(6):
        drafts = [token if place < right else (token + 1) % VOCABULARY for place, token in enumerate(tokens[:5])]
        other = greedy()
        batch = np.concatenate([rows(1, seed=3), logits])
        found = sample_batch([other, Sampler(Sampling(**settings), [1])], batch, [[], []], [(), drafts])
        assert [len(run) for run in found] == [1, right + 1]
        assert found[1] == each[: right + 1]


def test_a_run_of_drafts_ends_with_the_answer_or_where_logits_fail():
    logits = rows(4)
    tokens = logits.argmax(axis=1).tolist()
    logits[3] = np.nan
    sampler = Sampler(Sampling(temperature=0.0), [1], ends=frozenset([tokens[1]]))
    ((first, last),) = sample_batch([sampler], logits, [[]], [tokens[:3]])
    assert (first.token, last.token) == (tokens[0], tokens[1])
    (run,) = sample_batch([greedy()], logits, [[]], [tokens[:3]])
    assert [sampled.token for sampled in run[:3]] == tokens[:3]
    assert "not finite at token 4 of the answer" in str(run[3])


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 3.0, "top_p": 0.5, "presence_penalty": 2.0}]
)
def test_logprobs_are_those_of_the_logits_as_they_come(settings):
    logits = rows(1)[0]
    sampled = Sampler(Sampling(seed=1, logprobs=4, **settings), [1]).sample(logits, [int(logits.argmax())])
    expected = np.log(softmax(logits))
    assert sampled.logprob == pytest.approx(expected[sampled.token], abs=1e-5)
    order = np.argsort(-expected, kind="stable")[:4]
    assert [token for token, _ in sampled.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in sampled.top], expected[order], atol=1e-5)


def test_as_many_logprobs_are_reported_as_asked_for():
    logits = np.zeros(VOCABULARY, np.float32)
    logits[7] = 1
    assert greedy().sample(logits, []) == (7, None, ())
    chosen, none = greedy(logprobs=0).sample(logits, [])[1:]
    assert none == [] and chosen == pytest.approx(1 - np.log(VOCABULARY - 1 + np.e))
    assert [token for token, _ in greedy(logprobs=3).sample(logits, []).top] == [7, 0, 1]
    assert len(greedy(logprobs=1000).sample(logits, []).top) == VOCABULARY


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail_their_request_alone(bad):
    logits = rows(3)
    logits[1, 5] = bad
    samplers = [Sampler(Sampling(seed=1), [1], name) for name in ("first", "broken", None)]
    found = [run[0] for run in sample_batch(samplers, logits, [[]] * 3, [()] * 3)]
    assert [found[place].token for place in (0, 2)] == [
        Sampler(Sampling(seed=1), [1]).sample(logits[place], []).token for place in (0, 2)
    ]
    assert isinstance(found[1], ServingError) and "adapter 'broken' are not finite at token 1" in str(found[1])
    with pytest.raises(ServingError, match="base model are not finite at token 3"):
        greedy().sample(logits[1], [4, 4])
    with pytest.raises(ServingError, match="not finite"):
        greedy().sample(np.full(9, -np.inf, np.float32), [])


def test_extreme_logits_and_temperatures_draw_without_a_warning(recwarn):
    logits = np.array([-3e38, 3e38, -np.inf, 0.0, 3e38], np.float32)
    for temperature in (1e-5, 1.0, 1e38):
        drawn = Sampler(Sampling(temperature=temperature, seed=1, logprobs=2), [1])
        found = [drawn.sample(logits, []) for _ in range(50)]
        assert {sampled.token for sampled in found} == ({1, 3, 4} if temperature > 1 else {1, 4})
        assert found[0].top == [(1, pytest.approx(-np.log(2))), (4, pytest.approx(-np.log(2)))]
        assert temperature < 2 or -9999.0 in [sampled.logprob for sampled in found]
    assert not recwarn.list


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("-inf")),
        ("logprobs", -1),
    ],
)
def test_numbers_without_a_meaning_are_refused(name, value):
    with pytest.raises(RequestError, match=f"^{name} is {value}: it must be"):
        Sampler(Sampling(**{name: value}), [1])


def test_no_end_is_chosen_before_min_tokens():
    logits = rows(1)[0]
    order = np.argsort(-logits)
    sampler = Sampler(Sampling(temperature=0.0, min_tokens=2), [1], ends=frozenset(order[:2].tolist()))
    assert [sampler.sample(logits, [5] * count).token for count in range(4)] == order[[2, 2, 0, 0]].tolist()


def test_the_last_token_of_a_bad_word_does_not_follow_the_others():
    logits = rows(1)[0]
    first, second, third = np.argsort(-logits)[:3].tolist()
    sampler = greedy(bad_words=((7, 8, first), (second,)))
    chosen = [sampler.sample(logits, before).token for before in ([], [8], [7, 8], [7, 8, 8], [3, 7, 8])]
    assert chosen == [first, first, third, first, third]


def test_where_a_grammar_allows_nothing_else_bans_do_not_count():
    class Only:
        def matcher(self, ends):
            return self

        def mask(self, logits, generated):
            return np.where(np.arange(len(logits)) == 4, logits, np.float32(-np.inf))

    settings = {"min_tokens": 3, "bad_words": ((4,),), "grammar": Only()}
    assert Sampler(Sampling(**settings), [1], ends=frozenset({4})).sample(rows(1)[0], []).token == 4


@pytest.mark.parametrize(
    "settings, name",
    [({"min_p": 1.5}, "min_p"), ({"min_tokens": 99}, "min_tokens is 99"), ({"bad_words": ((),)}, "bad_words")],
)
def test_what_has_no_meaning_is_refused(settings, name):
    with pytest.raises(RequestError, match=name):
        Sampler(Sampling(**settings), [1])

"""Each rule of AdapterHealth on a report that provokes it and on one that must not; and when a finding is new."""

import dataclasses
import json
import math

import pytest

from mindlora.training.health.report import RULES, CellHealth, HealthReport, HealthRules, PartHealth

LATE, SIZE = 200, 10_000
PATHS = [f"model.layers.{layer}.attention.{name}" for layer in range(4) for name in ("wq", "wv")]
FIRST = PATHS[0]
# A rate that has not changed is one that has settled.
RATE = 1e-4


def part(**changes):
    return dataclasses.replace(PartHealth(SIZE, norm=1.0, zeros=0.0, gradient_norm=0.01, update=5e-3), **changes)


def cell(a=None, b=None, **changes):
    """A healthy cell of rank 8 with changes to A, to B and to itself."""
    parts = {"A": part(**(a or {})), "B": part(**(b or {}))}
    sound = CellHealth(rank=8, zero_part="B", parts=parts, effective_rank=4.0, change_norm=1.0, change=0.01)
    return dataclasses.replace(sound, **changes)


def report(step=LATE, everywhere=None, **at_first):
    """A healthy report with changes to the first cell, or to all."""
    cells = {path: cell(**(everywhere or {})) for path in PATHS}
    if at_first:
        cells[FIRST] = cell(**at_first)
    return HealthReport(step, cells)


def found(judged, *earlier, rate=RATE):
    """{(rule, path)} that hold at a report after a sound one and ``earlier`` ones."""
    rules = HealthRules()
    for before in (report(), *earlier):
        rules.judge(before, RATE)
    return {(finding.rule, finding.path) for finding in rules.judge(judged, rate)[0].findings}


def change_in_first_layer(norm):
    """A report in which both cells of the first layer have changed by ``norm`` and all others by 1."""
    cells = {path: cell(change_norm=norm if path.startswith("model.layers.0.") else 1.0) for path in PATHS}
    return HealthReport(LATE, cells)


GRADIENT_AT_EPSILON = 1e-8 * math.sqrt(2 * SIZE)


def gradients(norm):
    """Norms of the gradients of A and B whose norm together is ``norm``."""
    return {part: {"gradient_norm": norm / math.sqrt(2)} for part in "ab"}


CASES = {
    "not_finite: NaN": (report(b={"norm": math.nan}), {("not_finite", FIRST)}),
    "not_finite: infinite gradient": (report(a={"gradient_norm": math.inf}), {("not_finite", FIRST)}),
    "still_zero": (report(step=5, b={"zeros": 1.0, "update": None}), {("still_zero", FIRST)}),
    "still_zero: too early": (report(step=4, b={"zeros": 1.0, "update": None}), set()),
    "still_zero: A": (report(a={"zeros": 1.0}), {("still_zero", FIRST)}),
    "still_zero: some rows": (report(b={"zeros": 0.99}), set()),
    "vanishing_gradient": (report(**gradients(0.9 * GRADIENT_AT_EPSILON)), {("vanishing_gradient", FIRST)}),
    "vanishing_gradient: none at all": (report(**gradients(0.0)), {("vanishing_gradient", FIRST)}),
    "vanishing_gradient: above": (report(**gradients(1.1 * GRADIENT_AT_EPSILON)), set()),
    "vanishing_gradient: A alone, while B is zero": (report(a={"gradient_norm": 0.0}), set()),
    "vanishing_gradient: unknown": (report(a={"gradient_norm": None}, b={"gradient_norm": None}), set()),
    "saturated": (report(a={"update": 1e-6}, b={"update": 2e-6}), {("saturated", FIRST)}),
    "saturated: B moves": (report(a={"update": 1e-6}), set()),
    "saturated: no gradient, which is another rule's": (
        report(a={"update": 0.0, "gradient_norm": 0.0}, b={"update": 0.0, "gradient_norm": 0.0}),
        {("vanishing_gradient", FIRST)},
    ),
    "saturated: near the others": (report(a={"update": 6e-5}, b={"update": 6e-5}), set()),
    "rate_too_low": (report(everywhere={"a": {"update": 9e-5}}), {("rate_too_low", "")}),
    "rate_too_low: in one cell": (report(a={"update": 9e-5}), set()),
    "rate_too_low: B alone": (report(everywhere={"b": {"update": 9e-5}}), set()),
    "rate_too_low: A of embeddings": (report(everywhere={"a": {"update": 9e-5}, "zero_part": "A"}), set()),
    "rate_too_low: above": (report(everywhere={"a": {"update": 1.1e-4}}), set()),
    "rate_too_high": (report(everywhere={"a": {"update": 0.21}}), {("rate_too_high", "")}),
    "rate_too_high: below": (report(everywhere={"a": {"update": 0.19}}), set()),
    "no updates known": (report(everywhere={"a": {"update": None}, "b": {"update": None}}), set()),
    "rank_unused": (report(effective_rank=1.9), {("rank_unused", FIRST)}),
    "rank_unused: used": (report(effective_rank=2.1), set()),
    "rank_unused: too early": (report(step=49, effective_rank=1.0), set()),
    "rank_unused: small ranks": (report(rank=7, effective_rank=1.0), set()),
    "rank_exhausted": (report(effective_rank=7.3), {("rank_exhausted", FIRST)}),
    "rank_exhausted: not yet": (report(effective_rank=7.1), set()),
    "rank_exhausted: too early": (report(step=49, effective_rank=8.0), set()),
    "rank_exhausted: rank 1 cannot be": (report(rank=1, effective_rank=1.0), set()),
    "no effective rank": (report(effective_rank=None), set()),
    "one_layer": (change_in_first_layer(3.6), {("one_layer", "model.layers.0")}),
    "one_layer: others count": (change_in_first_layer(3.3), set()),
    "one_layer: too early": (dataclasses.replace(change_in_first_layer(9.0), step=49), set()),
    "one_layer: of two": (
        HealthReport(LATE, {path: cell(change_norm=9.0 if ".0." in path else 1.0) for path in PATHS[:4]}),
        set(),
    ),
    "one_layer: nothing has changed": (report(everywhere={"change_norm": 0.0}), set()),
    "one_layer: no product": (report(everywhere={"change_norm": None, "effective_rank": None}), set()),
    "sound": (report(), set()),
    "sound, at the first step": (report(step=1, everywhere={"b": {"update": None}}), set()),
    "no cells": (HealthReport(LATE, {}), set()),
}


@pytest.mark.parametrize("case", CASES)
def test_rule(case):
    judged, expected = CASES[case]
    assert found(judged) == expected


@pytest.mark.parametrize(
    "usual, now, holds",
    [(1.0, 11.0, True), (1.0, 9.0, False), (0.01, 0.9, False), (0.01, 1.1, True)],
    ids=["11 times", "9 times", "small all the same", "small before"],
)
def test_exploding_gradient(usual, now, holds):
    earlier = [report(**gradients(usual)) for _ in range(6)]
    assert found(report(**gradients(now)), *earlier) == ({("exploding_gradient", FIRST)} if holds else set())


def test_exploding_gradient_needs_a_usual_one():
    rules = HealthRules()
    for norm in (1e-3, 1e-3):
        rules.judge(report(**gradients(norm)), RATE)
    assert not rules.judge(report(**gradients(50.0)), RATE)[1]


SLOW = report(everywhere={"a": {"update": 1e-6}})


@pytest.mark.parametrize(
    "rates, holds",
    [
        ([1e-4, 1e-4], True),
        ([1e-5, 2e-5], False),
        ([1e-4, 8e-5], True),
        ([1e-4, 8e-5, 4e-5], False),
        ([1e-4], False),
        ([None, None], True),
    ],
    ids=["constant", "warm-up", "cosine, early", "cosine, late", "first measurement", "unknown"],
)
def test_updates_are_judged_where_the_rate_is_near_its_highest(rates, holds):
    rules = HealthRules()
    for rate in rates:
        findings = rules.judge(SLOW, rate)[0].findings
    assert [finding.rule for finding in findings] == (["rate_too_low"] if holds else [])


def test_updates_at_an_unknown_rate_are_judged_after_a_likely_warm_up():
    assert not HealthRules().judge(dataclasses.replace(SLOW, step=49))[0].findings


def test_a_finding_is_new_until_it_clears_and_again_after_that():
    rules, bad = HealthRules(), report(effective_rank=1.0)
    new = [[finding.path for finding in rules.judge(each, RATE)[1]] for each in (bad, bad, report(), bad)]
    assert new == [[FIRST], [], [], [FIRST]]
    # Another cell is new on its own; the report holds both.
    two = HealthReport(LATE, {**bad.cells, PATHS[1]: cell(effective_rank=1.0)})
    judged, new = rules.judge(two, RATE)
    assert [finding.path for finding in new] == [PATHS[1]]
    assert [finding.path for finding in judged.findings] == PATHS[:2]


def test_rules_go_on_where_they_stopped():
    rules, resumed = HealthRules(), HealthRules()
    for _ in range(4):
        rules.judge(report(effective_rank=1.0), RATE)
    resumed.restore(json.loads(json.dumps(rules.state())))
    explodes = report(effective_rank=1.0, **gradients(5.0))
    for each in (rules, resumed):
        judged, new = each.judge(explodes, RATE)
        assert [finding.rule for finding in new] == ["exploding_gradient"]
        assert {finding.rule for finding in judged.findings} == {"exploding_gradient", "rank_unused"}
    assert resumed.state() == rules.state()


def test_every_rule_says_what_to_do():
    provoked = [case for case, expected in CASES.values() if expected]
    rules = HealthRules()
    rules.judge(report(), RATE)
    findings = [finding for each in provoked for finding in rules.judge(each, RATE)[0].findings]
    findings += rules.judge(report(**gradients(50.0)), RATE)[0].findings
    assert {finding.rule for finding in findings} == {rule.__name__ for rule in RULES}
    for finding in findings:
        assert finding.message.endswith(".") and finding.advice.endswith(".")

"""What AdapterHealth writes to the log."""

from mindlora.training.health.report import CellHealth, Finding, HealthReport, PartHealth, event_message, summary, table


def cell(size=1.0, **changes):
    parts = {name: PartHealth(8, norm=size, zeros=0.0, gradient_norm=3e-3, update=2e-3) for name in "AB"}
    return CellHealth(**{"rank": 8, "zero_part": "B", "parts": parts, "effective_rank": 4.0 * size, **changes})


def finding(path, rule="rank_unused", message="The effective rank is 1.0 of 8."):
    return Finding(rule, path, message, "A smaller lora_rank would do as much.")


def test_summary_has_the_medians_of_what_is_known():
    sizes = {"first": 1.0, "second": 1.5, "third": 0.25}
    report = HealthReport(7, {path: cell(size) for path, size in sizes.items()}, [finding("first")])
    assert summary(report) == (
        "3 adapters, effective rank 4, update of A 0.002, update of B 0.002, gradient 0.0042 (medians); 1 finding"
    )
    vectors = CellHealth(8, "lambda_b", {"lambda_b": PartHealth(8, norm=1.0, zeros=0.0)}, change=0.5)
    assert summary(HealthReport(7, {"first": vectors})) == (
        "1 adapters, change of the weights 0.5 (medians); no findings"
    )


def test_message_of_one_cell_of_several_and_of_the_whole_run():
    advice = "A smaller lora_rank would do as much."
    assert event_message([finding("layers.0.wq")]) == (
        f"rank_unused at layers.0.wq. The effective rank is 1.0 of 8. {advice}"
    )
    several = [finding(f"layers.{layer}.wq") for layer in range(3)]
    assert event_message(several) == (
        f"rank_unused at layers.{{0..2}}.wq. At layers.0.wq: The effective rank is 1.0 of 8. {advice}"
    )
    assert event_message([finding("", "rate_too_low", "It is low.")]) == f"rate_too_low. It is low. {advice}"


def test_table_has_the_cells_of_the_findings():
    cells = {f"layers.{layer}.wq": cell() for layer in range(40)}
    cells["layers.2.wq"] = CellHealth(
        8, "B", {"A": PartHealth(8, norm=2.0, zeros=0.0)}, effective_rank=None, change=0.0125
    )
    found = [finding("layers.1.wq"), finding("layers.2.wq"), finding("layers.1.wq", "still_zero"), finding("layers.9")]
    head, first, second = table(HealthReport(7, cells), found).split("\n")
    assert head.split() == ["cell", "|A|", "|B|", "gradient", "update", "A", "update", "B", "rank", "change"]
    assert first.split() == ["layers.1.wq", "1", "1", "0.0042", "0.002", "0.002", "4", "of", "8", "-"]
    assert second.split() == ["layers.2.wq", "2", "-", "-", "-", "-", "-", "of", "8", "0.0125"]
    long = table(HealthReport(7, cells), [finding(path) for path in cells]).split("\n")
    assert len(long) == 18 and long[-1] == "and 24 more"

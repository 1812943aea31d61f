"""The HTML page of one or several runs: gathers the contents of its template from their histories."""

import dataclasses
import datetime
import functools
import json
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import ConfigError
from mindlora.training.report import charts, heat_map
from mindlora.training.report.charts import unit_of_bytes
from mindlora.training.report.history import History

# Tables of runs' configurations: all keys, keys with values other than the defaults, and keys that differ.


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a configuration, such as ``optimizer.betas``; the last two are None if the default is not known."""

    key: str
    value: str
    default: Optional[str]
    changed: Optional[bool]


def flat(configuration: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns {dotted key: value}. The key of a callback has its name instead of its number in the list."""
    leaves: Dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                visit(f"{path}.{key}" if path else str(key), item)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                place = f"{path}.{item.get('type', number)}"
                place = f"{place}[{number}]" if place in named else place
                named.add(place)
                visit(place, {key: entry for key, entry in item.items() if key != "type"} or "listed")
        else:
            leaves[path] = value

    named: set = set()
    visit("", configuration)
    return leaves


def settings(run: Mapping[str, Any]) -> List[Setting]:
    """Returns all settings of a configuration, from the record "run" of a history."""
    defaults = run.get("defaults") or {}
    return [
        Setting(
            key,
            text(value),
            text(defaults[key]) if key in defaults else None,
            text(value) != text(defaults[key]) if key in defaults else None,
        )
        for key, value in flat(run.get("configuration") or {}).items()
    ]


def differing(runs: Sequence[Mapping[str, Any]]) -> List[tuple]:
    """Returns (key, texts) for each key whose value differs among runs; "-" for a run that lacks it."""
    flats = [flat(run.get("configuration") or {}) for run in runs]
    rows = []
    for key in dict.fromkeys(key for leaves in flats for key in leaves):
        texts = [text(leaves[key]) if key in leaves else "-" for leaves in flats]
        if len(set(texts)) > 1:
            rows.append((key, texts))
    return rows


def text(value: Any) -> str:
    """Returns a value as it would appear in a YAML; an integral float as an integer."""
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


# Key of the description of a run -> title of its table.
_FACTS = (("data", "Data"), ("versions", "Versions"), ("machine", "Machine"))
# Number of events in the page's table; the rest are in metrics.jsonl.
_EVENTS = 200


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on the page.

    Attributes:
        name (str): A name that distinguishes the run from the others.
        summary (list): (label, value) of the run's key figures.
        events (list of dict): The run's first events; ``more_events`` others are left out.
        health (list of HeatMap): The last measurement of the adapter's health, at ``health_step``.
        findings (list of dict): The findings of the health rules.
        answers (list): (prompt, [(step, answer)]) of each prompt.
        evaluation (dict or None): The last results of mindlora eval: "tables" and "verdicts".
        facts (list): (title, [(label, value)]) of the run's data, versions and machine.
    """

    name: str
    color: int
    directory: str
    summary: List[Tuple[str, str]]
    events: List[dict]
    more_events: int
    health_step: int
    health: List[heat_map.HeatMap]
    findings: List[dict]
    answers: List[Tuple[str, List[Tuple[int, str]]]]
    evaluation: Optional[dict]
    settings: List[Setting]
    facts: List[Tuple[str, List[Tuple[str, str]]]]


def render(histories: Sequence[History], comparisons: Sequence[Any] = (), live: Optional[str] = None) -> str:
    """Returns the HTML page of the runs with these histories, and of comparisons of their answers.

    With ``live``, the nonce of its styles and scripts, the page keeps requesting itself from its server.
    """
    template = _template()
    names = run_names([history.directory for history in histories])
    return template.render(
        runs=[_run(history, name, number) for number, (history, name) in enumerate(zip(histories, names))],
        comparisons=comparisons,
        live=live,
        charts=charts.charts(histories, names),
        differing=differing([_latest_run(history) for history in histories]),
        heat=heat_map,
        width=charts.WIDTH,
        height=charts.HEIGHT,
        left=charts.LEFT,
        right=charts.RIGHT,
        top=charts.TOP,
        bottom=charts.BOTTOM,
        written=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


@functools.lru_cache(maxsize=None)
def _template() -> Any:
    """Returns the page's template, which is compiled once: a live run writes its page again and again."""
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            "report.html needs Jinja2, which is not installed. Run pip install 'mindlora[report]', and then mindlora "
            "report."
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html")


def run_names(directories: Sequence[str]) -> List[str]:
    """Returns names that distinguish the runs in ``directories``: their paths without the common parts."""
    paths = [os.path.abspath(directory) for directory in directories]
    if len(set(paths)) < len(paths) or len(paths) == 1:
        return [os.path.basename(path) for path in paths]
    parts = [path.split(os.sep) for path in paths]
    while len({part[0] for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[1:] for part in parts]
    while len({part[-1] for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[:-1] for part in parts]
    return [os.sep.join(part) for part in parts]


def _run(history: History, name: str, color: int) -> Run:
    run = _latest_run(history)
    health = history.health[-1] if history.health else None
    return Run(
        name=name,
        color=color,
        directory=os.path.abspath(history.directory),
        summary=summary(history),
        events=history.events[:_EVENTS],
        more_events=max(0, len(history.events) - _EVENTS),
        health_step=health["step"] if health else None,
        health=heat_map.draw_health(health["health"]) if health else [],
        findings=health["health"]["findings"] if health else [],
        answers=_answers(history),
        evaluation=history.evaluations[-1]["evaluation"] if history.evaluations else None,
        settings=settings(run),
        facts=[(title, _texts(run[key])) for key, title in _FACTS if run.get(key)],
    )


def _texts(facts: Mapping[str, Any]) -> List[Tuple[str, str]]:
    return [(label, text(value)) for label, value in facts.items()]


def _latest_run(history: History) -> dict:
    """Returns the description of the run from its last start or resumption."""
    return history.runs[-1]["run"] if history.runs else {}


def _answers(history: History) -> List[Tuple[str, List[Tuple[int, str]]]]:
    """Returns (prompt, [(step, answer)]) with the first and the last answer to each prompt."""
    answers: dict = {}
    for record in sorted(history.answers, key=lambda record: record["step"]):
        for row in record["answers"]:
            rated = f" (reward {row['reward']:.3g})" if "reward" in row else ""
            answers.setdefault(str(row["prompt"]), []).append((record["step"], f"{row['answer']}{rated}"))
    return [(prompt, [versions[0]] + versions[1:][-1:]) for prompt, versions in answers.items()]


def summary(history: History) -> List[Tuple[str, str]]:
    """Returns (label, value) of a run's known key figures."""
    figures = [
        ("Steps", _steps(history)),
        ("Reward", _reward(history)),
        ("Training loss", _training_loss(history)),
        ("Held-out loss", _held_out_loss(history)),
        ("Right rewards, held out", _held_out_accuracy(history)),
        ("Tokens", _tokens(history)),
        ("Tokens per second, median", _median(history.series("tokens_per_second")[1])),
        ("Time in training", _duration(history)),
        ("Skipped steps", _skipped(history)),
        ("Most memory in use", _memory(history)),
        ("Resumed", ", ".join(f"at step {run['step']:,}" for run in history.runs[1:]) or None),
    ]
    return [(label, value) for label, value in figures if value is not None]


def _steps(history: History) -> Optional[str]:
    if not history.steps:
        return "0"
    total = history.runs[-1]["run"].get("total_steps") if history.runs else None
    done = history.steps[-1]["step"]
    return f"{done:,} of {total:,}" if total and total != done else f"{done:,}"


def _reward(history: History) -> Optional[str]:
    _, rewards = history.series("reward")
    return f"{rewards[0]:.4g} → {charts.smoothed(rewards)[-1]:.4g}" if len(rewards) else None


def _training_loss(history: History) -> Optional[str]:
    _, losses = history.series("loss")
    if not len(losses) or charts.is_of_policy(history):
        return None
    return f"{losses[0]:.4g} → {charts.smoothed(losses)[-1]:.4g}"


def _held_out_loss(history: History) -> Optional[str]:
    steps, losses = history.series("held_out_loss")
    if not np.isfinite(losses).any():
        return None
    best = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
    return f"{losses[best]:.4g} at step {steps[best]:,}" + (
        "" if best == len(losses) - 1 else f", last {losses[-1]:.4g}"
    )


def _held_out_accuracy(history: History) -> Optional[str]:
    _, shares = history.series("held_out_reward_accuracy")
    return f"{shares[0]:.1%} → {shares[-1]:.1%}" if len(shares) else None


def _tokens(history: History) -> Optional[str]:
    _, tokens = history.series("tokens")
    return f"{np.nansum(tokens):,.0f}" if len(tokens) else None


def _median(values: np.ndarray) -> Optional[str]:
    values = values[np.isfinite(values)]
    return f"{np.median(values):,.0f}" if len(values) else None


def _duration(history: History) -> Optional[str]:
    """Returns the total time from each start to its last step, without the pauses in between."""
    steps, times = history.series("time")
    if not len(steps) or not history.runs:
        return None
    begins = [run["step"] for run in history.runs] + [float("inf")]
    seconds = 0.0
    for run, begin, end in zip(history.runs, begins, begins[1:]):
        stretch = times[(steps > begin) & (steps <= end)]
        if len(stretch) and run["run"].get("time") is not None:
            seconds += stretch[-1] - run["run"]["time"]
    minutes = round(seconds) // 60
    hours = round(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {round(seconds) % 60} s" if minutes else f"{seconds:.1f} s"


def _skipped(history: History) -> Optional[str]:
    skipped = [step["skipped"] for step in history.steps if step.get("skipped") is not None]
    empty = sum(step.get("tokens") == 0 for step in history.steps)
    learned_nothing = f", {empty:,} of them with nothing to learn" if empty else ""
    return f"{sum(map(bool, skipped)):,}{learned_nothing}" if skipped else None


def _memory(history: History) -> Optional[str]:
    _, memory = history.series("memory_bytes")
    if not len(memory):
        return None
    factor, unit = unit_of_bytes(float(memory.max()))
    return f"{memory.max() / factor:.3g} {unit}"

"""The HTML page of one run or several: what its template shows, gathered from their histories."""

import dataclasses
import datetime
import os
from typing import List, Sequence, Tuple

from mindlora.errors import ConfigError
from mindlora.training.history import History
from mindlora.training.report import curves, heat_map
from mindlora.training.report.charts import charts
from mindlora.training.report.configuration import Setting, differing, settings, text
from mindlora.training.report.summary import summary

# Events in the table of the page; the rest is in metrics.jsonl.
_EVENTS = 200


@dataclasses.dataclass(frozen=True)
class Run:
    """One run on the page.

    Attributes:
        name (str): What tells it from the others.
        color (int): Its colour.
        directory (str): Where its history is.
        summary (list): (label, value) of its key figures.
        events (list of dict): The first of its events.
        more_events (int): How many events are left out.
        health_step (int or None): The step of the last measurement of the adapter's health.
        health (list of HeatMap): That measurement.
        findings (list of dict): What its rules found.
        answers (list): (prompt, [(step, answer)]) of each prompt.
        settings (list of Setting): Its configuration.
        facts (list): (title, [(label, value)]) of its data, versions and machine.
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
    settings: List[Setting]
    facts: List[Tuple[str, List[Tuple[str, str]]]]


def render(histories: Sequence[History]) -> str:
    """Returns the HTML page of the runs with these histories."""
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            "The report needs Jinja2, which is not installed: pip install 'mindlora[report]', and make the report of "
            "the run with mindlora report."
        ) from error
    names = run_names([history.directory for history in histories])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html").render(
        runs=[_run(history, name, number) for number, (history, name) in enumerate(zip(histories, names))],
        charts=charts(histories, names),
        differing=differing([_latest_run(history) for history in histories]),
        heat=heat_map,
        width=curves.WIDTH,
        height=curves.HEIGHT,
        left=curves.LEFT,
        right=curves.RIGHT,
        top=curves.TOP,
        bottom=curves.BOTTOM,
        written=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def run_names(directories: Sequence[str]) -> List[str]:
    """Returns what tells the runs in ``directories`` apart: their paths without what all have in common."""
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
    run, health = _latest_run(history), history.health[-1] if history.health else None
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
        settings=settings(run),
        facts=[
            (title, [(label, text(value)) for label, value in run[key].items()])
            for key, title in (("data", "Data"), ("versions", "Versions"), ("machine", "Machine"))
            if run.get(key)
        ],
    )


def _latest_run(history: History) -> dict:
    """Returns the description of the run as it was last begun or resumed."""
    return history.runs[-1]["run"] if history.runs else {}


def _answers(history: History) -> List[Tuple[str, List[Tuple[int, str]]]]:
    """Returns (prompt, [(step, answer)]) of the first and of the last answer to each prompt."""
    answers: dict = {}
    for record in sorted(history.answers, key=lambda record: record["step"]):
        for row in record["answers"]:
            answers.setdefault(str(row["prompt"]), []).append((record["step"], str(row["answer"])))
    return [(prompt, [given[0]] + given[1:][-1:]) for prompt, given in answers.items()]

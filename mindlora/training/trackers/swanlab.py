"""SwanLab. Its environment variables apply, for instance SWANLAB_MODE=offline and SWANLAB_LOG_DIR.

It tracks one run per process: adapters that train side by side share the run, each with its name as a prefix.
"""

import contextlib
import os
import pathlib
import signal
import threading
from typing import Any, ClassVar, Iterator, Mapping, Optional, Sequence, Set

from mindlora.training.trackers.tracker import TrackedRun, Tracker, as_text


@contextlib.contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """Leaves Ctrl-C to GracefulStop: SwanLab's handler would end its run before the step is saved."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


class SwanLab(Tracker):
    package = "swanlab"
    # SwanLab installs signal handlers, and later restores the former ones.
    on_main_thread = True
    # The adapters that send to the process's run.
    sharing: ClassVar[Set[Optional[str]]] = set()

    def begin(self, run: TrackedRun) -> str:
        import swanlab

        self.adapter = run.adapter
        self.before = f"{run.adapter}/" if run.adapter else ""
        self.last_step = run.step
        if run.adapter and self.sharing and swanlab.has_run():
            self.run = swanlab.get_run()
        else:
            environment = os.environ.get
            self.sharing.clear()
            project = run.project or environment("SWANLAB_PROJ_NAME") or environment("SWANLAB_PROJECT") or "mindlora"
            with _keeping_interrupts():
                self.run = swanlab.init(
                    project=project,
                    name=run.name or environment("SWANLAB_EXP_NAME") or run.default_name,
                    tags=list(run.tags) or None,
                    id=run.id,
                    resume="allow" if run.id else None,
                )
        self.sharing.add(self.adapter)
        return self.run.id

    def configuration(self, facts: Mapping[str, Any]) -> None:
        self.run.config.update({self.adapter: dict(facts)} if self.adapter else dict(facts))

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._log(step, values)

    def event(self, step: int, kind: str, message: str) -> None:
        import swanlab

        self._log(step, {f"events/{kind}": swanlab.Text(message)})

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        import swanlab

        self._log(step, {"answers": [swanlab.Text(text) for text in as_text(answers)]})

    def report(self, path: str) -> None:
        import swanlab

        self._log(self.last_step, {"report": swanlab.Html(pathlib.Path(path))})

    def end(self, failed: bool) -> None:
        self.sharing.discard(self.adapter)
        if not self.sharing:
            with _keeping_interrupts():
                self.run.finish("crashed" if failed else "success", "The run has failed." if failed else None)

    def _log(self, step, values):
        self.last_step = step
        self.run.log({self.before + name: value for name, value in values.items()}, step=step)

"""Python processes that begin with MindFormers imported: forked from one that has done nothing else.

The import takes four seconds of a core, which is half of a tiny run. What is forked is a process of its own, with its
own arguments, folder, environment, output and exit code, and has yet to import mindlora. Only what MindSpore and
MindFormers read from the environment while they are imported is the same for all.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What nearly every run imports sooner or later, and none of it knows mindlora: with graph mode's Trainer, and with the
# PyNative one, which takes the stand-ins of pynative_cpu while it is imported.
OTHERS = ("mindspore.mindrecord", "asttokens", "jinja2", "llguidance")
IMPORTED = {
    "graph": ("mindformers", "mindformers.trainer", "mindformers.pet", "matplotlib.pyplot", *OTHERS),
    "pynative": ("mindformers", "mindformers.pynative.trainer", *OTHERS),
}
# The variable that names the folder in which the runs of all tests keep their graphs for each other.
GRAPHS = "MINDLORA_TEST_GRAPHS"
TIMEOUT = 300  # seconds, after which a process is ended by SIGALRM, unless it is given others
# Variables that the loader has read before Python runs: each value of them has a process of its own to be forked from.
OF_THE_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")


# In the process of the tests

_servers = {}


def run(arguments, folder, environment, trainer="graph", timeout=TIMEOUT, typed="", queued=False):
    """Does what ``subprocess.run([sys.executable, *arguments], ...)`` does, and returns the completed process.

    ``trainer`` is a key of IMPORTED, ``typed`` what stands in stdin. The process takes graphs that another run
    of this suite has compiled, unless the environment names a folder of its own. In PyNative it launches an operator
    after another; with ``queued`` it queues them for threads that launch them, as a user's program does.
    """
    if GRAPHS in os.environ and not environment.get("MINDLORA_GRAPH_CACHE"):
        environment = {**environment, "MINDLORA_GRAPH_CACHE": os.environ[GRAPHS]}
    words = [str(word) for word in arguments]
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr = (stack.enter_context(tempfile.NamedTemporaryFile("w+")) for _ in range(3))
        stdin.write(typed)
        stdin.flush()
        streams = [stream.name for stream in (stdin, stdout, stderr)]
        request = {"arguments": words, "folder": str(folder), "environment": environment, "timeout": timeout}
        # On the Ascend backend, which is preloaded, how operators are launched is under test.
        request["queued"] = queued or "LD_PRELOAD" in environment
        server = _running_server(trainer, environment)
        server.stdin.write(json.dumps({**request, "streams": streams}) + "\n")
        server.stdin.flush()
        code = server.stdout.readline()
        assert code, f"the process that forks ended with exit code {server.wait()}"
        return subprocess.CompletedProcess([sys.executable, *words], int(code), stdout.read(), stderr.read())


def _running_server(trainer, environment):
    """Returns the process that forks, which begins with the first call and ends with this process."""
    key = (trainer, *map(environment.get, OF_THE_LOADER))
    if key not in _servers:
        folder = tempfile.mkdtemp(prefix="mindlora-test-forked-")
        given = environment if any(map(environment.get, OF_THE_LOADER)) else os.environ
        command = [sys.executable, os.path.abspath(__file__), trainer]
        pipe = subprocess.PIPE
        variables = {**given, "OM_MODULES_CACHE": os.path.join(folder, "modules")}
        server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder, env=variables)
        atexit.register(server.communicate)
        _servers[key] = server
    return _servers[key]


# In the process that forks, and in those that it forks


def _next_request(trainer):
    """Forks a process for each line of stdin and answers with its exit code; in the forked one, returns the line."""
    # What is imported may print.
    answers = os.dup(1)
    os.dup2(2, 1)
    given = dict(os.environ)
    if trainer == "pynative":
        _replace_operators()
    for name in IMPORTED[trainer]:
        importlib.import_module(name)
    _keep_compiled_templates(os.path.abspath("templates"))
    # Fills the tables of every module's file, which MindSpore's parser asks inspect for.
    inspect.getmodule(_run.__code__)
    set_meanwhile = {name: value for name, value in os.environ.items() if given.get(name) != value}
    sys.stdout.flush()
    for line in sys.stdin:
        parsed = os.path.abspath("parsed.json")
        _parse_before(parsed)
        gc.freeze()
        child = os.fork()
        if not child:
            os.close(answers)
            request = json.loads(line)
            return {**request, "environment": {**set_meanwhile, **request["environment"]}, "parsed": parsed}
        _, status = os.waitpid(child, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
    return None


def _keep_compiled_templates(folder):
    """Lets the forked processes share what Jinja2 compiles of files: a page's template takes a fifth of a second."""
    jinja2 = sys.modules["jinja2"]
    os.makedirs(folder)
    keep = jinja2.FileSystemBytecodeCache(folder)
    jinja2.Environment.__init__ = functools.partialmethod(jinja2.Environment.__init__, bytecode_cache=keep)


def _parse_before(path):
    """Parses what the processes forked so far had to parse, as the next one may compile the same functions."""
    if os.path.exists(path):
        from mindspore._extends.parse.parser import Parser

        with open(path, encoding="utf-8") as file:
            for key, text, column in json.load(file):
                Parser.ast_cache[key] = (sys.modules["asttokens"].ASTTokens(text, parse=True), column)
        os.unlink(path)


def _note_what_is_parsed(path):
    """Lets this process write down at its end what it had to parse; MindSpore finds it by the hash of its text."""
    from mindspore._extends.parse.parser import Parser

    def note():
        new = [(key, tokens.text, column) for key, (tokens, column) in Parser.ast_cache.items() if key not in known]
        if new:
            # The ranks that a forked process forks end at once.
            own = f"{path}.{os.getpid()}"
            with open(own, "w", encoding="utf-8") as file:
                json.dump(new, file)
            os.replace(own, path)

    known = set(Parser.ast_cache)
    atexit.register(note)


def _replace_operators():
    """Puts the stand-ins of pynative_cpu where MindFormers looks for operators while it is imported."""
    sys.path.append(ROOT)
    from tests.support import pynative_cpu

    sys.path.remove(ROOT)
    pynative_cpu.replace_operators()


def _become(request):
    """Makes this process what Python would have started: folder, environment, streams."""
    import mindspore
    import numpy as np

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]
    for number, path in enumerate(request["streams"]):
        os.dup2(os.open(path, os.O_RDWR), number)
    np.random.seed()
    signal.alarm(request["timeout"])
    if not request["queued"]:
        # Else PyNative's threads spin while they wait for each other, for four times the work of a tiny run.
        mindspore.runtime.launch_blocking()


def _run(first, *words):
    """Runs what Python's command line names: a module after -m, a program after -c, a file."""
    if first == "-m":
        sys.argv, sys.path[0] = list(words), os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = [first, *words], os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def _end(code):
    """Ends this process as Python does, but leaves its objects where they are: to free them takes a quarter second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main(trainer):
    asked = _next_request(trainer)
    if not asked:
        return
    _become(asked)
    _note_what_is_parsed(asked["parsed"])
    try:
        _run(*asked["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code or 0
    # The ranks of a run wait for each other while MindSpore frees what connects them.
    if "MS_ROLE" in os.environ or not isinstance(code, int):
        sys.exit(code)
    _end(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1])

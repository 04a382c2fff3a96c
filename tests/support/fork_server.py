"""Runs programs that are named on its standard input, each in a fork of this process, where Lightning is imported.

That import takes longer than most examples. Nothing that the tests' own process has changed is in this one: warning
filters, loggers, the package itself. A line is ``[folder, output, program, *arguments]`` in JSON; the answer is the
program's exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys

import lightning.pytorch.cli  # noqa: F401


def serve() -> None:
    """Answer every line."""
    for line in sys.stdin:
        folder, output, *sys.argv = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(600)  # seconds
            os.chdir(folder)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
            break  # an error has ended this process with its traceback before
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()

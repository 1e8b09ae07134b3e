"""The entry of a worker process: code and data that are not trusted are handled here, where it can be killed.

It is started by path with the path of one worker file, which has `answer` (a request's fields to an answer, both
JSON objects) and `MEMORY_LIMIT` (bytes of address space), and imports nothing else of this package. A line on
standard input is a number of seconds and a request; each is answered with one line. The kernel ends the process when
one answer takes more processor time than its seconds; memory is capped for the whole process.
"""

from __future__ import annotations

import contextlib
import json
import resource
import runpy
import signal
import sys


def main() -> None:
    # An interrupt is for the parent, which will end this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = runpy.run_path(sys.argv[1])
    limit = worker["MEMORY_LIMIT"]
    with contextlib.suppress(ValueError, OSError):  # not every system caps the address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        seconds, _, request = line.partition(" ")
        # SIGPROF keeps its default action, which is to end the process: nothing that runs here can hold it off.
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        answer = worker["answer"](**json.loads(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

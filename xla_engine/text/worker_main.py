"""Entry point of a worker process, which handles untrusted code and data and can be killed.

It runs as a script with the path of a worker file as its argument, and imports nothing else of this package. The
worker file defines `answer` (from the fields of a request to an answer, both JSON objects) and `MEMORY_LIMIT` (bytes
of address space). Each line on standard input is a number of seconds and a request, and is answered with one line. The
kernel ends the process if an answer takes more CPU time than its seconds. The memory limit is for the whole process.
"""

import contextlib
import json
import resource
import runpy
import signal
import sys


def main() -> None:
    # Ctrl-C is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = runpy.run_path(sys.argv[1])
    limit = worker["MEMORY_LIMIT"]
    with contextlib.suppress(ValueError, OSError):  # not every system limits the address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        seconds, _, request = line.partition(" ")
        # SIGPROF keeps its default action, which ends the process; code that runs here cannot block it.
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        answer = worker["answer"](**json.loads(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

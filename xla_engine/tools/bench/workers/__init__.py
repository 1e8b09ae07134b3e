"""One file per engine, each run by `worker.py` in the interpreter that has that engine installed."""

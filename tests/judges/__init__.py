"""Other projects' tests of such servers, run against `xla-engine serve`: `python -m tests.judges --help`."""

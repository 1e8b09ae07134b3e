"""`python -m xla_engine` is `xla-engine`."""

from xla_engine.cli import main

main(prog_name="xla-engine")

"""`xla-engine join`: let this host's devices share a model with an engine on another host."""

import click

from xla_engine.cli import _common


@click.command(short_help="Share the model of an engine on another host.")
@click.argument("coordinator", metavar="HOST:PORT")
@click.option(
    "--host-rank",
    type=click.IntRange(1),
    required=True,
    help="This host's number, from 1; each is used once.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="The same model on this host.  [default: the engine's own name of it]",
)
def join(coordinator: str, host_rank: int, model: str | None) -> None:
    """Add this host's devices to those of an engine that was started with --num-hosts and --coordinator HOST:PORT.

    The engine sends its options and what to run; this process has neither requests nor results, and ends with the
    engine.

    \b
    Exit status: 0 the engine has closed, 1 its process or its host is gone, 2 could not start.

    \b
    Example, on hosts 10.0.0.1 and 10.0.0.2 with four devices each:
      xla-engine run in.jsonl -o out.jsonl --tensor-parallel-size 8 --num-hosts 2 --coordinator 10.0.0.1:8470
      xla-engine join 10.0.0.1:8470 --host-rank 1
    """
    with _common.startup_errors():
        from xla_engine.open_engine import join_hosts

        click.echo(f"waiting for an engine at {coordinator}", err=True)
        join_hosts(coordinator, host_rank, model, lambda count: _say_ready(host_rank, count))


def _say_ready(rank: int, count: int) -> None:
    click.echo(f"host {rank} of {count} is ready", err=True)

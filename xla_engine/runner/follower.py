"""A host that is not the first: it starts the steps that the first host plans, and reads none of their results."""

from xla_engine.runner.hosts import Hosts
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.runner import Runner
from xla_engine.runner.step_messages import StepReader


def follow(runner: Runner, hosts: Hosts) -> None:
    """Run until the first host closes its engine. Raises what a failed step raises."""
    reader, before = StepReader(runner.spec.config.vocab_size), list[InFlight]()
    for message in hosts.messages():
        match message["op"]:
            case "start":
                plan = reader.plan(message)
                before.append(runner.start(plan, reader.settings))
                if len(before) > 1:  # as the engine, so that no more steps are in flight here than there
                    runner.wait(before.pop(0))
            case "discard":
                runner.discard(message["request_id"])
            case "reset":
                before.clear()
                runner.reset()
            case "blank":
                before.clear()
                runner.blank()

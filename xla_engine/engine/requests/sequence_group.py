"""The n sequences of one request: the scheduler runs them as separate requests, the caller reads them as one."""

from dataclasses import replace

from xla_engine.engine.requests.output_collector import AllSeen
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.outputs import RequestMetrics, RequestOutput


class SequenceGroup:
    """The sequences of a request with n above 1, in order. Their collector receives the group in their place."""

    def __init__(self, request_id: str, parts: tuple[LiveSequence, ...]) -> None:
        self.request_id = request_id
        self.parts = parts
        for part in parts:
            part.reader = self

    @property
    def finished(self) -> bool:
        return all(part.finished for part in self.parts)

    def news(self, seen: AllSeen, *, only_ended: bool = False) -> RequestOutput:
        """See `Readable`."""
        parts = [
            part.new_part(index, seen[index], only_ended=only_ended) for index, part in enumerate(self.parts)
        ]
        ends = [part.finished_time or 0.0 for part in self.parts]
        return replace(
            self.parts[0].result(tuple(part for part in parts if part is not None)),
            request_id=self.request_id,
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=self.parts[0].arrival_time, finished_time=max(ends) if self.finished else None
            ),
            error=next((part.error for part in self.parts if part.error is not None), None),
        )

    def output(self) -> RequestOutput:
        """The cumulative output of all sequences.

        Times: the first admission, the first token, the end of the last sequence; token times are those of all.
        """
        outputs = [part.output() for part in self.parts]
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        admitted = [each.admitted_time for each in metrics if each.admitted_time is not None]
        token_times = sorted(time for each in metrics for time in each.token_times)
        return replace(
            outputs[0],
            request_id=self.request_id,
            outputs=tuple(replace(output.outputs[0], index=index) for index, output in enumerate(outputs)),
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=metrics[0].arrival_time,
                admitted_time=min(admitted, default=None),
                first_token_time=token_times[0] if token_times else None,
                finished_time=max(each.finished_time or 0.0 for each in metrics) if self.finished else None,
                token_times=tuple(token_times),
                sequence_token_times=tuple(each.token_times for each in metrics),
            ),
            error=next((output.error for output in outputs if output.error is not None), None),
        )

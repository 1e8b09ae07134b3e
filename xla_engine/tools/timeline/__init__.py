"""Draws the slots of a run over its steps: as a page, a figure, or trace events."""

from xla_engine.tools.timeline.model import Segment as Segment
from xla_engine.tools.timeline.model import Timeline as Timeline
from xla_engine.tools.timeline.model import read_timeline as read_timeline
from xla_engine.tools.timeline.write import write_timeline as write_timeline

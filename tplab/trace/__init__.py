"""What happened: a trace and its events, and what is read from it: the critical path, overlap, traffic, Perfetto."""

from tplab.trace.event import Event
from tplab.trace.recorder import Recorder
from tplab.trace.trace import Trace

__all__ = ["Event", "Recorder", "Trace"]

"""A trace of what happened, its events, and what can be read from it: critical path, overlap, traffic, Perfetto."""

from tplab.trace.critical_path import critical_path
from tplab.trace.event import Event
from tplab.trace.memory import Memory, RankMemory
from tplab.trace.overlap import Overlap, overlap
from tplab.trace.perfetto import to_perfetto
from tplab.trace.recorded import Merged, merge
from tplab.trace.recorder import Recorder
from tplab.trace.summary import summary
from tplab.trace.trace import Trace
from tplab.trace.traffic import Sent, Traffic, traffic_table

__all__ = [
    "Event",
    "Memory",
    "Merged",
    "Overlap",
    "RankMemory",
    "Recorder",
    "Sent",
    "Trace",
    "Traffic",
    "critical_path",
    "merge",
    "overlap",
    "summary",
    "to_perfetto",
    "traffic_table",
]

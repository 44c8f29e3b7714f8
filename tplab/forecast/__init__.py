"""Which layout? A forecast of time and memory for any model on any cluster, and why."""

from tplab.forecast.experts import experts_seconds, message_seconds
from tplab.forecast.forecast import Forecast, forecast
from tplab.forecast.memory import Held
from tplab.forecast.model import MODELS, Model, Part
from tplab.forecast.plan import Plan
from tplab.forecast.search import Plans, plans
from tplab.forecast.step import Step

__all__ = [
    "MODELS",
    "Forecast",
    "Held",
    "Model",
    "Part",
    "Plan",
    "Plans",
    "Step",
    "experts_seconds",
    "forecast",
    "message_seconds",
    "plans",
]

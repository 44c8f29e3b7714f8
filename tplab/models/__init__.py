"""Parts that the models of both frameworks share: configurations, the sharding of parameters, and states."""

from tplab.models.gpt import GPTConfig, GPTExperts, gpt_parameters, gpt_specs, gpt_state
from tplab.models.gpt2 import gpt2_config, gpt2_state
from tplab.models.state import async_state, blocking_state, classifier_specs

__all__ = [
    "GPTConfig",
    "GPTExperts",
    "async_state",
    "blocking_state",
    "classifier_specs",
    "gpt2_config",
    "gpt2_state",
    "gpt_parameters",
    "gpt_specs",
    "gpt_state",
]

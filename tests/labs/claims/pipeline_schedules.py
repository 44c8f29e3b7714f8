"""See `tests.labs.claims_of_layers`."""

from tests.labs.claims_of_layers import SCHEDULES, of

CLAIMS = of(SCHEDULES)

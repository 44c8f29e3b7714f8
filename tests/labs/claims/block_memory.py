"""See `tests.labs.claims_of_layers`."""

from tests.labs.claims_of_layers import MEMORY, of

CLAIMS = of(MEMORY)

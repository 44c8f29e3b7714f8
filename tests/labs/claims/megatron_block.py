"""See `tests.labs.claims_of_layers`."""

from tests.labs.claims_of_layers import BLOCK, of

CLAIMS = of(BLOCK)

"""See `tests.labs.claims_of_layers`."""

from tests.labs.claims_of_layers import SEQUENCE, of

CLAIMS = of(SEQUENCE)

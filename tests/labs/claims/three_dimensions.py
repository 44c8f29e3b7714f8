"""See `tests.labs.claims_of_layers`."""

from tests.labs.claims_of_layers import THREE, of

CLAIMS = of(THREE)

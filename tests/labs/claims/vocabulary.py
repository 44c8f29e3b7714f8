"""See `tests.labs.claims_of_layers`."""

from tests.labs.claims_of_layers import VOCABULARY, of

CLAIMS = of(VOCABULARY)

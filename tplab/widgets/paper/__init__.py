"""Parts that all widgets share: colours, units, pens, the card, and the data for the browser."""

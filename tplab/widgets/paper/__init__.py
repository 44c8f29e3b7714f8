"""What all widgets share: colours, units, pens, the card, and how data reaches the browser."""

"""A measurement and its verdict for a person: in a terminal, as a page, as a trace, and as JSON for later."""

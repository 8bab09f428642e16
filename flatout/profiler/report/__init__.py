"""A measurement and its verdict for a person: in a terminal, as a page, as a trace, and as JSON for later.

Files:

    page  The profile as one page that needs nothing else: no script, no font, no network
    text  Ledger and verdict as plain text, for logs and terminals
"""

"""A measurement and its verdict for a person: in a terminal, as a page, as a trace, and as JSON for later.

Files:

    page  The profile as one page that needs nothing else: no script, no font, no network
    save  Write a profile down: profile.json (numbers), profile.html (a page), trace.json (a timeline for Perfetto)
    text  Ledger and verdict as plain text, for logs and terminals
"""

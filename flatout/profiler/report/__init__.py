"""Ledger and verdict as plain text and as an HTML page.

Files:

    page  The profile as a self-contained HTML page: no script, no font, no network
    text  Ledger and verdict as plain text, for logs and terminals
"""

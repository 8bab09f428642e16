"""Copies of a run elsewhere, so that a machine may be taken away: `--mirror s3://bucket/folder`.

    save --snapshot--> Uploads (a thread) --objects, then a manifest--> URL/name     newest two are kept
    URL/name --newest manifest whose files are whole--> run folder --> the same command continues

Layout:  URL/name/objects/SHA256   content, under its own digest        URL/name/manifests/000012.json   written last
"""

from flatout.engine.mirror.mirror import Mirror

__all__ = ["Mirror"]

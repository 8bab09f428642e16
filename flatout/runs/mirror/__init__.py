"""Copies of a run elsewhere, so that a machine may be taken away: `--mirror s3://bucket/folder`.

    save --snapshot--> Uploads (a thread) --objects, then a manifest--> URL/name     newest two are kept
    URL/name --newest manifest whose files are whole--> run folder --> the same command continues

Layout:  URL/name/objects/SHA256   content, under its own digest        URL/name/manifests/000012.json   written last

Files:

    fetch     Bring a mirrored run back: the newest checkpoint whose files are whole becomes a run folder again
    mirror    `--mirror URL`, as a training sees it
    place     A folder behind an fsspec URL, and the few things a mirror does there
    snapshot  A run folder at the moment of a save
"""

from flatout.runs.mirror.mirror import Mirror

__all__ = ["Mirror"]

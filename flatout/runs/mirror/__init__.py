"""Copies of a run behind a URL, from which another machine can continue it: `--mirror s3://bucket/folder`.

    save --snapshot--> Uploads (a thread) --objects, then a manifest--> URL/name     the newest two are kept
    URL/name --newest manifest whose files are intact--> run folder --> the same command continues

Layout:  URL/name/objects/SHA256   content, under its own digest        URL/name/manifests/000012.json   written last

Files:

    fetch          Fetch a mirrored run: its newest intact checkpoint becomes a run folder again
    mirror         `--mirror URL`: fetches a run before training, uploads every checkpoint in the background
    remote_folder  A folder behind an fsspec URL, with the few operations that a mirror needs
    snapshot       Snapshots of a run folder at a save, and the manifests of mirrored checkpoints
"""

from flatout.runs.mirror.mirror import Mirror

__all__ = ["Mirror"]

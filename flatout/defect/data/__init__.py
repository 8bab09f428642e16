"""From files to canonical images: three aligned pictures of one pattern, target, ref1 and ref2.

Files:

    decode  A file's bytes to the array that was stored in it, with its planes in the order target, ref1, ref2
    find    Which files belong to a data set, in an order that is the same on every machine
    items   Images of a run as a store keeps them: canonical, from files of three planes or from pairs
"""

"""From image files to canonical images: three aligned planes, target, ref1 and ref2.

Files:

    decode  Decodes the bytes of a file to the stored array, with planes in the order target, ref1, ref2
    find    Lists the files of a data set, in an order that is the same on every machine
    items   Canonical images as a store keeps them, from files of three planes or from pairs of images
    pairs   Pairs of a template and an inspected image, as images of three planes
"""

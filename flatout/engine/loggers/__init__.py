"""Callbacks that pass a training's numbers on to other programs; each needs its package, imported when it is used."""

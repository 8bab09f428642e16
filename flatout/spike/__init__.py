"""Spike-camera guided video deblurring: blurry frames and spike streams in, sharp frames out. See docs/spike.md."""

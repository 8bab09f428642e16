"""Augmentation: all random numbers of a batch are drawn, then pictures and labels follow. See docs/augment.md.

`config.AugmentConfig` says how much, `source.TrainingSource` and `source.ValidationSource` give samples to a feed,
`device_source.ParameterSource` and `render_torch.TorchRender` do it on a device. The last two need no OpenCV.
"""

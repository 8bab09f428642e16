"""Augmentation: all random numbers of a batch are drawn, then pictures and labels follow. See docs/augment.md.

`config.AugmentConfig` says how much; `source.TrainingSource` and `source.ValidationSource` give samples made by OpenCV
to a feed; `device_input.training_input` and `device_input.validation_input` give batches made on a device, without it.
"""

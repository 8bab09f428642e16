"""Which devices `--device` means: see flatout.engine.device_choice."""

from flatout.engine.device_choice import choose_device, choose_devices

__all__ = ["choose_device", "choose_devices"]

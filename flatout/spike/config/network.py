"""Section MODEL: the network. Keys of the early VRT backbone are accepted and not used."""

from dataclasses import dataclass

from flatout.errors import ConfigError
from flatout.spike.config.unused import Extra


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a U of gated blocks, with a spike branch that joins at half resolution."""

    USE_SPIKE: bool = True
    """False: frames only, to see what the spikes are worth."""
    WIDTH: int = 32
    """Channels at full resolution; they double at every level."""
    ENC_BLOCKS: tuple[int, ...] = (1, 1, 1, 28)
    """Blocks per level on the way down."""
    MIDDLE_BLOCKS: int = 1
    """Blocks at the bottom."""
    DEC_BLOCKS: tuple[int, ...] = (1, 1, 1, 1)
    """Blocks per level on the way up."""
    SPIKE_BLOCKS: int = 2
    """Blocks of the spike branch, before it joins."""
    TEMPORAL: bool = False
    """Mix the frames of a clip at half resolution and at the bottom."""
    CHANNELS_LAST: bool = True
    """Memory format on a GPU."""
    VRT_CFG: Extra = None
    """Of the early VRT backbone; not used."""
    CHANNELS_PER_SCALE: Extra = None
    """Of the early VRT backbone; not used."""
    LAYERS: Extra = None
    """Of the early VRT backbone; not used."""
    VRT: Extra = None
    """Of the early VRT backbone; not used."""
    SPIKE_ENCODER: Extra = None
    """Of the early VRT backbone; not used."""
    SPIKE_TSA: Extra = None
    """Of the early VRT backbone; not used."""
    FUSE: Extra = None
    """Of the early VRT backbone; not used."""
    WINDOW_SIZE: Extra = None
    """Of the early VRT backbone; not used."""
    IMG_SIZE_H: Extra = None
    """Of the early VRT backbone; not used."""
    IMG_SIZE_W: Extra = None
    """Of the early VRT backbone; not used."""

    def __post_init__(self) -> None:
        if len(self.ENC_BLOCKS) != len(self.DEC_BLOCKS) or len(self.ENC_BLOCKS) < 2:
            raise ConfigError(
                f"ENC_BLOCKS={list(self.ENC_BLOCKS)} and DEC_BLOCKS={list(self.DEC_BLOCKS)} must be equally long, with "
                "at least 2 levels: spikes join at the second"
            )
        if self.WIDTH < 2 or self.WIDTH % 2:
            raise ConfigError(f"WIDTH={self.WIDTH} must be even")

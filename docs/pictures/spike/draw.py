"""Makes the figures of docs/spike.md and docs/spike-own-video.md, with the repository on the path:

    python docs/pictures/spike/draw.py SET WEIGHTS

SET is simulated from the sharp frames of spike_mini, three folders cars_a, cars_b and reds_000 in one:

    flatout spike simulate sharp SET --exposure 3 --stride 1 --hold 3 --test-share 0.34
    flatout spike train --config SET/train.yaml --set MODEL.WIDTH=8 --set MODEL.ENC_BLOCKS=[1,1] \
        --set MODEL.DEC_BLOCKS=[1,1] --set DATA.CROP_SIZE=96 --set DATA.CLIP_LEN=1 --set TRAIN.OPTIM.LR=3e-3 \
        --set TRAIN.SCHED.WARMUP_STEPS=20 --set TRAIN.TOTAL_STEPS=400 --set TRAIN.EMA_DECAY=0.98

The frames are from car-detection.mp4 of intel-iot-devkit/sample-videos, CC BY 4.0; blur and spikes are simulated.
"""

import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

import flatout.spike
from flatout.spike.view import ViewConfig, as_grey, view_stream
from flatout.spike.visuals import side_by_side, write_image

HERE = Path(__file__).parent
FRAME = "000004"


def labelled(image: np.ndarray, text: str, width: int) -> np.ndarray:
    """An image, grey or RGB, enlarged to a width, with a text above it."""
    rgb = image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)
    height = round(width * rgb.shape[0] / rgb.shape[1])
    large = cv2.resize(rgb, (width, height), interpolation=cv2.INTER_NEAREST)
    strip = np.full((20, width, 3), 255, np.uint8)
    cv2.putText(strip, text, (2, 14), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (0, 0, 0), 1, cv2.LINE_AA)
    return np.concatenate((strip, large))


def frame_of(sequence: Path, part: str, frame: str = FRAME) -> np.ndarray:
    return cv2.cvtColor(cv2.imread(str(sequence / part / f"{frame}.png")), cv2.COLOR_BGR2RGB)


def simulated(sequence: Path) -> np.ndarray:
    """Three frames of the video, and what the simulation makes of them."""
    stream = flatout.spike.open_stream(sequence / "spike" / f"{FRAME}.dat")
    spikes, middle = stream[:], len(stream) // 2
    # The stride of SET is 1: neighbouring sharp frames are neighbouring frames of the video.
    number = int(FRAME)
    shown = {
        f"video, frame {each + 1}": frame_of(sequence, "sharp", f"{each:06}") for each in range(number - 1, number + 2)
    }
    shown |= {
        "blur: mean of its 24 sub-frames": frame_of(sequence, "blur"),
        f"sharp: frame {number + 1}": frame_of(sequence, "sharp"),
        f"spike frame {middle} of {len(stream)}": as_grey(spikes[middle], 1.0),
    }
    images = [labelled(image, text, 256) for text, image in shown.items()]
    return np.concatenate((side_by_side(images[:3]), side_by_side(images[3:])))


def representations(sequence: Path) -> np.ndarray:
    """The middle of one stream in every representation, and its frames."""
    stream = flatout.spike.open_stream(sequence / "spike" / f"{FRAME}.dat")
    spikes, middle, gain = stream[:], len(stream) // 2, 2.0
    shown = {
        "raw": as_grey(spikes[middle], 1.0),
        "tfp, window 8": as_grey(flatout.spike.tfp(spikes, middle, 8), gain),
        f"tfp, window {len(stream)}": as_grey(flatout.spike.tfp(spikes, middle, len(stream)), gain),
        "tfi": as_grey(flatout.spike.tfi(spikes, middle, 64), gain),
        "voxel, bin 4 of 8": as_grey(flatout.spike.voxel(spikes, 8)[4], gain),
        "blurry frame": frame_of(sequence, "blur"),
        "sharp frame": frame_of(sequence, "sharp"),
    }
    images = [labelled(image, text, 256) for text, image in shown.items()]
    blank = np.full_like(images[0], 255)
    return np.concatenate((side_by_side(images[:4]), side_by_side([*images[4:], blank])))


def before_after(sequence: Path, weights: Path) -> np.ndarray:
    """Blurry, restored and sharp frame."""
    with tempfile.TemporaryDirectory() as folder:
        flatout.spike.load(weights, device="cpu").predict(sequence / "blur", sequence / "spike", folder)
        restored = cv2.cvtColor(cv2.imread(str(Path(folder) / f"{FRAME}.png")), cv2.COLOR_BGR2RGB)
    images = {"blurry": frame_of(sequence, "blur"), "restored": restored, "sharp": frame_of(sequence, "sharp")}
    return side_by_side([labelled(image, text, 384) for text, image in images.items()])


def main() -> None:
    sequence, weights = Path(sys.argv[1]) / "test/cars_b_000", Path(sys.argv[2])
    write_image(HERE / "representations.png", representations(sequence))
    write_image(HERE / "simulated.jpg", simulated(sequence))
    write_image(HERE / "before_after.jpg", before_after(sequence, weights))
    stream = flatout.spike.open_stream(sequence / "spike" / f"{FRAME}.dat")
    view_stream(stream, HERE / "view.jpg", ViewConfig(window=16, gain=2.0))


if __name__ == "__main__":
    main()
